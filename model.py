"""The policy: load, and the forward that turns a packed row into log-probs."""
from contextlib import nullcontext
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

import attention
import deltanet
from adapters import add_adapters
from arrays import on_device
from config import Config, ConfigError
from loss import Candidates, fused_logprobs
from packing import Row, Sample, pack_row


class Policy(nn.Module):
    """A causal language model whose forward scores the loss terms of a row instead of returning logits."""

    def __init__(self, lm: nn.Module, temperature: float, backend: str, aux_loss_coef: float = 0.0, keep_logits: int = 0):
        super().__init__()
        deltanet.install(lm)
        self.lm, self.temperature, self.backend, self.keep_logits = lm, temperature, backend, keep_logits
        self.compute_weights = nullcontext()     # entered around forward and backward
        text = lm.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.windows = {None, getattr(text, "sliding_window", None)}
        self.recurrent = bool(deltanet.layers(lm))
        self.aux_loss_coef = aux_loss_coef       # 0: router logits are not asked for
        self.experts_per_token = text.num_experts_per_tok if aux_loss_coef else 0
        self.peft_config = None                  # of the adapters, if there are any
        self.revision = None                     # of the checkpoint, as given

    def forward(self, row: dict, candidates: Candidates | None = None, temperature: float | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """row: from `to_device` -> log-probs of the targets (M,), of the top tokens (M, K), entropy (M,), router logits (L, N, E)."""
        tree = row["tree"].prepare(self.backend, self.windows, self.recurrent)
        routers = dict(output_router_logits=True) if self.aux_loss_coef else {}
        out = self.lm.get_decoder()(input_ids=row["input_ids"][None], position_ids=tree.position_ids[None], use_cache=False, tree=tree, **routers)
        head, hidden = self.lm.get_output_embeddings().weight, out.last_hidden_state[0]      # (V, D), (N, D)
        # Rollouts that share a sampled token share its hidden state: taken in fp32, so that their gradients, which may cancel, are summed in fp32.
        logprobs, topk_logprobs, entropy = fused_logprobs(
            hidden.to(torch.promote_types(hidden.dtype, torch.float32))[row["term_index"]].to(hidden.dtype), head, row["targets"], row["topk_ids"],
            temperature=temperature or self.temperature, softcap=self.softcap, candidates=candidates, keep=self.keep_logits)
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
    if config.weights_dtype != "auto":
        return getattr(torch, config.weights_dtype)
    options = dict(trust_remote_code=config.trust_remote_code) | (config.model_init_kwargs or {})
    declared = _pretrained(AutoConfig, config.model, **{name: value for name, value in options.items() if name != "dtype"})
    dtype = getattr(declared.get_text_config(), "dtype", None) or getattr(declared, "dtype", None) or torch.float32
    if dtype == torch.float16:
        raise ConfigError(f"dtype='auto' is float16 for {config.model}, whose gradients cannot be scaled: set fp16=True, which keeps fp32 masters, or another dtype.")
    return dtype


def load_tokenizer(config: Config):
    """The tokenizer of `config.model`; its chat template is required."""
    revision = (config.model_init_kwargs or {}).get("revision")
    tokenizer = _pretrained(AutoTokenizer, config.model, trust_remote_code=config.trust_remote_code, revision=revision)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{config.model} has no chat template, which conversational prompts need: use an instruction-tuned model.")
    return tokenizer


def _pretrained(kind: type, name: str, **options):
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model={name!r} could not be loaded, give the id or the folder of a checkpoint: {str(error).splitlines()[0]}") from error


def eos_token_ids(config: Config, tokenizer) -> list[int]:
    """Every token that ends a reply: the tokenizer's and those of the checkpoint's generation config."""
    try:
        listed = GenerationConfig.from_pretrained(config.model, revision=(config.model_init_kwargs or {}).get("revision") or "main").eos_token_id
    except OSError:
        listed = None
    listed = [listed] if isinstance(listed, int) else listed or []
    return sorted({*listed, tokenizer.eos_token_id} - {None})


def load_policy(config: Config, device: torch.device) -> Policy:
    """The pretrained model with tree attention in its text model. Masters are fp32 under mixed precision, else as `dtype` says."""
    attention.register()
    mixed = compute_dtype(config, device) in (torch.bfloat16, torch.float16) and (config.bf16 is not False or config.fp16)
    options = dict(trust_remote_code=config.trust_remote_code) | (config.model_init_kwargs or {}) | dict(dtype="float32" if mixed else config.weights_dtype)
    declared = _pretrained(AutoConfig, config.model, **options)
    nested = {key: attention.NAME for key in declared.sub_configs if getattr(declared, key, None) is declared.get_text_config()}
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    lm = _pretrained(kind, config.model, attn_implementation=nested or attention.NAME, **options)
    refuse_unsupported(config.model, lm, config.vllm_max_model_length)
    nn.ParameterList(outside_text(lm)).requires_grad_(False)
    peft_config = config.peft_config and add_adapters(lm, config.peft_config)
    lm.eval()                                # no dropout, no router noise: the server has none
    try:
        backend = attention.choose_backend(config.attention_backend, device, compute_dtype(config, device),
                                           getattr(lm.config.get_text_config(), "attn_logit_softcapping", None), attention_shapes(lm))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    prepare_layers(lm, config.gradient_checkpointing, config.torch_compile, broken=backend == "hub",
                   backend=config.torch_compile_backend, mode=config.torch_compile_mode)
    policy = Policy(lm, config.temperature, backend, aux_loss_coef(config, lm), kept_logits(config.gradient_checkpointing, lm)).to(device)
    policy.peft_config, policy.revision = peft_config, options.get("revision")
    return policy


def attention_shapes(lm: nn.Module) -> set[tuple[int, int, int, int]]:
    """(query heads, key heads, width of queries and keys, of values) of the layers' attentions, as far as their modules tell."""
    shapes, text = set(), lm.config.get_text_config()
    for module in lm.get_decoder().layers.modules():
        key, value, width, shared = (getattr(module, name, None) for name in ("k_proj", "v_proj", "head_dim", "num_key_value_groups"))
        if width and shared and key is not None:
            groups = key.out_features // width
            shapes.add((groups * shared, groups, width, value.out_features // groups if value is not None else width))
        elif width and hasattr(module, "qkv_proj"):
            shapes.add((text.num_attention_heads, text.num_key_value_heads, width, width))
        elif hasattr(module, "qk_head_dim") and hasattr(module, "v_head_dim"):                  # compressed keys and values, expanded to one a head
            shapes.add((text.num_attention_heads, text.num_attention_heads, module.qk_head_dim, module.v_head_dim))
    return shapes


def kept_logits(checkpointing: bool | str, lm: nn.Module) -> int:
    """Bytes of logits that the head may keep for backward. With checkpointing they would set the peak, unless less than the layers' gradients, of which there are none yet."""
    trained = sum(p.numel() for p in lm.get_decoder().layers.parameters() if p.requires_grad) // (dist.get_world_size() if dist.is_initialized() else 1)
    return max(trained * 3 // 2, 1 << 29) if checkpointing else 8 << 30      # of their 4 bytes copies of the weights, one layer's activations and a block take the rest


def outside_text(lm: nn.Module) -> set[nn.Parameter]:
    """What text never meets in a vision-language model: vision tower, projector. Empty for a language model."""
    return set(lm.parameters()) - set(lm.get_decoder().parameters()) - set(lm.get_output_embeddings().parameters())


def refuse_unsupported(name: str, lm: nn.Module, longest: int | None = None) -> None:
    """Raise ConfigError for an architecture whose log-probs would be wrong. longest: tokens of the longest sample, where the config says."""
    text = lm.config.get_text_config()
    known = {"full_attention", "sliding_attention"} | ({"linear_attention"} if deltanet.layers(lm) else set())
    strange = set(getattr(text, "layer_types", None) or ()) - known
    if strange:
        raise ConfigError(f"{name} has layers of kind {', '.join(sorted(strange))}, which a packed tree does not support.")
    if not hasattr(lm.get_decoder(), "layers"):
        raise ConfigError(f"{name} has no `layers` in its decoder, which is how sharding and checkpointing find them: it is not supported.")
    if any(key.endswith("sinks") for key, _ in lm.named_parameters()):
        raise ConfigError(f"{name} has attention sinks, which are not supported.")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope")):
        original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if longest is None or longest > original:
            raise ConfigError(f"beyond {original} tokens {name}'s rotary frequencies depend on the longest sample of a row (rope_type {rope['rope_type']}), so the log-probs "
                              f"of the others would be wrong: set vllm_max_model_length={original} or less.")
    scales = [key for key in ("logits_scaling", "logit_scale", "lm_head_multiplier") if getattr(text, key, None) not in (None, 1)]
    if scales:
        raise ConfigError(f"{name} scales its logits ({', '.join(scales)}), which is not supported.")
    if (head := lm.get_output_embeddings()) is None or head.bias is not None or text.is_encoder_decoder:
        raise ConfigError(f"{name} has an encoder for its text, no output head, or a bias in its output head, which is not supported.")


def aux_loss_coef(config: Config, lm: nn.Module) -> float:
    """Of the router's load-balancing loss: the option, else the model config's value; 0 for a dense model."""
    declared = getattr(lm.config.get_text_config(), "router_aux_loss_coef", None)
    if config.router_aux_loss_coef is None:
        return declared or 0.0
    if declared is None:
        raise ConfigError(f"router_aux_loss_coef is set, but {config.model} is not a Mixture-of-Experts model: leave it out.")
    return config.router_aux_loss_coef


def prepare_layers(lm: nn.Module, checkpointing: bool | str, compiled: bool, broken: bool = False, backend: str | None = None,
                   mode: str | None = None) -> None:
    """Activation checkpointing and torch.compile of each decoder layer; layers of a kind share one compilation, for rows of any length.

    Checkpointing comes first, so that the compiler sees what is recomputed; but a recurrent layer breaks its graph, attention does
    where it is `broken`, and a graph broken inside a checkpoint is not compiled at all. "selective" keeps what attention and
    products gave and recomputes the rest.
    """
    if compiled:
        from torch._inductor.config import triton        # its heuristic for norms' backward would compile rows below 4096 tokens, and below 5 Mi numbers, once more each
        if hasattr(triton, "mix_order_reduction_non_strict_mode"):
            triton.mix_order_reduction_non_strict_mode = True

    def compile_(forward):
        return torch.compile(forward, dynamic=True, backend=backend or "inductor", mode=mode) if compiled else forward

    def checkpoint_(forward):
        return checkpointed(forward, selective=checkpointing == "selective") if checkpointing else forward

    for layer in lm.get_decoder().layers:
        outside = broken or deltanet.layers(layer)
        layer.forward = checkpoint_(compile_(layer.forward)) if outside else compile_(checkpoint_(layer.forward))


def checkpointed(forward, selective: bool):
    """`forward` with its activations recomputed in backward; nothing in it is random, so no generator state is kept."""
    options = dict(context_fn=partial(create_selective_checkpoint_contexts, _keep)) if selective else {}

    def run(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)
    return run


def _keep(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name().rpartition("::")[2] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


# By name: the hub's kernels register theirs under a namespace made of a build's hash, and the others may not be loaded.
KEPT = {"mm", "addmm", "_grouped_mm", "attention", "_flash_attn_forward", "flex_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu"}


def to_device(row: Row, device: torch.device) -> tuple[dict, Candidates | None]:
    """The row's arrays as tensors, its `tree`, and its candidate sets in the form the head takes."""
    arrays = {name: value for name, value in vars(row).items() if isinstance(value, np.ndarray) and not name.startswith("segment_")}
    tensors: dict = dict(zip(arrays, on_device(list(arrays.values()), device)))
    tensors["tree"] = attention.Tree(tensors.pop("end"), tensors.pop("position_ids"), row.segment_start, row.segment_parent)
    if row.candidate_ids is None:
        return tensors, None
    counts = tensors["candidate_counts"]
    rows = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    return tensors, Candidates(rows, tensors["candidate_ids"], counts == 0)


def check_packing(policy: Policy, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model whose log-probs in a packed row differ from a sample's alone: some layer does not follow the tree; and an attention whose gradients are wrong. A collective."""
    def sample(ids):
        trained, n = np.arange(3, len(ids), dtype=np.int32), len(ids) - 3
        return Sample(np.array(ids, np.int32), trained, np.zeros(n, np.float32), np.empty((n, 0), np.int32), np.empty((n, 0), np.float32), 0.0, 0, 0)
    first, second = sample([1, 2, 3, 4, 5, 6, 7]), sample([1, 2, 3, 8, 9, 10, 11])
    multiple = 1 if policy.backend == "sdpa" else attention.MULTIPLE
    with torch.no_grad(), policy.compute_weights:
        packed, alone = (policy(to_device(pack_row(samples, multiple), device)[0])[0] for samples in ([first, second], [second]))
    difference = (packed[4:] - alone).abs().max().item()
    if not difference <= (1e-3 if dtype in (torch.float32, torch.float64) else 0.25):          # 8 bits of logits of size 20
        raise ConfigError(f"{policy.lm.config.model_type}: a packed sample's log-probs differ by {difference:.3g} from the sample alone, so some "
                          "layer does not follow the tree: this architecture is not supported.")
    softcap = getattr(policy.lm.config.get_text_config(), "attn_logit_softcapping", None)
    for shape, window in product(attention_shapes(policy.lm), policy.windows) if policy.backend != "sdpa" else ():            # what a forward cannot show
        error = attention.gradient_error(policy.backend, *shape, window and min(window, 100), softcap, device, dtype)
        if not error <= (1e-3 if dtype in (torch.float32, torch.float64) else 0.03):
            raise ConfigError(f"attention_backend='{policy.backend}' computes gradients here that differ by {error:.2g} from a dense mask's: choose another one.")


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
