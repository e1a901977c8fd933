"""LoRA: adapters in the policy, merged weights out of it, and the adapters alone to servers that take them."""
import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import ConfigError
from naming import adapter_name

FOLLOWED = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "runtime_config", "r", "lora_alpha", "use_rslora",
            "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save", "init_lora_weights", "fan_in_fan_out"}
ADAPTERS = "adapters"    # the weights' version of a server whose base is its checkpoint's, "default" until an adapter came
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)       # that vLLM has buffers for; it serves every rank up to --max-lora-rank


def add_adapters(lm: nn.Module, peft_config):
    """Put LoRA beside the text model's layers and freeze the rest -> the config with its target modules named.

    Raises ConfigError for what neither the fused head nor the servers could follow.
    """
    from peft import LoraConfig, inject_adapter_in_model      # optional: without peft_config nothing needs it

    peft_config = copy.deepcopy(peft_config)                  # PEFT writes into it
    if not isinstance(peft_config, LoraConfig):
        raise ConfigError(f"peft_config is a {type(peft_config).__name__}: use peft.LoraConfig, the only method that is supported.")
    plain = LoraConfig()
    unsupported = [f.name for f in fields(peft_config) if f.name not in FOLLOWED and getattr(peft_config, f.name) != getattr(plain, f.name)]
    if unsupported or peft_config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):        # others change the base weights, which a server keeps
        raise ConfigError(f"peft_config sets {', '.join(unsupported) or 'init_lora_weights=' + repr(peft_config.init_lora_weights)}, which is not supported: leave it out.")
    head, embedding, whole = lm.get_output_embeddings(), lm.get_input_embeddings(), peft_config.modules_to_save or []
    saved = [module for name, module in lm.named_modules() if any(name.endswith(key) for key in whole)]        # PEFT's rule
    if embedding.weight is head.weight and (head in saved or embedding in saved):
        raise ConfigError("peft_config.modules_to_save names the head or the embedding of a model that ties them, which would part them: leave it out.")
    outside = set(lm.parameters()) - set(lm.get_decoder().parameters()) - set(head.parameters())
    adapted = lm.get_decoder() if outside else lm             # a vision tower gets no adapters
    if outside and head in saved:
        raise ConfigError("peft_config.modules_to_save names the head of a vision-language model, which lies outside its text model: leave it out.")
    if missing := [key for key in whole if not any(name.endswith(key) for name, _ in adapted.named_modules())]:
        raise ConfigError(f"peft_config.modules_to_save names {', '.join(missing)}, of which the text model has none: leave it out.")
    head.requires_grad_(not outside)                          # PEFT freezes what it is given, which then is the text model alone
    try:
        inject_adapter_in_model(peft_config, adapted)
    except ValueError as error:
        raise ConfigError(f"peft_config does not fit the model: {error}") from None
    if any(hasattr(module, "lora_A") for module in (lm.get_output_embeddings(), lm.get_input_embeddings())):
        raise ConfigError("peft_config targets lm_head or embed_tokens, whose adapters are not supported: name them in modules_to_save to train them whole.")
    strange = {type(m.get_base_layer()).__name__ for m in lora_layers(lm).values() if not isinstance(m.get_base_layer(), nn.Linear)}
    if strange:
        raise ConfigError(f"peft_config targets layers of type {', '.join(sorted(strange))}: only linear layers are supported.")
    if not any(p.requires_grad for p in lm.parameters()):
        raise ConfigError(f"peft_config.target_modules={peft_config.target_modules} matches no layer of the model.")
    return peft_config


def lora_layers(lm: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in lm.named_modules() if hasattr(module, "lora_A")}


