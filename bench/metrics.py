"""What metrics cost a training step on one CPU core: recording, merging the rollout process's reports, the verdict, and writing.

    python bench/metrics.py [groups=32] [terms=12000] [steps=50]

One JSON object: milliseconds of a step by part, medians. A step here has 32 scored groups of 8 rollouts and logs each step; the loss
statistics are those of one row of so many terms, on the CPU (on a GPU they are a few small kernels in the step's stream).
"""
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import glossary  # noqa: E402
from config import Config  # noqa: E402
from flops import Cost, step_flops  # noqa: E402
from loss import LossStats, Objective  # noqa: E402
from metrics import Logger, Window  # noqa: E402
from packing import Sample, pack_row  # noqa: E402

PARTS = ("record_ms", "flops_ms", "collect_ms", "log_ms")
NAMES = [row["name"] for row in glossary.rows() if not row["name"].startswith("verdict")]
OF_ROLLOUTS = [name for name in NAMES if name.split("/")[0] in ("completions", "rewards", "rollout", "reward", "tools", "env")]


def report_of_a_group() -> dict:
    window = Window()
    for name in OF_ROLLOUTS:
        window.add_each(name, np.random.rand(8))
    return window.drain()


def loss_statistics(terms: int, top_k: int = 8, samples: int = 32) -> float:
    """Milliseconds, of one row."""
    row = [-torch.rand(terms) for _ in range(3)] + [-torch.rand(terms, top_k) * 9, torch.randn(terms), torch.randint(samples, (terms,))]
    stats = LossStats(torch.device("cpu"))
    started = time.perf_counter()
    stats.add(Objective(), *row, samples)
    stats.reduce(Objective())
    return 1e3 * (time.perf_counter() - started)


def main(groups: int = 32, terms: int = 12_000, steps: int = 50) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    rows = [pack_row([Sample(rng.integers(1000, size=1024, dtype=np.int32), np.arange(512, 1024, dtype=np.int32), np.zeros(512, np.float32),
                             np.zeros((512, 0), np.int32), np.zeros((512, 0), np.float32), 1.0, i, 0) for i in range(16)])]
    cost, times = Cost(10**9, 0, 10**8, {None: 10**5, 4096: 10**5}), {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        logger, window = Logger(Config(model="none", reward_funcs=len, output_dir=folder, disable_tqdm=True), None), Window()
        for step in range(1, steps + 1):
            reports, marks = [report_of_a_group() for _ in range(groups)], [time.perf_counter()]
            window.add_all({name: (0.5, 100) for name in NAMES} | {"perf/step_s": 1.0})
            marks.append(time.perf_counter())
            step_flops(cost, rows)
            marks.append(time.perf_counter())
            for report in reports:
                window.merge(report)
            marks.append(time.perf_counter())
            with contextlib.redirect_stdout(io.StringIO()):
                logger.log(step, window.result())
            marks.append(time.perf_counter())
            for part, start, end in zip(PARTS, marks, marks[1:]):
                times[part].append(1e3 * (end - start))
    of_loss = statistics.median(loss_statistics(terms) for _ in range(steps))
    medians = {part: round(statistics.median(values), 3) for part, values in times.items()}
    print(json.dumps(dict(bench="metrics", groups=groups, names=len(NAMES), **medians, total_ms=round(sum(medians.values()), 3),
                          loss_statistics_ms=round(of_loss, 3), terms=terms)))


if __name__ == "__main__":
    main(**{name: int(value) for name, value in (argument.split("=") for argument in sys.argv[1:])})
