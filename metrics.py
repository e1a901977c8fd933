"""One dict a logging window: how values are aggregated, and where they go.

    python metrics.py            every metric as a table: name, unit, meaning, window rule, condition, what healthy looks like
    python metrics.py names      their names alone, a line a family, as README shows them
"""
import json
import math
import re
import sys
import time
from functools import cache
from pathlib import Path

import torch
from tqdm import tqdm

import glossary
from config import Config, ConfigError
from verdict import Verdict, name_of, saturation

LATEST = ("num_tokens", "epoch", "learning_rate", "model_version")     # the value at the end of the window
NEVER_HIDDEN = ("loss", "grad_norm")                                   # a NaN of these must reach the log


@cache
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
    """Writes one dict a window to output_dir/metrics.jsonl, the console and, with report_to, wandb or TensorBoard."""

    def __init__(self, config: Config, total_steps: int | None, resumed: int = 0):
        """resumed: the step that the run goes on from; lines up to it stay."""
        folder = Path(config.output_dir)
        self.file = self._open(folder / "metrics.jsonl", resumed)
        self.table = self._open(folder / "completions.jsonl", resumed) if config.log_completions else None
        self.started, self.config, self.wandb, self.board = time.time(), config, None, None
        self.verdict, self.records = Verdict(config), []
        self.bar = tqdm(total=total_steps, disable=config.disable_tqdm, unit="step", dynamic_ncols=True)   # None: off where no terminal
        if config.report_to == "wandb":
            import wandb
            self.wandb = wandb.init(project=config.project, name=config.run_name or folder.name, dir=config.output_dir)
        elif config.report_to == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError("report_to='tensorboard' needs a package that is missing: pip install tensorboard.") from error
            self.board = SummaryWriter(str(folder / "tensorboard"))

    @staticmethod
    def _open(path: Path, resumed: int):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if path.exists():                             # an earlier run's: kept beside the new one
            path.rename(path.with_name(f"{path.stem}.{path.stat().st_mtime_ns}.jsonl"))
        file = path.open("w")
        file.writelines(line for line in lines if resumed and line.endswith("\n") and json.loads(line)["step"] <= resumed)
        return file

    def log(self, step: int, metrics: dict[str, float], table: list[dict] = ()) -> None:
        """One window, with the last scored group's completions, or one evaluation."""
        metrics = metrics | self.verdict.judge(step, metrics)
        clean = {name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in metrics.items()}
        self._write(self.file, {"step": step, "time_s": round(time.time() - self.started, 3), **clean})
        self.records.append({name: value for name, value in clean.items() if SUMMARISED.fullmatch(name)})
        self.bar.update(step - self.bar.n)
        if "eval/step" not in clean:
            self.bar.set_postfix_str(short_verdict(clean), refresh=False)
        line = console_line(step, clean)
        self.bar.write(line) if not self.bar.disable else print(line, flush=True)
        valid = {name: value for name, value in clean.items() if value is not None}
        if self.wandb:
            self.wandb.log(valid, step=step)
        if self.board:
            for name, value in valid.items():
                self.board.add_text(name, value, step) if isinstance(value, str) else self.board.add_scalar(name, value, step)
        if self.config.log_completions and table:
            self._log_completions(step, table)

    def _log_completions(self, step: int, table: list[dict]) -> None:
        """To the console, to completions.jsonl, and as a table to wandb."""
        print_completions(step, table, self.config.num_completions_to_print)
        for row in table:
            self._write(self.table, {"step": step} | {name: None if value != value else value for name, value in row.items()})
        if self.wandb:
            import wandb
            self.wandb.log({"completions": wandb.Table(["step", *table[0]], [[step, *row.values()] for row in table])}, step=step)

    @staticmethod
    def _write(file, record: dict) -> None:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()

    def close(self) -> None:
        self.bar.close()
        rewards = [record["reward"] for record in self.records if record.get("reward") is not None]
        if len(rewards) >= 10:
            first, last = (sum(part) / 5 for part in (rewards[:5], rewards[-5:]))
            print(f"reward: {first:.3f} over the first 5 logged steps, {last:.3f} over the last 5", flush=True)
            print(f"saturation: {'; to do: '.join(saturation(self.records))}", flush=True)
        for sentence in self.verdict.summary():
            print(f"verdict: {sentence}", flush=True)
        self.file.close()
        if self.table:
            self.table.close()
        if self.wandb:
            self.wandb.finish()
        if self.board:
            self.board.close()


SUMMARISED = re.compile("reward|reward_kept|reward_dropped|frac_reward_zero_std|rewards/.*/mean")


def short_verdict(metrics: dict) -> str:
    """As in "generation-bound 27%": what holds the run back and the share of the time lost to it."""
    bound = metrics.get("verdict/bound")
    return "-" if bound is None else f"{name_of(bound)} {metrics['verdict/lost_frac']:.0%}"


def console_line(step: int, metrics: dict[str, float | None]) -> str:
    def show(name, form):
        value = metrics.get(name)
        return "-" if value is None else format(value, form)
    if "eval/step" in metrics:
        return f"step {step:4d}  evaluation of step {metrics['eval/step']:.0f}: reward {show('eval/reward', '.3f')}  pass@1 {show('eval/pass@1', '.3f')}"
    mfu = f"  mfu {metrics['perf/wall_clock_mfu']:.1f}%" if metrics.get("perf/wall_clock_mfu") is not None else ""
    return (f"step {step:4d}  reward {show('reward', '.3f')}  kept {show('reward_kept', '.3f')}  "
            f"trained {show('perf/wall_clock_trained_tokens_per_s', '.0f')} tok/s{mfu}  {short_verdict(metrics):20}  "
            f"staleness {show('sample/staleness_mean', '.2f')}  logp diff {show('sampling/sampling_logp_difference/mean', '.4f')}  "
            f"{show('perf/step_s', '.1f')} s/step")


def print_completions(step: int, table: list[dict], limit: int | None) -> None:
    """A few scored completions, as a table where rich is installed, else as lines."""
    rows = table[:limit]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for row in rows:
            print(f"  reward {row['reward']:.3f}  advantage {row['advantage']:+.3f}  {row['completion']!r}")
        return
    view = Table("prompt", "completion", "reward", "advantage", title=f"step {step}")
    for row in rows:
        view.add_row(Text(str(row["prompt"])), Text(str(row["completion"])), f"{row['reward']:.3f}", f"{row['advantage']:+.3f}")
    Console().print(view)


def full_table() -> str:
    """Markdown: one row a metric."""
    lines = ["| name | unit | meaning | window | logged only when | healthy |", "|---|---|---|---|---|---|"]
    for row in glossary.rows():
        window = {"tokens/s": "tokens / seconds", "%": "mean over seconds"}.get(row["unit"], rule(row["name"]))
        lines.append(f"| `{row['name']}`{' *' if row['own'] else ''} | {row['unit']} | {row['meaning']} | {window} | {row['when']} | {row['healthy']} |")
    return "\n".join(lines)


def names_table() -> str:
    """Markdown: one row a family of names."""
    families: dict[str, list[str]] = {}
    for row in glossary.rows():
        family, slash, name = row["name"].partition("/")
        families.setdefault(f"`{family}/`" if slash else "", []).append((name if slash else row["name"]) + ("*" if row["own"] else ""))
    return "\n".join(["| family | metrics |", "|---|---|", *(f"| {family} | {', '.join(names)} |" for family, names in families.items())])


if __name__ == "__main__":
    print(names_table() if sys.argv[1:] == ["names"] else full_table())
