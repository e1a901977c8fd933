"""Rollouts on disk: every scored group as a line of JSON.

A run writes shards groups_00000.jsonl, …; each start of it begins a new one. A group that was lost with a killed run and generated
again is in two shards: the later line is the one that counts.
"""
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from config import Config, ConfigError
from packing import Sample

GROUPS_A_SHARD = 1000
ARRAYS = dict(input_ids=np.int32, trained_index=np.int32, sampler_logprobs=np.float32, topk_ids=np.int32, topk_logprobs=np.float32,
              candidate_ids=np.int32, candidate_counts=np.int32)


def sample_record(sample: Sample) -> dict:
    """A sample as JSON holds it, exactly: a float32 survives the way through its shortest decimal form. Not a number becomes None."""
    record = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(sample).items()}
    record["topk_logprobs"] = [[value if math.isfinite(value) else None for value in row] for row in record["topk_logprobs"]]
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}


def recorded_sample(record: dict, **changes) -> Sample:
    record = record | changes
    arrays = {name: None if record[name] is None else np.array(record[name], kind) for name, kind in ARRAYS.items()}
    terms = len(arrays["trained_index"])
    for name in ("topk_ids", "topk_logprobs"):
        arrays[name] = arrays[name].reshape(terms, -1) if terms else arrays[name].reshape(0, 0)
    arrays["topk_logprobs"] = np.where(np.isnan(arrays["topk_logprobs"]), np.float32(-np.inf), arrays["topk_logprobs"])
    numbers = {name: math.nan if record[name] is None else record[name] for name in ("advantage", "mean_version", "reward")}
    return Sample(**record | arrays | numbers)


class RolloutWriter:
    """Appends scored groups to output_dir/rollouts; a kill costs at most the line being written."""

    def __init__(self, config: Config):
        self.folder, self.file, self.written = Path(config.output_dir) / "rollouts", None, 0

    def write(self, group, by_func: np.ndarray, advantages: np.ndarray, kept: bool) -> None:
        """group: a scored rollout.RolloutGroup; by_func (functions, G) and advantages (G,); kept: whether it is trained."""
        if self.file is None or self.written >= GROUPS_A_SHARD:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file, self.written = (self.folder / f"groups_{len(list(self.folder.glob('groups_*.jsonl'))):05d}.jsonl").open("x"), 0
        count = sum(map(len, group.completions_sequences))
        rollouts = [dict(prompt=prompt, completion=completion, reward=_number(reward), rewards=list(map(_number, each)), advantage=_number(advantage),
                         samples=[sample_record(sample) | dict(advantage=_number(advantage), reward=_number(reward), group_samples=count) for sample in samples])
                    for prompt, completion, reward, each, advantage, samples in
                    zip(group.prompts, group.completions, group.rewards, by_func.T, advantages, group.completions_sequences, strict=True)]
        self.file.write(json.dumps(dict(group_id=group.group_id, row_index=group.row_index, model_version=group.model_version, kept=bool(kept), rollouts=rollouts)) + "\n")
        self.file.flush()
        self.written += 1


def _number(value) -> float | None:
    return None if math.isnan(value) else float(value)


def read_groups(folder: str | Path) -> Iterator[dict]:
    """The groups in the order in which they were scored, each once. Raises ConfigError when there is none."""
    shards = sorted(Path(folder).glob("groups_*.jsonl"))
    latest = {}
    for shard in shards:
        latest |= {group["group_id"]: (shard, number) for number, group in _lines(shard)}
    if not latest:
        raise ConfigError(f"{folder} holds no rollouts (groups_*.jsonl): give the `rollouts` folder of a run with save_rollouts=True.")
    for shard in shards:
        yield from (group for number, group in _lines(shard) if latest[group["group_id"]] == (shard, number))


def _lines(shard: Path) -> Iterator[tuple[int, dict]]:
    with shard.open() as file:
        for number, line in enumerate(file):
            if line.endswith("\n"):              # else cut short by a kill
                yield number, json.loads(line)
