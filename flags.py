"""The flags of `vllm serve` that a config needs."""
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from urllib.parse import urlparse

import torch

from adapters import largest_rank, served_rank, versions_kept
from config import Config, ConfigError
from model import compute_dtype, device_type

ONE_GPU_SHARE = 0.35     # of the GPU's memory for a server that shares it with the trainer


def cpu_threads() -> int:
    """Half of the cores: on a CPU server and trainer share them, and two full sets of spinning threads starve both."""
    return max(os.cpu_count() // 2, 1)


def server_command(config: Config) -> tuple[list[str], dict[str, str]]:
    """(argv, environment variables to add) of the server."""
    url, on_cpu = urlparse(config.server_urls[0]), device_type(config) == "cpu"
    if url.port is None:
        raise ConfigError(f"vllm_server_base_url={config.server_urls[0]} names no port, and a server started for it needs one: write {url.scheme}://{url.hostname}:8000.")
    dtype = compute_dtype(config, torch.device(device_type(config)))       # the trainer's: a gap in precision biases every ratio
    cli = ["vllm"] if shutil.which("vllm") else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model] if on_cpu else [*cli, "serve", config.model]
    argv += ["--host", url.hostname or "localhost", "--port", str(url.port), "--dtype", str(dtype).removeprefix("torch."),
             "--seed", str(config.seed), "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
             "--max-logprobs", str(max(20, config.num_sampler_logprobs + 1))]
    revision, template = (config.model_init_kwargs or {}).get("revision"), (config.chat_template_kwargs or {}).get("chat_template")
    optional = [(vllm_has_flag("enable_scale_out"), ["--enable-scale-out"]),      # older ones offer /inference/v1/generate without it
                (config.restricted_sampling and not on_cpu and vllm_has_flag("return_sampling_mask"), ["--return-sampling-mask"]),
                (config.vllm_max_model_length, ["--max-model-len", str(config.vllm_max_model_length)]),
                (revision, ["--revision", revision]), (template and "{" in template, ["--chat-template", template]),     # trusted in no request; not the name of one of the tokenizer's
                (config.trust_remote_code, ["--trust-remote-code"])]
    argv += [part for wanted, parts in optional if wanted for part in parts]
    more, environment = sync_flags(config, on_cpu)
    if on_cpu:
        return [*argv, *more, "--enforce-eager"], environment | dict(VLLM_CPU_KVCACHE_SPACE="2", OMP_NUM_THREADS=str(cpu_threads()))
    share = config.vllm_gpu_memory_utilization or (ONE_GPU_SHARE if config.weight_sync_backend == "ipc" else None)
    more += ["--gpu-memory-utilization", str(share)] if share else []
    # With several API servers an adapter would be known to the one that was told, and its number in the engine be used twice.
    return [*argv, *more, "--api-server-count", "1" if config.vllm_enable_lora else "8"], environment


def sync_flags(config: Config, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """(flags, environment variables) that let the weights in and the log-probs out."""
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    flags, environment = ["--scheduler-cls", "vllm_scheduler.scheduler"], dict(VLLM_SERVER_DEV_MODE="1", PYTHONPATH=here)
    if config.weight_sync_backend == "nccl" and not on_cpu:      # for trainers without the workers below
        flags += ["--weight-transfer-config", json.dumps(dict(backend="nccl"))]
    if config.weight_sync_backend in ("nccl", "ipc"):
        flags += ["--worker-extension-cls", "vllm_worker.CopyPlan"]
    if config.vllm_enable_lora:
        flags += ["--enable-lora", "--max-lora-rank", str(served_rank(largest_rank(config.peft_config))), "--max-loras", str(versions_kept(config.max_staleness) + 1)]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return flags, environment


def vllm_has_flag(name: str) -> bool:
    """Whether the vLLM installed here knows an argument, looked up in its sources: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.submodule_search_locations[0] if spec else "")
    paths = [folder / "engine/arg_utils.py", *(folder / "entrypoints").rglob("cli_args.py")] if spec else []
    return not spec or any(name in path.read_text() for path in paths)      # not here: printed for elsewhere, the newest