def base_name(name: str) -> str | None:
    """The name of a parameter in the checkpoint; None for an adapter, and for the untrained copy of a module that is trained whole."""
    if ".lora_A." in name or ".lora_B." in name or ".original_module." in name:
        return None
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor: a collective."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def merged(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """W + scaling · B A of an adapted layer, (out, in), in `dtype`; the layer itself is left alone. A collective."""
    weight, a, b = (full(m.weight) for m in (layer.get_base_layer(), layer.lora_A["default"], layer.lora_B["default"]))
    return (weight.float() + layer.scaling["default"] * (b.float() @ a.float())).to(dtype)


def peft_state(lm: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """On rank 0 copies of the adapters' full tensors on the CPU, under the names of PEFT's files; else empty. A collective."""
    state = {}
    for name, p in lm.named_parameters():
        if p.requires_grad:
            tensor = full(p.to(dtype))
            if dist.get_rank() == 0:
                state["base_model.model." + name.replace(".default", "").replace(".modules_to_save", "")] = tensor.to("cpu", copy=True).contiguous()
    return state


def write_adapter(state: dict[str, Tensor], peft_config, folder: Path, base_model: str) -> None:
    """A folder that `PeftModel.from_pretrained` and vLLM load; it appears whole."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(state, partial / "adapter_model.safetensors", metadata=dict(format="pt"))
    peft_config.save_pretrained(partial)
    described = json.loads((partial / "adapter_config.json").read_text())
    (partial / "adapter_config.json").write_text(json.dumps(described | dict(base_model_name_or_path=base_model, inference_mode=True), indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def served_rank(rank: int) -> int:
    """The --max-lora-rank that serves `rank`."""
    if rank > RANKS[-1]:
        raise ConfigError(f"peft_config has rank {rank}, vLLM serves at most {RANKS[-1]}: lower it.")
    return next(served for served in RANKS if served >= rank)


def largest_rank(peft_config) -> int:
    return max([peft_config.r, *peft_config.rank_pattern.values()])


def versions_kept(max_staleness: int) -> int:
    """At least two: until a new one is proven, requests name the one before it."""
    return max(max_staleness, 1) + 1


def takes_adapters(peft_config, url: str, vllm_config: dict) -> bool:
    """Whether this server could take the adapters, from what its /server_info says; where one does not, merged weights are sent to all."""
    if vllm_config.get("lora_config") is None:
        return False
    why = (f"modules_to_save={sorted(peft_config.modules_to_save)} cannot travel in an adapter" if peft_config.modules_to_save else
           "an adapter would reach one of its data-parallel replicas only" if vllm_config["parallel_config"]["data_parallel_size"] > 1 else None)
    if why:
        print(f"{url} has --enable-lora, but merged weights are sent: {why}.", flush=True)
    return why is None


def check_adapter_server(peft_config, max_staleness: int, url: str, vllm_config: dict, weight_version: str | None = None) -> None:
    """Raise ConfigError where a server that `takes_adapters` could not keep this run's, from what its /server_info and /weight_info say."""
    lora, rank = vllm_config["lora_config"], largest_rank(peft_config)
    if (processes := vllm_config["parallel_config"].get("_api_process_count", 1)) > 1:
        raise ConfigError(f"the server at {url} has {processes} API processes, and an adapter reaches one of them only: restart it with --api-server-count 1.")
    if weight_version not in (None, "default", ADAPTERS):
        raise ConfigError(f"the server at {url} has the weights of another run under the adapters (it says version {weight_version!r}): start it again.")
    if lora["max_lora_rank"] < rank:
        raise ConfigError(f"the server at {url} has --max-lora-rank {lora['max_lora_rank']}, peft_config needs {rank}: restart it with --max-lora-rank {served_rank(rank)}.")
    kept = versions_kept(max_staleness)
    if lora["max_loras"] <= kept:
        raise ConfigError(f"the server at {url} has --max-loras {lora['max_loras']}: requests may name {kept} versions, and the "
                          f"next is loaded before the oldest is unloaded: restart it with --max-loras {kept + 1}.")


class Adapters:
    """The servers load each version of the adapters under a name of its own, so nothing pauses and no cache is shared between versions.

    `max_staleness + 1` versions stay, and those that a request in flight still names.
    """

    chunks, pauses = 1, False

    def __init__(self, config, policy, dtype: torch.dtype, control, shared):
        self.config, self.policy, self.dtype, self.control, self.shared = config, policy, dtype, control, shared
        self.folder = Path(config.output_dir).resolve() / ".vllm_lora"
        self.loaded: list[set[int]] = [set() for _ in control.urls]
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            shared.adapters.value = 1

    def stage(self, chunk: int, version: int) -> Callable[[], None]:
        state = peft_state(self.policy.lm, self.dtype)
        return lambda: write_adapter(state, self.policy.peft_config, self.folder / adapter_name(version), self.config.model)

    def begin(self, server: int) -> None:
        pass

    def send(self, server: int, chunk: int) -> None:
        pass

    def finish(self, server: int, version: int) -> None:
        """Load the new version, and only then unload what has become too old."""
        name, path = adapter_name(version), str(self.folder / adapter_name(version))
        if not self.loaded[server]:          # what it cached for a run before, under the same names and paths, is of other weights
            self.control.post(server, "reset of the prefix cache", "/reset_prefix_cache?reset_running_requests=true")
        self.control.post(server, "load of the adapter", "/v1/unload_lora_adapter", dict(lora_name=name), optional=True)     # of an earlier run
        try:
            self.control.post(server, "load of the adapter", "/v1/load_lora_adapter", dict(lora_name=name, lora_path=path))
        except RuntimeError as error:
            if "has already been loaded" not in str(error):      # the reply to the first request was lost, and it was sent again
                raise
        self.control.post(server, "version", "/update_weight_version", dict(new_version=ADAPTERS), optional=True)     # it tells none of its tokens
        self.loaded[server].add(version)
        oldest_named = self.shared.oldest_named.value
        for old in sorted(v for v in self.loaded[server] if v < min(version - versions_kept(self.config.max_staleness) + 1, oldest_named)):
            self.control.post(server, "unload of an adapter", "/v1/unload_lora_adapter", dict(lora_name=adapter_name(old)), optional=True)
            self.loaded[server].discard(old)

    def clean(self, version: int) -> None:
        """Files outlive their adapter by one sync: the server may read them late. A server that missed this version is out of use, and no request names what it had."""
        kept = min([version, *(v for loaded in self.loaded if version in loaded for v in loaded)]) - 1
        for folder in self.folder.glob("policy-v*"):
            if int(folder.name.removeprefix("policy-v")) < kept:
                shutil.rmtree(folder)
