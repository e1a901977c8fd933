"""What the options of a config must satisfy, each with the sentence that says what to change."""
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from tool_parsers import PARSERS

CHOICES = dict(
    save_strategy=("steps", "no"), hub_strategy=("every_save", "end"), loss_normalization=("micro_batch", "step"),
    weight_sync_backend=("disk", "nccl", "ipc"), attention_backend=("auto", "hub", "triton", "flex", "sdpa"),
    gradient_checkpointing=(True, False, "selective"), optim=("adamw_torch_fused", "adamw_torch", "sgd"), report_to=("none", "wandb", "tensorboard"),
    dtype=("auto", "bfloat16", "float16", "float32"),
    lr_scheduler_type=("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
                       "inverse_sqrt", "warmup_stable_decay"))     # of transformers.get_scheduler


def rules(config) -> Iterator[tuple[object, str]]:
    """(whether it holds, what to change where it does not) of each."""
    for part in (_types, _work, _numbers, _choices, _steps):
        yield from part(config)


def _types(config):
    for name, declared in typing.get_type_hints(type(config)).items():
        value, kind = getattr(config, name), declared | int if float in (declared, *typing.get_args(declared)) else declared
        yield declared is typing.Any or isinstance(value, kind), f"{name}={value!r} must be {getattr(declared, '__name__', declared)}."


def _work(config):
    """What is trained on what."""
    yield config.model, "model is missing: set it to a Hugging Face id or a folder."
    rewarded = config.reward_functions or config.environment_factory or config.loop_cls
    yield rewarded, "reward_funcs is missing: pass a function (prompts, completions, **columns) -> list of floats."
    yield config.tools is None or isinstance(config.tools, (list, tuple)), "tools must be a list of functions: write tools=[f], also for one."
    names = [getattr(tool, "__name__", None) for tool in config.tools or []]
    yield None not in names and len({*names}) == len(names), "tools must be functions, each with a name of its own."
    factories = list(config.environment_factory.values()) if isinstance(config.environment_factory, dict) else [config.environment_factory or list]
    yield factories and all(map(callable, factories)), "environment_factory must be a callable without arguments, or a dict of names to such."
    yield config.train_dataset is not None or not config.environment_factory or config.max_steps > 0, "environments without train_dataset need max_steps, which ends the run."
    yield (config.max_tool_calling_iterations or 0) >= 0, "max_tool_calling_iterations must be at least 0, or None for no limit."
    yield callable(config.tool_parser) or config.tool_parser in (None, *PARSERS), f"tool_parser={config.tool_parser!r} must be one of {', '.join(PARSERS)}, or a callable."
    yield all(map(callable, config.reward_functions)), "reward_funcs must be callables; serve a reward model and call it over HTTP."


def _numbers(config):
    for name, low in dict(num_generations=2, max_completion_length=1, num_sampler_logprobs=1, max_concurrent_rollouts=1,
                          weight_sync_steps=1, gradient_accumulation_steps=1, eval_num_generations=1, max_staleness=0, top_k=0,
                          verify_sync_steps=0).items():
        yield getattr(config, name) >= low, f"{name}={getattr(config, name)} must be at least {low}."
    for name, low in dict(learning_rate=0, weight_decay=0, adam_epsilon=0, max_grad_norm=0, warmup_steps=0, epsilon=0, epsilon_high=0, save_total_limit=0,
                          num_completions_to_print=0, router_aux_loss_coef=0, vllm_max_model_length=1).items():
        value = getattr(config, name)
        yield value is None or low <= value < math.inf, f"{name}={value} must be a number of at least {low}."
    for name in ("ddp_timeout", "rollout_worker_timeout", "vllm_server_timeout"):
        yield getattr(config, name) > 0, f"{name}={getattr(config, name)} must be above 0, in seconds."
    yield 0 <= config.adam_beta1 < 1 and 0 <= config.adam_beta2 < 1, f"adam_beta1={config.adam_beta1} and adam_beta2={config.adam_beta2} must be in [0, 1)."
    yield 0 <= config.seed < 2**32, f"seed={config.seed} must be from 0 to 2**32 - 1."
    yield config.temperature >= 0.01, f"temperature={config.temperature} must be at least 0.01, where vLLM stops scaling."
    yield 0 < config.top_p <= 1, f"top_p={config.top_p} must be in (0, 1]."
    yield config.min_p is None or 0 <= config.min_p <= 1, f"min_p={config.min_p} must be in [0, 1]."
    yield not config.restricted_sampling or config.top_k > 0, "top_p < 1 and min_p > 0 need top_k too, which bounds the candidate set vLLM records."
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    yield 0 <= low <= 1 <= high, f"vllm_importance_sampling_clip_min={low} and _max={high} must enclose 1, the ratio of an unchanged policy."


