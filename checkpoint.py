"""Checkpoints to resume from.

output_dir/checkpoint-<step> is a Hugging Face folder with the state beside it: `state` (parameters and moments, as torch.distributed.checkpoint
writes them), trainer_state.json, rollout_state.json and samples.jsonl (the prompts, see feed.Progress), and each rank's random state.
"""
import json
import random
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from config import Config, ConfigError
from export import Hub, card, weights_to_save, write_model
from feed import Progress, RolloutFeed
from folders import clear, defect, found, newest, prune, publish, set_aside, step_of
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
    """Saves and restores the state of a run. `save` and `restore` are collectives; saving changes nothing of what it saves.

    On a GPU `save` copies to the host and returns: a thread writes while the next steps train, its collectives in a group of their own. There is
    one copy at a time: a save that is due before the last one is written waits for it. What fails in the thread is raised by the next `check`.
    """

    background = property(lambda self: next(self.policy.parameters()).device.type == "cuda", doc="On a CPU the copy would be a second model in the same memory.")

    def __init__(self, config: Config, policy: Policy, optimizer, scheduler, scaler, tokenizer, dtype: torch.dtype):
        self.config, self.policy, self.optimizer, self.scheduler, self.scaler = config, policy, optimizer, scheduler, scaler
        self.tokenizer, self.dtype, self.output, self.saved_at, self.rank = tokenizer, dtype, Path(config.output_dir), -1, dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.ddp_timeout))
        self.written = Future()                          # the last save
        self.written.set_result(None)
        clear(self.output) if self.rank == 0 else None

    def save(self, counters: Counters, window: dict, feed: RolloutFeed | None, hub: Hub | None = None) -> None:
        """Take what checkpoint-<step> holds and have it written; window: values not yet logged; feed and hub: on rank 0. Raises as `check` does."""
        asked = time.monotonic()
        self.check(wait=True)
        started = time.monotonic()
        if started - asked > 0.05 and self.rank == 0:
            print(f"step {counters.step}: waited {started - asked:.1f} s until the checkpoint before was written", flush=True)
        texts = self._texts(counters, window, feed.progress()) if self.rank == 0 else {}
        state = {} if self.config.save_only_model else self._state()
        weights = weights_to_save(self.policy, self.dtype, copy=self.background)
        self.written, self.saved_at, held = Future(), counters.step, time.monotonic() - asked
        taken = (self.written, counters.step, weights, texts, state, random_state(), hub, started, held)
        threading.Thread(target=self._write, args=taken, daemon=True, name="checkpoint").start()        # a daemon, so that the second signal stops the run at once
        self.check(wait=not self.background)

    def check(self, wait: bool = False) -> None:
        """Raises what ended the writing, with `wait` after its end: ConfigError when the disk did not take it."""
        if wait or self.written.done():
            self.written.result()

    def stop(self) -> None:
        """What is being written becomes whole whatever ends the run, unless a signal stops it at once."""
        if not isinstance(sys.exc_info()[1], (SystemExit, KeyboardInterrupt)):
            self.written.exception()

    def _state(self) -> dict[str, Tensor]:
        state = {name: p.detach() for name, p in self._parameters()}
        for name, p in self._parameters():               # as it is: torch's own helper steps an optimizer that has no state yet
            state |= {f"optimizer.{name}.{field}": value for field, value in self.optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
        return {name: value.to("cpu", copy=True) for name, value in state.items()} if self.background else state

    def _texts(self, counters: Counters, window: dict, progress: Progress) -> dict:
        """By file; the samples' lines are made as they are written."""
        rates = [{name: group[name] for name in ("lr", "initial_lr") if name in group} for group in self.optimizer.param_groups]
        trainer = dict(asdict(counters), window=window, rates=rates, scheduler=self.scheduler.state_dict(), scaler=self.scaler.state_dict())
        rollouts = dict(prompt_index=progress.first, model_version=counters.version, done=sorted(progress.done), in_flight=progress.in_flight,
                        evaluating=progress.evaluating)
        state = {"trainer_state.json": json.dumps(trainer), "rollout_state.json": json.dumps(rollouts),
                 "samples.jsonl": (json.dumps(sample_record(sample)) + "\n" for sample in progress.samples)}
        return {"README.md": card(self.config)} | ({} if self.config.save_only_model else state)

    def _write(self, written: Future, step: int, weights: dict, texts: dict, state: dict, drawn: dict, hub: Hub | None, started: float, held: float) -> None:
        folder, partial = (self.output / f"checkpoint-{step}{suffix}" for suffix in ("", ".partial"))
        try:
            if self.rank == 0:
                write_model(weights, self.policy, self.tokenizer, partial)
                for name, parts in texts.items():
                    (partial / name).write_text("".join(parts))
            dist.barrier(self.group)                     # the folder is there
            if state:                                    # nothing to copy ahead: that would wait for the GPU's stream
                dcp.save(state, storage_writer=dcp.FileSystemWriter(partial / "state", per_thread_copy_ahead=0), process_group=self.group)
                torch.save(drawn, partial / f"random_{self.rank}.pt")
            dist.barrier(self.group)
            if self.rank == 0:
                publish(partial, folder)
                prune(self.output, self.config.save_total_limit)
                print(f"saved {folder} in {time.monotonic() - started:.1f} s" + (f" (training waited {held:.1f} s)" if self.background else ""), flush=True)
            if hub:
                hub.push(folder, f"step {step}")
            dist.barrier(self.group)
            written.set_result(None)
        except (OSError, SafetensorError, CheckpointException) as error:
            clear(self.output)
            last = f"resume_from_checkpoint={newest(self.output)} goes on from there" if found(self.output) else "no earlier one is there"
            written.set_exception(ConfigError(f"{folder} could not be written ({(str(error).strip() or repr(error)).splitlines()[-1]}): make room; {last}."))
        except BaseException as error:
            written.set_exception(error)
        finally:                                         # where the disk does not even let itself be cleared
            written.done() or written.set_exception(RuntimeError(f"{folder} could not be written"))

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
        return counters, saved["window"], Progress(rollouts["prompt_index"], frozenset(rollouts["done"]), samples, rollouts.get("evaluating", False))

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
    return dict(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
