"""The model for others: a Hugging Face folder with a card, and the Hub."""
import copy
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import HfApi
from torch import Tensor
from transformers.utils import cached_file

from adapters import peft_state, write_adapter
from config import Config
from model import Policy
from weights import gathered_weights, write_weights


def save_model(policy: Policy, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """A Hugging Face folder that `from_pretrained` and vLLM load; of adapters one in PEFT's format. A collective; rank 0 writes, and the folder appears whole."""
    weights = weights_to_save(policy, dtype)
    if dist.get_rank() == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_model(weights, policy, tokenizer, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def weights_to_save(policy: Policy, dtype: torch.dtype, copy: bool = False) -> dict[str, Tensor]:
    """What `write_model` writes, on rank 0; with `copy` training may go on meanwhile. A collective."""
    return peft_state(policy.lm, torch.float32) if policy.peft_config else gathered_weights(policy, dtype, frozen=True, copy=copy)


def write_model(weights: dict[str, Tensor], policy: Policy, tokenizer, folder: Path) -> None:
    """No collective."""
    if policy.peft_config:
        write_adapter(weights, policy.peft_config, folder, policy.lm.config.name_or_path)
    else:
        write_weights(weights, folder)
        config = copy.deepcopy(policy.lm.config)
        config.dtype = next(iter(weights.values())).dtype        # of the file, which is not the masters'
        config.save_pretrained(folder)
        if policy.lm.generation_config is not None:
            policy.lm.generation_config.save_pretrained(folder)
        copy_processor(policy.lm.config, policy.revision, folder)
    tokenizer.save_pretrained(folder)


def copy_processor(config, revision: str | None, folder: Path) -> None:
    """The image processor's settings of a vision-language checkpoint: vLLM reads them even to serve text. No network, no copy."""
    if config.get_text_config() is config:
        return
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        source = cached_file(config.name_or_path, name, revision=revision, _raise_exceptions_for_missing_entries=False,
                             _raise_exceptions_for_connection_errors=False)
        if source:
            shutil.copy(source, folder)


def card(config: Config) -> str:
    """README.md: what was trained, how, and the last logged metrics."""
    metrics = Path(config.output_dir) / "metrics.jsonl"
    lines, last = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [], {}
    for evaluated in (True, False):                  # each is a line of its own
        last |= next((line for line in reversed(lines) if ("eval/step" in line) == evaluated), {})
    rewards = ", ".join(getattr(function, "__name__", type(function).__name__) for function in config.reward_functions)
    options = "\n".join(f"| {name} | `{value!r}` |" for name, value in vars(config).items() if isinstance(value, (str, int, float)) and name != "hub_token")
    values = "\n".join(f"| {name} | {value if isinstance(value, str) else f'{value:.6g}'} |" for name, value in last.items() if value is not None)
    return (
        f"---\nbase_model: {config.model}\ntags: [grpo, reinforcement-learning]\n---\n\n"
        f"# {config.model} trained by asynchronous GRPO\n\nRewards: {rewards}.\n\n"
        f"## Metrics of the last logged step\n\n| name | value |\n|---|---|\n{values}\n\n## Options\n\n| name | value |\n|---|---|\n{options}\n")


class Hub:
    """Uploads models in the background, one at a time: a checkpoint that comes while one is under way is left out, the end never."""

    def __init__(self, config: Config):
        self.config, self.api, self.upload = config, HfApi(token=config.hub_token), None
        self.repo = self.api.create_repo(config.hub_model_id or Path(config.output_dir).name, private=config.hub_private_repo, exist_ok=True).repo_id
        if config.hub_revision:
            self.api.create_branch(self.repo, branch=config.hub_revision, exist_ok=True)

    def push(self, folder: Path, message: str, end: bool = False) -> None:
        if self.upload and end and (error := self.upload.exception()):
            print(f"an upload to the Hub failed ({error}); the last one follows", flush=True)
        if end or (self.config.hub_strategy == "every_save" and (self.upload is None or self.upload.done())):
            self.upload = self.api.upload_folder(repo_id=self.repo, folder_path=folder, revision=self.config.hub_revision, commit_message=message,
                                                 ignore_patterns=["state/*", "random_*", "*_state.json", "samples.jsonl", "manifest.json"], run_as_future=True)
        if end:
            self.upload.result()
