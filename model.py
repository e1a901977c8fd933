"""The policy: load, shard, and the forward that turns a packed row into log-probs."""
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import attention
from config import Config, ConfigError
from loss import Candidates, fused_logprobs


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
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{config.model} has a bias in its output head, which is not supported.")
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    lm.train()
    return Policy(lm, config.temperature, attention.choose_backend(config.attention_backend, device), aux_loss_coef(config, lm)).to(device)


def aux_loss_coef(config: Config, lm: nn.Module) -> float:
    """Of the router's load-balancing loss: the option, else the model config's value; 0 for a dense model."""
    declared = getattr(lm.config.get_text_config(), "router_aux_loss_coef", None)
    if config.router_aux_loss_coef is None:
        return declared or 0.0
    if declared is None:
        raise ConfigError(f"router_aux_loss_coef is set, but {config.model} is not a Mixture-of-Experts model: leave it out.")
    return config.router_aux_loss_coef


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> Policy:
    """FSDP2: one unit a decoder layer, the rest (embedding, norm, head, tied or not) in the root unit.

    Gradients are *summed* over ranks, in fp32: the loss already carries the global denominator.
    """
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
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
