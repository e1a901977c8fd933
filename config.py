"""The one configuration: a flat frozen dataclass, an ordinary Python file that binds `config`, and `key=value` overrides.

Names and defaults are those of TRL's `AsyncGRPOConfig`; the last block is this project's own.
"""
import importlib.util
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from overrides import ConfigError, parse_override
from tool_parsers import PARSERS

CHOICES = dict(
    save_strategy=("steps", "no"), hub_strategy=("every_save", "end"), loss_normalization=("micro_batch", "step"), weight_sync_backend=("disk", "nccl", "ipc"), attention_backend=("auto", "hub", "triton", "flex", "sdpa"),
    gradient_checkpointing=(True, False, "selective"), optim=("adamw_torch_fused", "adamw_torch", "sgd"), report_to=("none", "wandb", "tensorboard"),
    dtype=("auto", "bfloat16", "float16", "float32"),
    lr_scheduler_type=("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
                       "inverse_sqrt", "warmup_stable_decay"))     # of transformers.get_scheduler


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. Sizes are in tokens and times in seconds unless a comment says otherwise."""

    # What is trained, on what, for which reward
    model: str = ""                               # Hugging Face id or folder; also the name the vLLM server serves
    reward_funcs: typing.Any = None               # one callable or several; their rewards are summed
    train_dataset: typing.Any = None              # .jsonl path, `datasets` name, list of rows, datasets.Dataset, or a callable
    train_split: str = "train"                    # split of a `datasets` name
    eval_dataset: typing.Any = None               # as train_dataset, split "test"; evaluated while training goes on
    loop_cls: typing.Any = None                   # subclass of rollout.AsyncRolloutLoop
    tools: typing.Any = None                      # functions the model may call, with type hints and a Google docstring
    environment_factory: typing.Any = None        # makes an environment, or a dict of such for the dataset's environment column

    # Model
    model_init_kwargs: dict | None = None         # passed to from_pretrained
    dtype: str = "float32"                        # of the loaded weights; mixed precision keeps fp32 masters whatever it says
    trust_remote_code: bool = False
    peft_config: typing.Any = None                # peft.LoraConfig: train adapters instead of the model

    # Generation
    num_generations: int = 8
    max_completion_length: int = 2048             # of one request
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    chat_template_kwargs: dict | None = None
    max_tool_calling_iterations: int | None = None       # turns whose calls are run; None: no limit
    tool_parser: typing.Any = None                # name in tool_parsers.PARSERS, or a callable; None: the one that reads the chat template's own call

    # The vLLM server
    vllm_server_base_url: str | list = "http://localhost:8000"      # several: a list, or with commas between
    vllm_server_timeout: float = 1800.0

    # Objective
    epsilon: float = 0.2
    epsilon_high: float | None = None             # None: epsilon
    score_centering: bool = True
    vllm_importance_sampling_clip_min: float = 0.5
    vllm_importance_sampling_clip_max: float = 5.0
    num_sampler_logprobs: int = 8
    token_budget: int | None = None               # unique tokens of a row; None: the server's max_model_len

    # Asynchrony
    max_concurrent_rollouts: int = 512
    max_staleness: int = 4                        # weight updates
    weight_sync_steps: int = 1
    rollout_worker_timeout: float = 300.0

    # Optimization
    num_train_epochs: float = 3.0                 # passes over the prompts; ignored when max_steps > 0
    max_steps: int = -1
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "constant"
    lr_scheduler_kwargs: dict | None = None
    warmup_steps: float = 0                       # steps; below 1, a share of max_steps
    optim: str = "adamw_torch_fused"              # or adamw_torch, sgd
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    router_aux_loss_coef: float | None = None     # None: the model config's value; 0 disables

    # Precision, memory, devices
    bf16: bool | None = None                      # None: on a GPU, unless fp16 is set
    fp16: bool = False
    tf32: bool | None = None
    gradient_checkpointing: bool | str = True      # or "selective": attention and products are kept, the rest recomputed
    torch_compile: bool = False                   # of each decoder layer; set it on GPUs
    torch_compile_backend: str | None = None      # None: inductor
    torch_compile_mode: str | None = None
    use_cpu: bool = False
    ddp_timeout: int = 1800
    seed: int = 42
    data_seed: int | None = None                  # None: seed
    full_determinism: bool = False

    # Output
    output_dir: str | None = None                 # None: runs/<name of the config file>
    logging_steps: int = 1
    logging_first_step: bool = False
    log_completions: bool = False
    num_completions_to_print: int | None = None   # None: all of the last group
    disable_tqdm: bool | None = None              # None: a bar on a terminal, plain lines elsewhere
    report_to: str = "none"                       # none, wandb or tensorboard
    run_name: str | None = None
    project: str = "huggingface"
    save_strategy: str = "steps"                  # or no: not even when a signal ends the run
    save_steps: float = 500                       # steps between checkpoints; below 1, a share of max_steps
    save_total_limit: int | None = None           # None: keep all checkpoints
    save_only_model: bool = False                 # no state to resume from
    resume_from_checkpoint: bool | str | None = None      # a folder; True: the last one in output_dir, if there is one
    push_to_hub: bool = False                     # the model of each checkpoint and of the end
    hub_strategy: str = "every_save"              # or end
    hub_model_id: str | None = None               # None: the name of output_dir
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    eval_steps: float | None = None               # steps between evaluations; below 1, a share of max_steps; None: only at the end
    eval_on_start: bool = False
    eval_delay: float = 0                         # steps before the first

    # This project's own
    launch_server: bool = False                   # train.py starts, watches and stops the server of serve.py
    vllm_max_model_length: int | None = None      # the server's --max-model-len; None: the model's
    weight_sync_backend: str = "disk"             # the server reads a folder; nccl: other GPUs; ipc: one GPU for server and trainer
    verify_sync_steps: int = 50                   # weight syncs between two proofs of sync, beside the first two; 0: none
    vllm_enable_lora: bool = False                # with peft_config: serve.py starts a server that takes adapters instead of merged weights
    vllm_gpu_memory_utilization: float | None = None     # the server's share of its GPU; None: 0.9, with ipc 0.35
    loss_normalization: str = "micro_batch"       # or step: trained tokens of the whole optimizer step
    eval_num_generations: int = 1                 # of each prompt of eval_dataset
    eval_sampling: dict | None = None             # vLLM's sampling parameters where evaluation's differ, e.g. dict(temperature=0)
    save_rollouts: bool = False                   # every scored group to output_dir/rollouts
    replay: str | None = None                     # train on such a folder, without a server
    centering_tail: bool = False                  # model the sampler's unreported tail (arXiv 2609.20807, Eq. 14)
    attention_backend: str = "auto"               # hub, triton, flex, sdpa; auto: hub where it loads, else flex; sdpa on a CPU

    def __post_init__(self):
        for rule, sentence in self._rules():
            if not rule:
                raise ConfigError(sentence)

    def _rules(self):
        for name, declared in typing.get_type_hints(type(self)).items():
            value, kind = getattr(self, name), declared | int if float in (declared, *typing.get_args(declared)) else declared
            yield declared is typing.Any or isinstance(value, kind), f"{name}={value!r} must be {getattr(declared, '__name__', declared)}."
        yield self.model, "model is missing: set it to a Hugging Face id or a folder."
        rewarded = self.reward_functions or self.environment_factory or self.loop_cls
        yield rewarded, "reward_funcs is missing: pass a function (prompts, completions, **columns) -> list of floats."
        names = [getattr(tool, "__name__", None) for tool in self.tools or []]
        yield None not in names and len({*names}) == len(names), "tools must be functions, each with a name of its own."
        factories = list(self.environment_factory.values()) if isinstance(self.environment_factory, dict) else [self.environment_factory or list]
        yield factories and all(map(callable, factories)), "environment_factory must be a callable without arguments, or a dict of names to such."
        yield self.train_dataset is not None or not self.environment_factory or self.max_steps > 0, "environments without train_dataset need max_steps, which ends the run."
        yield (self.max_tool_calling_iterations or 0) >= 0, "max_tool_calling_iterations must be at least 0, or None for no limit."
        yield callable(self.tool_parser) or self.tool_parser in (None, *PARSERS), f"tool_parser={self.tool_parser!r} must be one of {', '.join(PARSERS)}, or a callable."
        yield all(map(callable, self.reward_functions)), "reward_funcs must be callables; serve a reward model and call it over HTTP."
        for name, low in dict(num_generations=2, max_completion_length=1, num_sampler_logprobs=1, max_concurrent_rollouts=1,
                              weight_sync_steps=1, gradient_accumulation_steps=1, logging_steps=1, eval_num_generations=1, max_staleness=0, top_k=0,
                              verify_sync_steps=0).items():
            yield getattr(self, name) >= low, f"{name}={getattr(self, name)} must be at least {low}."
        yield self.temperature >= 0.01, f"temperature={self.temperature} must be at least 0.01, where vLLM stops scaling."
        yield 0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]."
        yield self.min_p is None or 0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]."
        yield not self.restricted_sampling or self.top_k > 0, "top_p < 1 and min_p > 0 need top_k too, which bounds the candidate set vLLM records."
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        yield 0 <= low <= 1 <= high, f"vllm_importance_sampling_clip_min={low} and _max={high} must enclose 1, the ratio of an unchanged policy."
        for name, choices in CHOICES.items():
            yield getattr(self, name) in choices, f"{name}={getattr(self, name)!r} must be one of {', '.join(map(str, choices))}."
        yield len(self.server_urls) == 1 or not self.launch_server, "launch_server=True starts one server: set it to False for several, and start them."
        yield self.peft_config or not self.vllm_enable_lora, "vllm_enable_lora=True needs adapters to send: set peft_config."
        share = self.vllm_gpu_memory_utilization
        yield share is None or 0 < share < 1, f"vllm_gpu_memory_utilization={share} must be between 0 and 1."
        for name in ("save_steps", "eval_steps"):
            value = getattr(self, name)
            yield value is None or value >= 1 or (0 < value and self.max_steps > 0), f"{name}={value} must be at least 1, or with max_steps a share of it."
        yield self.save_total_limit is None or self.save_total_limit >= 1, f"save_total_limit={self.save_total_limit} must be at least 1."
        alone = self.token_budget and not self.launch_server and not self.save_rollouts and self.eval_dataset is None
        yield not self.replay or alone, "replay trains on a folder, without a server: set token_budget as it was, and launch_server, save_rollouts, eval_dataset not."
        yield self.eval_dataset is not None or not (self.eval_steps or self.eval_on_start), "eval_steps and eval_on_start need eval_dataset."
        yield not (self.bf16 and self.fp16), "bf16 and fp16 exclude each other: set one."
        yield self.token_budget is None or self.token_budget > 0, f"token_budget={self.token_budget} must be positive."
        yield self.max_steps > 0 or self.num_train_epochs > 0, "nothing to do: set max_steps or num_train_epochs above 0."
        decays = self.lr_scheduler_type not in ("constant", "constant_with_warmup")
        yield not decays or self.max_steps > 0, f"lr_scheduler_type={self.lr_scheduler_type!r} decays over a number of steps that only max_steps can give: set it."
        yield not (self.warmup_steps and self.lr_scheduler_type == "constant"), "lr_scheduler_type='constant' has no warm-up: use 'constant_with_warmup' with warmup_steps."
        yield self.warmup_steps >= 1 or not self.warmup_steps or self.max_steps > 0, "warmup_steps below 1 is a share of max_steps: set max_steps."

    @property
    def reward_functions(self) -> list[Callable]:
        funcs = self.reward_funcs
        return [] if funcs is None else list(funcs) if isinstance(funcs, (list, tuple)) else [funcs]

    @property
    def server_urls(self) -> list[str]:
        urls = self.vllm_server_base_url
        return [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]

    @property
    def restricted_sampling(self) -> bool:
        """Whether the sampler draws from a candidate set instead of the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)


def load_config(argv: list[str]) -> Config:
    """The config of `argv` = [path of a Python file that binds `config`, "key=value", …].

    Raises ConfigError for a missing file, an unknown key (naming the nearest one) or a value of the wrong type.
    """
    if not argv:
        raise ConfigError("which config? Usage: train.py configs/x.py [key=value …]")
    path = Path(argv[0])
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file: give the path of a config, e.g. configs/smollm_cpu.py.")
    spec = importlib.util.spec_from_file_location(f"config_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that functions of the file can be inspected and pickled
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise ConfigError(f"{path} must bind `config = Config(…)`.")
    changes = dict(parse_override(type(config), text) for text in argv[1:])
    if config.output_dir is None and "output_dir" not in changes:
        changes["output_dir"] = f"runs/{path.stem}"
    return replace(config, **changes)
