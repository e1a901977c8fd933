"""One dict a logging window: how values are aggregated, and where they go."""
import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from config import Config

LATEST = ("num_tokens", "epoch", "learning_rate", "model_version")     # the value at the end of the window
NEVER_HIDDEN = ("loss", "grad_norm")                                   # a NaN of these must reach the log


def rule(name: str) -> str:
    """How a window aggregates `name`: latest, sum, max, min or mean (weighted by what it was measured over)."""
    if name in LATEST or name.startswith("eval/"):    # an evaluation's values are final
        return "latest"
    words = name.rsplit("/", 1)[-1].split("_")
    return next((r for word, r in (("count", "sum"), ("max", "max"), ("min", "min")) if word in words), "mean")


class Window:
    """Everything recorded since the last log. NaN and None never enter an aggregate, except a loss or a gradient norm."""

    def __init__(self):
        self.values: dict[str, list[float]] = {}      # name -> [aggregate, weight]

    def add(self, name: str, value: float | None, weight: float = 1.0) -> None:
        """Record `value`, for a mean measured over `weight` rollouts, samples, calls, tokens or seconds."""
        how = rule(name)
        if value is None or (math.isnan(value) and name not in NEVER_HIDDEN) or weight <= 0:
            return
        old = self.values.get(name)
        if how == "latest" or old is None:
            self.values[name] = [value * weight, weight] if how == "mean" else [value, 1.0]
        elif how == "mean":
            self.values[name] = [old[0] + value * weight, old[1] + weight]
        else:
            self.values[name][0] = {"sum": old[0] + value, "max": max(old[0], value), "min": min(old[0], value)}[how]

    def add_all(self, values: dict[str, float | tuple[float, float]], weight: float = 1.0) -> None:
        """Record many; a pair is a value and its own weight."""
        for name, value in values.items():
            self.add(name, *(value if isinstance(value, tuple) else (value, weight)))

    def add_each(self, name: str, values) -> None:
        for value in values:
            self.add(name, float(value))

    def merge(self, other: dict[str, list[float]]) -> None:
        """Add what another window drained."""
        for name, (value, weight) in other.items():
            self.add(name, value / weight if rule(name) == "mean" else value, weight)

    def drain(self) -> dict[str, list[float]]:
        values, self.values = self.values, {}
        return values

    def result(self) -> dict[str, float]:
        """The window's metrics; empties it."""
        return {name: value / weight if rule(name) == "mean" else value for name, (value, weight) in self.drain().items()}


def mark(device: torch.device):
    """This moment: on a GPU an event in its stream, so that measuring waits for nothing."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start, end) -> float:
    """Between two marks; on a GPU only once something has waited for the end."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


class Logger:
    """Writes one dict a window to output_dir/metrics.jsonl, the console and, with report_to, wandb."""

    def __init__(self, config: Config, total_steps: int | None, resumed: int = 0):
        """resumed: the step that the run goes on from; lines up to it stay."""
        path = Path(config.output_dir) / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if path.exists():                             # an earlier run's: kept beside the new one
            path.rename(path.with_name(f"metrics.{path.stat().st_mtime_ns}.jsonl"))
        self.file, self.started, self.rewards, self.wandb = path.open("w"), time.time(), [], None
        self.file.writelines(line for line in lines if resumed and line.endswith("\n") and json.loads(line)["step"] <= resumed)
        self.bar = tqdm(total=total_steps, disable=config.disable_tqdm, unit="step", dynamic_ncols=True)   # None: off where no terminal
        if config.report_to == "wandb":
            import wandb
            self.wandb = wandb.init(project=config.project, name=config.run_name or Path(config.output_dir).name, dir=config.output_dir)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "time_s": round(time.time() - self.started, 3), **clean}
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        self.rewards += [clean["reward"]] if clean.get("reward") is not None else []
        line = console_line(step, clean)
        self.bar.update(step - self.bar.n)
        self.bar.write(line) if not self.bar.disable else print(line, flush=True)
        if self.wandb:
            self.wandb.log({name: value for name, value in clean.items() if value is not None}, step=step)

    def close(self) -> None:
        self.bar.close()
        if len(self.rewards) >= 10:
            first, last = (sum(part) / 5 for part in (self.rewards[:5], self.rewards[-5:]))
            print(f"reward: {first:.3f} over the first 5 logged steps, {last:.3f} over the last 5", flush=True)
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def console_line(step: int, metrics: dict[str, float | None]) -> str:
    def show(name, form, factor=1.0):
        value = metrics.get(name)
        return "-" if value is None else format(value * factor, form)
    wait = (metrics.get("perf/rollout_wait_s") or 0) / (metrics.get("perf/step_s") or 1)
    return (f"step {step:4d}  reward {show('reward', '.3f')}  kept {show('reward_kept', '.3f')}  "
            f"trained {show('perf/wall_clock_trained_tokens_per_s', '.0f')} tok/s  wait {wait:4.0%}  "
            f"staleness {show('sample/staleness_mean', '.2f')}  logp diff {show('sampling/sampling_logp_difference/mean', '.4f')}  "
            f"{show('perf/step_s', '.1f')} s/step")


def print_completions(step: int, table: list[dict], limit: int | None) -> None:
    """A few scored completions, as a table where rich is installed, else as lines."""
    rows = table[:limit]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in rows:
            print(f"  reward {row['reward']:.3f}  advantage {row['advantage']:+.3f}  {row['completion']!r}")
        return
    view = Table("prompt", "completion", "reward", "advantage", title=f"step {step}")
    for row in rows:
        view.add_row(row["prompt"], row["completion"], f"{row['reward']:.3f}", f"{row['advantage']:+.3f}")
    Console().print(view)
