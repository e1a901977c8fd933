"""What a run leaves behind."""
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import cached_file

from adapters import save_adapter
from model import Policy
from weights import gathered_weights, write_weights


def save_model(policy: Policy, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """A Hugging Face folder that `from_pretrained` and vLLM load; of adapters one in PEFT's format. A collective; rank 0 writes, and the folder appears whole."""
    if policy.peft_config:
        save_adapter(policy.lm, policy.peft_config, folder, torch.float32, policy.lm.config.name_or_path)
        if dist.get_rank() == 0:
            tokenizer.save_pretrained(folder)
        return dist.barrier()
    weights = gathered_weights(policy, dtype, frozen=True)
    if dist.get_rank() == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_weights(weights, partial)
        policy.lm.config.save_pretrained(partial)
        if policy.lm.generation_config is not None:
            policy.lm.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        copy_processor(policy.lm.config, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def copy_processor(config, folder: Path) -> None:
    """The image processor's settings of a vision-language checkpoint: vLLM reads them even to serve text. No network, no copy."""
    if config.get_text_config() is config:
        return
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        source = cached_file(config.name_or_path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
        if source:
            shutil.copy(source, folder)
