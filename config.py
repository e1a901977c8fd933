"""The one configuration: a flat frozen dataclass, an ordinary Python file that binds `config`, and `key=value` overrides.

Names and defaults are those of TRL's `AsyncGRPOConfig`; the last block is this project's own.
"""
import importlib.util
import math
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from overrides import ConfigError, parse_override, unknown_option
from rules import rules


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
    bf16: bool | None = None                      # None: on a GPU or a CPU with AMX, unless fp16 is set
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
    logging_steps: float = 1
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
    attention_backend: str = "auto"               # hub, triton, flex, sdpa; auto: hub where it loads, else triton where it fits, else flex; sdpa on a CPU

    def __post_init__(self):
        for rule, sentence in rules(self):
            if not rule:
                raise ConfigError(sentence)

    @property
    def reward_functions(self) -> list[Callable]:
        funcs = self.reward_funcs
        return [] if funcs is None else list(funcs) if isinstance(funcs, (list, tuple)) else [funcs]

    @property
    def server_urls(self) -> list[str]:
        urls = self.vllm_server_base_url
        return [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]

    @property
    def weights_dtype(self) -> str:
        """`dtype`, before which one in model_init_kwargs goes."""
        return str((self.model_init_kwargs or {}).get("dtype", self.dtype)).removeprefix("torch.")

    @property
    def restricted_sampling(self) -> bool:
        """Whether the sampler draws from a candidate set instead of the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)


def interval(every: float, max_steps: int) -> int:
    """Steps that an option means: below 1 it is a share of max_steps."""
    return int(every) if every >= 1 else math.ceil(every * max_steps)


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
    try:
        spec.loader.exec_module(module)
    except TypeError as error:
        if "cannot inherit non-frozen dataclass" in str(error):
            raise ConfigError(f"{path}: Config is frozen, so a dataclass that inherits from it must be: write @dataclass(frozen=True).") from error
        if not (found := re.search(r"Config\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))):
            raise
        raise ConfigError(f"{path}: {unknown_option(Config, found[1])}") from error
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise ConfigError(f"{path} must bind `config = Config(…)`.")
    changes = dict(parse_override(type(config), text) for text in argv[1:])
    if changes.get("output_dir", config.output_dir) is None:
        changes["output_dir"] = f"runs/{path.stem}"
    return replace(config, **changes)
