"""The policy: load, shard, and the forward that turns a packed row into log-probs."""
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import attention
from config import Config, ConfigError
from loss import Candidates, fused_logprobs
from packing import Row, Sample, pack_row


class Policy(nn.Module):
    """A causal language model whose forward scores the loss terms of a row instead of returning logits."""

    def __init__(self, lm: nn.Module, temperature: float, backend: str, aux_loss_coef: float = 0.0):
        super().__init__()
        self.lm, self.temperature, self.backend = lm, temperature, backend
        self.softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
        self.aux_loss_coef = aux_loss_coef       # 0: router logits are not asked for
        self.experts_per_token = lm.config.get_text_config().num_experts_per_tok if aux_loss_coef else 0

    def forward(self, row: dict[str, Tensor], candidates: Candidates | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """row: the tensors of a packing.Row -> log-probs of the targets (M,), of the top tokens (M, K), entropy (M,), router logits (L, N, E)."""
        tree = attention.TreeMask(row["end"], row["position_ids"], self.backend)
        routers = dict(output_router_logits=True) if self.aux_loss_coef else {}
        out = self.lm.base_model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False, tree=tree, **routers)
        head = self.lm.get_output_embeddings().weight                                   # (V, D)
        logprobs, topk_logprobs, entropy = fused_logprobs(
            out.last_hidden_state[0, row["term_index"]], head, row["targets"], row["topk_ids"],
            temperature=self.temperature, softcap=self.softcap, candidates=candidates)
        return logprobs, topk_logprobs, entropy, torch.stack(out.router_logits) if routers else None


def device_type(config: Config) -> str:
    return "cuda" if torch.cuda.is_available() and not config.use_cpu else "cpu"


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Of forward and backward, and of the server: bf16 by default where the device multiplies it fast, else the weights' dtype."""
    if config.fp16:
        return torch.float16
    fast = device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
    if config.bf16 or (config.bf16 is None and fast):
        return torch.bfloat16
    return torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)


def load_tokenizer(config: Config):
    """The tokenizer of `config.model`; its chat template is required."""
    revision = (config.model_init_kwargs or {}).get("revision")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=config.trust_remote_code, revision=revision)
    except (OSError, ValueError) as error:
        raise _not_loaded(config, error) from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"{config.model} has no chat template, which conversational prompts need: use an instruction-tuned model.")
    return tokenizer


def _not_loaded(config: Config, error: Exception) -> ConfigError:
    return ConfigError(f"model={config.model!r} could not be loaded, give the id or the folder of a checkpoint: {str(error).splitlines()[0]}")


def eos_token_ids(config: Config, tokenizer) -> list[int]:
    """Every token that ends a reply: the tokenizer's and those of the checkpoint's generation config."""
    try:
        listed = GenerationConfig.from_pretrained(config.model).eos_token_id
    except OSError:
        listed = None
    listed = [listed] if isinstance(listed, int) else listed or []
    return sorted({*listed, tokenizer.eos_token_id} - {None})


def load_policy(config: Config, device: torch.device) -> Policy:
    """The pretrained model with tree attention. Masters are fp32 under mixed precision, else `config.dtype`."""
    attention.register()
    mixed = compute_dtype(config, device) in (torch.bfloat16, torch.float16) and (config.bf16 is not False or config.fp16)
    options = dict(dtype="float32" if mixed else config.dtype, trust_remote_code=config.trust_remote_code) | (config.model_init_kwargs or {})
    try:
        lm = AutoModelForCausalLM.from_pretrained(config.model, attn_implementation=attention.NAME, **options)
    except (OSError, ValueError) as error:
        raise _not_loaded(config, error) from error
    refuse_unsupported(config.model, lm)
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    lm.train()
    try:
        backend = attention.choose_backend(config.attention_backend, device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Policy(lm, config.temperature, backend, aux_loss_coef(config, lm)).to(device)


def refuse_unsupported(name: str, lm: nn.Module) -> None:
    """Raise ConfigError for an architecture whose log-probs would be wrong."""
    text = lm.config.get_text_config()
    strange = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange:
        raise ConfigError(f"{name} has layers of kind {', '.join(sorted(strange))}, which a packed tree does not support yet.")
    scales = [key for key in ("logits_scaling", "logit_scale", "lm_head_multiplier") if getattr(text, key, None) not in (None, 1)]
    if scales:
        raise ConfigError(f"{name} scales its logits ({', '.join(scales)}), which is not supported.")
    if lm.get_output_embeddings().bias is not None:
        raise ConfigError(f"{name} has a bias in its output head, which is not supported.")


def aux_loss_coef(config: Config, lm: nn.Module) -> float:
    """Of the router's load-balancing loss: the option, else the model config's value; 0 for a dense model."""
    declared = getattr(lm.config.get_text_config(), "router_aux_loss_coef", None)
    if config.router_aux_loss_coef is None:
        return declared or 0.0
    if declared is None:
        raise ConfigError(f"router_aux_loss_coef is set, but {config.model} is not a Mixture-of-Experts model: leave it out.")
    return config.router_aux_loss_coef


def to_device(row: Row, device: torch.device) -> tuple[dict[str, Tensor], Candidates | None]:
    """The row's arrays as tensors, and its candidate sets in the form the head takes."""
    tensors = {name: torch.from_numpy(value).to(device, non_blocking=True) for name, value in vars(row).items() if isinstance(value, np.ndarray)}
    if row.candidate_ids is None:
        return tensors, None
    counts = tensors["candidate_counts"]
    rows = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    return tensors, Candidates(rows, tensors["candidate_ids"], counts == 0)


def check_packing(policy: Policy, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model whose log-probs in a packed row differ from a sample's alone: some layer does not follow the tree. A collective."""
    def sample(ids):
        trained, n = np.arange(3, len(ids), dtype=np.int32), len(ids) - 3
        return Sample(np.array(ids, np.int32), trained, np.zeros(n, np.float32), np.empty((n, 0), np.int32), np.empty((n, 0), np.float32), 0.0, 0, 0)
    first, second = sample([1, 2, 3, 4, 5, 6, 7]), sample([1, 2, 3, 8, 9, 10, 11])
    multiple = 1 if policy.backend == "sdpa" else 128
    with torch.no_grad():
        packed, alone = (policy(to_device(pack_row(samples, multiple), device)[0])[0] for samples in ([first, second], [second]))
    difference = (packed[4:] - alone).abs().max().item()
    if not difference <= (1e-3 if dtype in (torch.float32, torch.float64) else 0.25):          # 8 bits of logits of size 20
        raise ConfigError(f"{policy.lm.config.model_type}: a packed sample's log-probs differ by {difference:.3g} from the sample alone, so some "
                          "layer does not follow the tree: this architecture is not supported.")


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> Policy:
    """FSDP2: one unit a decoder layer, the rest (embedding, norm, head, tied or not) in the root unit.

    Gradients are *summed* over ranks, in fp32 (fp64 for fp64): the loss already carries the global denominator.
    """
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    for layer in policy.lm.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy


def make_optimizer(config: Config, policy: Policy) -> torch.optim.Optimizer:
    """AdamW (fused where the device has one) or SGD; weight decay on matrices only."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim >= 2], weight_decay=config.weight_decay),
              dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.0)]
    groups = [group for group in groups if group["params"]]
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_epsilon, fused=config.optim == "adamw_torch_fused")