def _choices(config):
    for name, choices in CHOICES.items():
        yield getattr(config, name) in choices, f"{name}={getattr(config, name)!r} must be one of {', '.join(map(str, choices))}."
    urls = config.vllm_server_base_url if isinstance(config.vllm_server_base_url, list) else [config.vllm_server_base_url]
    named = urls and all(isinstance(url, str) and re.match("https?://.", url) for url in urls) and all(re.match("https?://.", url) for url in config.server_urls)
    yield named, f"vllm_server_base_url={config.vllm_server_base_url!r} must name each server like http://localhost:8000."
    yield len(config.server_urls) == 1 or not config.launch_server, "launch_server=True starts one server: set it to False for several, and start them."
    yield not isinstance(config.peft_config, dict), "peft_config must be a peft.LoraConfig, not a dict."
    yield config.loop_cls is None or isinstance(config.loop_cls, type), "loop_cls must be a class, a subclass of rollout.AsyncRolloutLoop."
    yield config.score_centering or not config.centering_tail, "centering_tail=True is a part of score centering: set score_centering=True."
    yield config.torch_compile or not (config.torch_compile_backend or config.torch_compile_mode), "torch_compile_backend and torch_compile_mode need torch_compile=True."
    yield config.weights_dtype in CHOICES["dtype"], f"dtype={config.weights_dtype!r} in model_init_kwargs must be one of {', '.join(CHOICES['dtype'])}."
    strange = {"torch_dtype", "attn_implementation"} & {*(config.model_init_kwargs or {})}
    yield not strange, f"model_init_kwargs must not set {', '.join(sorted(strange))}: use the options dtype and attention_backend."
    yield config.peft_config or not config.vllm_enable_lora, "vllm_enable_lora=True needs adapters to send: set peft_config."


def _steps(config):
    """How long, how often, and what goes together."""
    share = config.vllm_gpu_memory_utilization
    yield share is None or 0 < share < 1, f"vllm_gpu_memory_utilization={share} must be between 0 and 1."
    for name, value in (("logging_steps", config.logging_steps), ("save_steps", config.save_steps), ("eval_steps", config.eval_steps)):
        yield value is None or value >= 1 or (0 < value and config.max_steps > 0), f"{name}={value} must be at least 1, or with max_steps a share of it."
    alone = config.token_budget and not config.launch_server and not config.save_rollouts and config.eval_dataset is None
    yield not config.replay or alone, "replay trains on a folder, without a server: set token_budget as it was, and launch_server, save_rollouts, eval_dataset not."
    inside = config.replay and config.output_dir and Path(config.output_dir).resolve() in Path(config.replay).resolve().parents
    yield not inside, f"replay={config.replay} lies in output_dir, whose rollouts a new run sets aside: set another output_dir."
    yield config.eval_dataset is not None or not (config.eval_steps or config.eval_on_start), "eval_steps and eval_on_start need eval_dataset."
    yield config.fp16 or config.bf16 is not False or config.weights_dtype != "float16", "dtype='float16' has no gradients that can be scaled: set fp16=True, which keeps fp32 masters."
    yield not (config.bf16 and config.fp16), "bf16 and fp16 exclude each other: set one."
    yield config.token_budget is None or config.token_budget > 0, f"token_budget={config.token_budget} must be positive."
    yield config.max_steps > 0 or config.num_train_epochs > 0, "nothing to do: set max_steps or num_train_epochs above 0."
    decays = config.lr_scheduler_type not in ("constant", "constant_with_warmup")
    yield not decays or config.max_steps > 0, f"lr_scheduler_type={config.lr_scheduler_type!r} decays over a number of steps that only max_steps can give: set it."
    yield not (config.warmup_steps and config.lr_scheduler_type == "constant"), "lr_scheduler_type='constant' has no warm-up: use 'constant_with_warmup' with warmup_steps."
    yield config.warmup_steps >= 1 or not config.warmup_steps or config.max_steps > 0, "warmup_steps below 1 is a share of max_steps: set max_steps."
