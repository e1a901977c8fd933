"""What a run leaves behind."""
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from model import Policy
from sync import gathered_weights, write_weights


def save_model(policy: Policy, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """A Hugging Face folder that `from_pretrained` and vLLM load. A collective; rank 0 writes, and the folder appears whole."""
    weights = gathered_weights(policy, dtype)
    if dist.get_rank() == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_weights(weights, partial)
        policy.lm.config.save_pretrained(partial)
        if policy.lm.generation_config is not None:
            policy.lm.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()
