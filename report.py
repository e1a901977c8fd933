"""Pictures of one run, or of several over each other:  python report.py RUN [RUN …]   (folders with a metrics.jsonl)

Writes report.html, one page that needs no network, and its pictures as PNGs into the folder report/ of the first run.
"""
import html
import io
import json
import sys
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import glossary
from config import interval
from verdict import duplicates, name_of, saturation, trend

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#9f3a9b", "#b7791f", "#4a5568")
STYLES = ("-", "--", ":", "-.")
matplotlib.rcParams.update({
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8, "figure.figsize": (6.2, 3.1), "figure.constrained_layout.use": True,
    "svg.hashsalt": "report"})
# Title, y label, and the metrics of each picture, the most telling first.
PICTURES = dict(
    reward=("Reward", "reward", ["reward", "reward_kept", "reward_dropped"]),
    saturation=("Groups without a signal, repeated rollouts", "fraction", ["frac_reward_zero_std", "completions/duplicate_frac", "completions/clipped_ratio"]),
    lengths=("Completion length", "tokens", ["completions/mean_length", "completions/mean_terminated_length", "completions/max_length", "completions/min_length"]),
    staleness=("Staleness", "versions", ["sample/staleness_mean", "sample/staleness_max"]),
    mismatch=("Trainer and sampler: absolute log-prob difference", "nats", ["sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "sampling/mismatch_kl"]),
    ratio=("Importance ratio", "ratio", [f"sampling/importance_sampling_ratio/{part}" for part in ("mean", "max", "min")]),
    throughput=("Throughput", "tokens/s", ["perf/wall_clock_trained_tokens_per_s", "rollout/generated_tokens_per_s", "perf/wall_clock_forwarded_tokens_per_s"]),
    utilization=("Model FLOPs utilization of the trainer", "% of the peak", ["perf/wall_clock_mfu", "perf/fwd_bwd_mfu"]),
    rollouts=("Rollouts in flight and samples queued", "number", ["rollout/concurrency", "rollout/concurrency_cap", "rollout/queue_size"]),
    entropy=("Entropy", "nats", ["entropy"]),
    gradient=("Gradient norm", "norm", ["grad_norm"]),
    evaluation=("Evaluation", "reward", ["eval/reward"]))
LOGARITHMIC = ("mismatch", "gradient")
BUDGET = (("training", "#2b6cb0", ("perf/fwd_bwd_s",)), ("optimizer", "#63b3ed", ("perf/optimizer_s",)), ("weight sync", "#b7791f", ("perf/weight_sync_s",)),
          ("waiting for samples", "#e53e3e", ("perf/rollout_wait_s",)))


@dataclass
class Run:
    name: str
    records: list[dict]                  # of metrics.jsonl
    completions: list[dict]
    config: dict                         # {} where there is no config.json

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values where it was logged, what came after the last step left out; an evaluation's at the step it was asked for."""
        at = "eval/step" if name.startswith("eval/") else "step"
        pairs = {record.get(at, record["step"]): record[name] for record in reversed(self.records) if record.get(name) is not None}
        return tuple(np.array(sorted(pairs.items()), float).reshape(-1, 2).T)


def read_run(folder: Path) -> Run:
    if not (folder / "metrics.jsonl").exists():
        sys.exit(f"error: {folder} has no metrics.jsonl: give the output_dir of a run.")
    config = json.loads((folder / "config.json").read_text())["config"] if (folder / "config.json").exists() else {}
    return Run(folder.resolve().name, read_lines(folder / "metrics.jsonl"), read_lines(folder / "completions.jsonl"), config)


def read_lines(path: Path) -> list[dict]:
    """Without a last line that a killed run left unfinished."""
    if not path.exists():
        return []
    *lines, last = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a twentieth of the run around each value."""
    width = max(len(values) // 20, 1)
    return np.array([values[max(i - width, 0):i + width + 1].mean() for i in range(len(values))])


def draw(key: str, runs: list[Run]):
    """A figure of one of PICTURES, or None where no run has its metrics. One run: a colour a metric; several: a colour a run."""
    title, label, names = PICTURES[key]
    figure = Figure()
    axes = figure.subplots()
    for r, run in enumerate(runs):
        for n, name in enumerate(names if len(runs) == 1 else names[:2]):        # more lines could not be told apart
            steps, values = run.series(name)
            if not len(steps):
                continue
            colour, style = (COLOURS[n], "-") if len(runs) == 1 else (COLOURS[r % len(COLOURS)], STYLES[n % len(STYLES)])
            short = name[max(commonprefix(names).rfind("/"), name.find("/")) + 1:] if len(names) > 1 else name
            axes.plot(steps, values, style, color=colour, alpha=0.25 if len(steps) > 20 else 1, linewidth=1, marker="o" if len(steps) < 3 else None)
            axes.plot(steps, smooth(values) if len(steps) > 20 else values, style, color=colour, linewidth=1.6, label=short if len(runs) == 1 else f"{run.name}: {short}")
    if not axes.lines:
        return None
    if key in LOGARITHMIC and min(line.get_ydata().min() for line in axes.lines) > 0:
        axes.set_yscale("log")
    return finish(figure, axes, title, label)


def finish(figure, axes, title: str, label: str):
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    columns = len(labels) if sum(map(len, labels)) + 6 * len(labels) < 90 else 2 if max(map(len, labels)) < 45 else 1
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns)
    return figure


def draw_budget(run: Run):
    """What each step's wall time goes to, stacked; what is left of perf/step_s is on top."""
    records = [record for record in run.records if record.get("perf/step_s")]
    if len(records) < 2:
        return None
    steps, whole = np.array([r["step"] for r in records]), np.array([r["perf/step_s"] for r in records])
    every = run.config.get("weight_sync_steps", 1)
    parts = [np.array([sum(r.get(name) or 0 for name in names) for r in records], float) for _, _, names in BUDGET]
    parts[2] /= every if interval(run.config.get("logging_steps", 1), run.config.get("max_steps", -1)) >= every else 1          # logged a sync, not a step
    rest = np.maximum(whole - sum(parts), 0)
    figure = Figure()
    axes = figure.subplots()
    axes.stackplot(steps, *parts, rest, labels=[name for name, _, _ in BUDGET] + ["the rest"], colors=[colour for _, colour, _ in BUDGET] + ["#cbd5e0"], linewidth=0)
    axes.set_ylim(0, min(whole.max(), 3 * np.median(whole)) * 1.05)                  # a first step that waits for everything hides the others
    axes.margins(x=0)
    return finish(figure, axes, f"Time of a step: {run.name}", "seconds")


def pictures(runs: list[Run]) -> dict:
    """Name -> figure, of what the runs have logged."""
    drawn = {"reward": draw("reward", runs)}
    drawn |= {f"time_{i}" if i else "time": draw_budget(run) for i, run in enumerate(runs)}
    drawn |= {key: draw(key, runs) for key in PICTURES if key != "reward"}
    return {name: figure for name, figure in drawn.items() if figure is not None}


# The page

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a202c; max-width: 1240px; margin: 24px auto; padding: 0 20px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 32px 0 8px } p { margin: 4px 0 12px; color: #4a5568 }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 12px 20px } .grid svg { width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; margin: 6px 0 14px } th, td { text-align: left; vertical-align: top; padding: 5px 10px; border-bottom: 1px solid #e2e8f0 }
th { color: #4a5568; font-weight: 600; font-size: 13px } td.number { font-variant-numeric: tabular-nums; white-space: nowrap }
.completion { font: 12.5px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15em; overflow-y: auto }
.good { color: #2f855a } .bad { color: #c53030 } .side td { border-left: 1px solid #e2e8f0 } .side { table-layout: fixed }
"""


def table(header: list[str], rows: list[list[str]], kind: str = "") -> str:
    """Cells are HTML already."""
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{''.join(f'<th>{name}</th>' for name in header)}</tr>{cells}</table>"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def overview(run: Run) -> list[str]:
    """The cells of a run: its length, where its reward went, how fast it was, and what held it back for most windows."""
    reward, tokens, mfu = (trend(run.records, name) or (None, None) for name in ("reward", "perf/wall_clock_trained_tokens_per_s", "perf/wall_clock_mfu"))
    bounds = [record["verdict/bound"] for record in run.records if record.get("verdict/bound")]
    most = max(bounds, key=bounds.count, default=None)
    advice = next((record["verdict/advice"] for record in reversed(run.records) if most and record.get("verdict/bound") == most), "–")
    verdict = "–" if most is None else f"{name_of(most)} in {bounds.count(most)} of {len(bounds)} windows"
    return [html.escape(cell) for cell in (run.name, f"{run.records[-1]['step']:,}", f"{number(reward[0])} → {number(reward[1])}", number(tokens[1]),
                                           number(mfu[1]), verdict, advice)]


def saturation_tables(run: Run) -> str:
    meanings = {row["name"]: row["meaning"] for row in glossary.rows()}
    rows = [[f"<code>{name}</code>", *(f"<span class='number'>{number(value)}</span>" for value in trend(run.records, name)), html.escape(meanings[name])]
            for name in ("frac_reward_zero_std", "reward_dropped", "reward", "completions/duplicate_frac", "entropy") if trend(run.records, name)]
    readings = [saturation(run.records), duplicates(run.records, run.config.get("num_generations", 8))]
    read = [[f"<span class='{'good' if to_do.startswith('nothing') else 'bad'}'>{html.escape(diagnosis)}</span>", html.escape(to_do)] for diagnosis, to_do in readings]
    return f"<h2>Saturation: {html.escape(run.name)}</h2>" + table(["metric", "first third", "last third", "what it is"], rows) + table(["diagnosis", "what to do"], read)


def completions_table(run: Run, columns: int = 4, rows: int = 3) -> str:
    """Completions of steps spread over training, side by side: each group's best, its middle and its worst."""
    if not run.completions:
        return f"<h2>Completions: {html.escape(run.name)}</h2><p>None were kept: train with log_completions=True.</p>"
    steps = sorted({row["step"] for row in run.completions})
    steps = [steps[i] for i in sorted({round(i) for i in np.linspace(0, len(steps) - 1, columns)})]
    groups = [sorted((row for row in run.completions if row["step"] == step), key=lambda row: -row["advantage"]) for step in steps]
    groups = [[group[i] for i in sorted({round(i) for i in np.linspace(0, len(group) - 1, rows)})] for group in groups]

    def cell(row):
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3g}, advantage {row['advantage']:+.2f}"
        kind = "" if not row["advantage"] else "good" if row["advantage"] > 0 else "bad"
        return f"<span class='{kind}'>{reward}</span><div class='completion'>{html.escape(str(row['completion']))}</div>"
    cells = [[f"<div class='completion'>{html.escape(str(group[0]['prompt']))}</div>" for group in groups]]
    cells += [[cell(group[i]) if i < len(group) else "" for group in groups] for i in range(rows)]
    return f"<h2>Completions: {html.escape(run.name)}</h2>" + table([f"step {step}" for step in steps], cells, "side")


def svg(figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg"):]


def page(runs: list[Run], figures: dict) -> str:
    title = html.escape(" · ".join(run.name for run in runs))
    head = ["run", "steps", "reward, first → last third", "trained tokens/s", "MFU %", "verdict", "what to change"]
    drawn = "".join(f"<div>{unique_ids(svg(figure), name)}</div>" for name, figure in figures.items())
    tables = "".join(saturation_tables(run) for run in runs) + "".join(completions_table(run) for run in runs)
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><link rel='icon' href='data:,'><title>{title}</title><style>{STYLE}</style></head><body>"
            f"<h1>{title}</h1><p>Thin lines are what was logged, thick ones a mean over a twentieth of the run.</p>"
            f"{table(head, [overview(run) for run in runs])}<div class='grid'>{drawn}</div>{tables}</body></html>")


def unique_ids(text: str, prefix: str) -> str:
    """Several pictures of matplotlib in one page use the same ids for different things."""
    return text.replace('id="', f'id="{prefix}-').replace('="#', f'="#{prefix}-').replace("url(#", f"url(#{prefix}-")


def main(folders: list[str]) -> None:
    if not folders:
        sys.exit("error: which run? Usage: python report.py RUN [RUN …]")
    runs = [read_run(Path(folder)) for folder in folders]
    if empty := [run.name for run in runs if not run.records]:
        sys.exit(f"error: nothing was logged yet in {', '.join(empty)}.")
    figures, out = pictures(runs), Path(folders[0]) / "report"
    out.mkdir(exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=160)
    (out / "report.html").write_text(page(runs, figures))
    print(f"{out / 'report.html'} and {len(figures)} pictures beside it")


if __name__ == "__main__":
    main(sys.argv[1:])
