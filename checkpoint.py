"""Checkpoints to resume from.

output_dir/checkpoint-<step> is a Hugging Face folder with the state beside it: `state` (parameters and moments, as torch.distributed.checkpoint
writes them), trainer_state.json, rollout_state.json and samples.jsonl (the prompts, see feed.Progress), and each rank's random state.
"""
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from config import Config, ConfigError
from export import save_model, write_card
from feed import Progress, RolloutFeed
from folders import defect, found, newest, prune, publish, set_aside, step_of
from model import Policy
from recording import recorded_sample, sample_record


@dataclass
class Counters:
    """Where a run is."""

    step: int = 0
    version: int = 0
    num_tokens: int = 0                  # forwarded so far
    prompts_seen: int = 0


class Checkpoints:
    """Saves and restores the state of a run. Every method but `find` is a collective; saving changes nothing of what it saves."""

    def __init__(self, config: Config, policy: Policy, optimizer, scheduler, scaler, tokenizer, dtype: torch.dtype):
        self.config, self.policy, self.optimizer, self.scheduler, self.scaler = config, policy, optimizer, scheduler, scaler
        self.tokenizer, self.dtype, self.output, self.saved_at, self.rank = tokenizer, dtype, Path(config.output_dir), -1, dist.get_rank()
        for left_over in self.output.glob("checkpoint-*.partial*") if self.rank == 0 else ():
            shutil.rmtree(left_over)

    def save(self, counters: Counters, window: dict, feed: RolloutFeed | None) -> Path:
        """Write checkpoint-<step>; window: values not yet logged; feed: on rank 0. Raises ConfigError when the disk does not take it."""
        started, progress = time.monotonic(), feed.progress() if feed else None
        folder = self.output / f"checkpoint-{counters.step}"
        partial = folder.with_suffix(".partial")
        try:
            save_model(self.policy, self.tokenizer, partial, self.dtype)
            if not self.config.save_only_model:
                self._save_state(partial, counters, window, progress)
            if self.rank == 0:
                write_card(partial, self.config)
                publish(partial, folder)
                prune(self.output, self.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            last = f"resume_from_checkpoint={newest(self.output)} goes on from there" if found(self.output) else "no earlier one is there"
            raise ConfigError(f"{folder} could not be written ({str(error).strip().splitlines()[-1]}): make room; {last}.") from error
        if self.rank == 0:
            print(f"saved {folder} in {time.monotonic() - started:.1f} s", flush=True)
        dist.barrier()
        self.saved_at = counters.step
        return folder

    def _save_state(self, folder: Path, counters: Counters, window: dict, progress: Progress | None) -> None:
        state = {name: p.detach() for name, p in self._parameters()}
        for name, p in self._parameters():               # as it is: torch's own helper steps an optimizer that has no state yet
            state |= {f"optimizer.{name}.{field}": value for field, value in self.optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
        dcp.save(state, checkpoint_id=folder / "state")
        torch.save(random_state(), folder / f"random_{self.rank}.pt")
        if self.rank == 0:
            rates = [{name: group[name] for name in ("lr", "initial_lr") if name in group} for group in self.optimizer.param_groups]
            trainer = dict(asdict(counters), window=window, rates=rates, scheduler=self.scheduler.state_dict(), scaler=self.scaler.state_dict())
            rollouts = dict(prompt_index=progress.first, model_version=counters.version, done=sorted(progress.done), in_flight=progress.in_flight)
            (folder / "trainer_state.json").write_text(json.dumps(trainer))
            (folder / "rollout_state.json").write_text(json.dumps(rollouts))
            (folder / "samples.jsonl").write_text("".join(json.dumps(sample_record(sample)) + "\n" for sample in progress.samples))
        dist.barrier()

    def restore(self) -> tuple[Counters, dict, Progress]:
        """The run as `resume_from_checkpoint` says, or its beginning. Raises ConfigError for a checkpoint that is damaged or another model's."""
        folder = self.find()
        dist.barrier()                                   # every rank has looked
        if self.rank == 0:
            set_aside(self.output, step_of(folder) if folder else 0)
        if folder is None:
            return Counters(), {}, Progress()
        self._load_state(folder / "state")
        saved, rollouts = (json.loads((folder / name).read_text()) for name in ("trainer_state.json", "rollout_state.json"))
        for group, rates in zip(self.optimizer.param_groups, saved["rates"], strict=True):
            group.update(rates)
        self.scheduler.load_state_dict(saved["scheduler"])
        self.scaler.load_state_dict(saved["scaler"]) if self.scaler.is_enabled() else None
        own = folder / f"random_{self.rank}.pt"
        if own.exists():                                 # with more ranks than before, the others keep the seed
            state = torch.load(own, weights_only=False)
            random.setstate(state["python"]), np.random.set_state(state["numpy"]), torch.set_rng_state(state["torch"])
            if state["cuda"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"])
        lines = (folder / "samples.jsonl").read_text().splitlines()
        samples = tuple(recorded_sample(json.loads(line), queued_at=time.monotonic()) for line in lines)
        counters = Counters(**{name: saved[name] for name in vars(Counters())})
        self.saved_at = counters.step
        if self.rank == 0:
            print(f"resumed from {folder}: step {counters.step}, {len(samples)} finished samples, {len(rollouts['in_flight'])} prompts to generate again", flush=True)
        return counters, saved["window"], Progress(rollouts["prompt_index"], frozenset(rollouts["done"]), samples)

    def find(self) -> Path | None:
        """The checkpoint to resume from, checked; None to start from the beginning."""
        asked = self.config.resume_from_checkpoint
        if not asked:
            return None
        folder = newest(self.output) if asked is True else Path(asked)
        if folder is None:
            print(f"rank {self.rank}: no checkpoint in {self.output} to resume from, so the run starts from the beginning", flush=True)
            return None
        if problem := defect(folder) or self._foreign(folder):
            older = list(reversed([other for other in found(folder.parent) if step_of(other) < step_of(folder)]))
            whole = next((other for other in older if not (defect(other) or self._foreign(other))), None)
            offer = f"the one before it is whole: resume_from_checkpoint={whole}" if whole else "no whole one is before it"
            raise ConfigError(f"{folder} cannot be resumed from, because {problem}; {offer}.")
        return folder

    def _foreign(self, folder: Path) -> str | None:
        saved = dcp.FileSystemReader(folder / "state").read_metadata().state_dict_metadata
        ours = {name: tuple(p.shape) for name, p in self._parameters()}
        theirs = {name: tuple(entry.size) for name, entry in saved.items() if name.startswith("model.")}
        different = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        return f"it is of another model ({different[0]}: {theirs.get(different[0])}, here {ours.get(different[0])})" if different else None

    def _load_state(self, folder: Path) -> None:
        """In place, each rank its shards, whatever the number of ranks was."""
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        fused, state = any(group.get("fused") for group in self.optimizer.param_groups), {}
        parameters = dict(self._parameters())
        for key, entry in saved.items():
            if key.startswith("model."):
                state[key] = parameters[key].detach()
                continue
            name, _, field = key.removeprefix("optimizer.").rpartition(".")
            p, dtype = parameters[name], entry.properties.dtype
            state[key] = torch.zeros_like(p, dtype=dtype) if entry.size else torch.zeros((), dtype=dtype, device=p.device if fused else "cpu")
            self.optimizer.state[p][field] = state[key]
        dcp.load(state, checkpoint_id=folder)

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(f"model.{name}", p) for name, p in self.policy.lm.named_parameters() if p.requires_grad]


def random_state() -> dict:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return dict(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state(), cuda=cuda)
