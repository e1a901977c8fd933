"""Runs that are killed, and what is left: each drill is one table row. Nothing may be lost, trained twice, or left running.

    python bench/drills.py                     every drill on a tiny model and a simulated server (about 6 minutes on 2 quiet cores)
    python bench/drills.py rank_0 disk_full    some of them
    python bench/drills.py real 3              SmolLM2 and real vLLM, killed three times (or 0: unkilled)

A run of one epoch saves at every step. It is hurt at a random moment, must end within a minute with no process left, and is resumed until the
epoch is over. Then every prompt must have been trained once with all its rollouts (from rollouts/steps.jsonl of output_dir).
"""
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from serve import answers  # noqa: E402
from test_evaluate import Server, answer  # noqa: E402

PROMPTS, SIZE = 24, 4    # of an epoch; rollouts of a group
CONFIG = """
from config import Config
def alternating(completion_ids, **columns):
    return [float(i % 2) for i, _ in enumerate(completion_ids)]
config = Config(model={model!r}, reward_funcs=alternating, verify_sync_steps=0, use_cpu=True, bf16=False, gradient_checkpointing=False, num_generations=4, max_completion_length=8,
                num_sampler_logprobs=2, num_train_epochs=1.0, learning_rate=1e-5, token_budget={budget}, vllm_server_base_url={url!r}, disable_tqdm=True,
                max_staleness=100, max_concurrent_rollouts=16, save_rollouts=True, save_steps=1, save_total_limit=2, vllm_max_model_length={length},
                train_dataset=lambda: [dict(prompt=[dict(role="user", content=f"What is {{i}} + {{i}}?")]) for i in range({prompts})])
"""


STARTED = []             # so that an interrupted drill leaves none


class Run:
    """One start of train.py on the drill's folder."""

    def __init__(self, folder, *overrides, ranks=1, limit=None):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / "train.py"), str(folder / "x.py"), f"output_dir={folder}/run", *overrides]
        self.log, self.folder = folder / "log", folder
        STARTED.append(self)
        cap = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=cap,
                                        env=os.environ | dict(OMP_NUM_THREADS="1"))

    def family(self):
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def until(self, condition, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < deadline, f"waited too long: {self.log.read_text()[-2000:]}"
            time.sleep(0.002)
        return self.process.poll() is None

    def steps(self):
        path = self.folder / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def end(self, everyone):
        """Seconds until it ended, processes left 30 s later (one killed while it starts notices late), and its last sentence."""
        started = time.monotonic()
        self.process.wait(60)
        seconds = time.monotonic() - started
        _, left = psutil.wait_procs(everyone, timeout=30)
        words = [line for line in self.log.read_text().splitlines() if "rror" in line or "stopped by" in line]
        return seconds, len([p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]), words[-1][:110] if words else "killed"


def is_rollout(process):
    return "multiprocessing.spawn import spawn_main" in " ".join(process.cmdline())


def is_rank(number):
    return lambda process: "torch.distributed.run" not in process.cmdline() and "train.py" in " ".join(process.cmdline()) and process.environ().get("RANK", "0") == str(number)


def hurt(run, rng, target, moment, already):
    """Kill `target` of the run at the moment, or without one tell it to stop; None if the run was over before."""
    steps = already + rng.randrange(1, 4)
    if not run.until(lambda: run.steps() >= steps):
        return None
    time.sleep(rng.random() * 0.3)
    if not run.until(moment):
        return None
    everyone = run.family()
    next(p for p in everyone if target(p)).kill() if target else run.process.terminate()
    return run.end(everyone)


def account(folder, prompts):
    """How many prompts were trained with each rollout once, and how many rollouts too often."""
    lines = (folder / "run" / "rollouts" / "steps.jsonl").read_text().splitlines()
    steps = {step["step"]: step["trained"] for step in map(json.loads, lines)}
    counts = Counter(map(tuple, (sample for step in steps.values() for sample in step)))
    groups = Counter(group for group, _ in counts)
    return dict(steps=len(steps), trained_once=sum(groups[g] == SIZE for g in range(prompts)), prompts=prompts, twice=sum(n > 1 for n in counts.values()))


def drill(name, server, folder, rng, kills, prompts, target=is_rank(0), moment=lambda folder, server: True, ranks=1, limit=None):
    ended = []
    for _ in range(kills):
        run = Run(folder, "resume_from_checkpoint=true", ranks=ranks, limit=limit)
        already = run.steps()
        ended.append(hurt(run, rng, target, lambda: moment(folder, server), already) or run.end([]))
    last = Run(folder, "resume_from_checkpoint=true", ranks=ranks)
    last.until(lambda: False, 600)
    row = dict(drill=name, seed=rng.seed_, last_exit=last.process.returncode, slowest_end_s=round(max((s for s, _, _ in ended), default=0.0), 1), orphans=sum(n for _, n, _ in ended),
               ended=sorted({words for *_, words in ended}), **account(folder, prompts))
    row["holds"] = row["last_exit"] == 0 and row["orphans"] == row["twice"] == 0 and row["trained_once"] == prompts
    print(json.dumps(row), flush=True)
    return row["holds"]


DRILLS = dict(
    rank_0=dict(kills=3), rank_0_of_2=dict(kills=1, ranks=2), other_rank=dict(kills=1, ranks=2, target=is_rank(1)),
    rollout_process=dict(kills=1, target=is_rollout), sigterm=dict(kills=1, target=None), sigterm_2_ranks=dict(kills=1, ranks=2, target=None),
    disk_full=dict(kills=1, target=None, limit=8 << 20),
    inside_save=dict(kills=2, moment=lambda folder, server: any((folder / "run").glob("checkpoint-*.partial*"))),
    inside_sync=dict(kills=2, moment=lambda folder, server: bool(server.calls) and server.calls[-1].startswith(("/pause", "/collective_rpc"))))


def evaluation(server, folder):
    """What evaluating 8 prompts twice every 2 steps does to the share of its time that training waits for samples; two runs of each, in turns."""
    (folder / "eval.jsonl").write_text("".join(json.dumps(dict(prompt=[dict(role="user", content=f"What is {i} + 1?")])) + "\n" for i in range(8)))
    shares, evaluations = dict(without=[], with_it=[]), 0
    for name in [*shares] * 2:
        shutil.rmtree(folder / "run", ignore_errors=True)
        more = [f"eval_dataset={folder}/eval.jsonl", "eval_steps=2", "eval_num_generations=2"] if name == "with_it" else []
        run = Run(folder, "save_strategy=no", "save_rollouts=false", "max_concurrent_rollouts=48", *more)
        run.until(lambda: False, 600)
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [step for step in steps if step["step"] > 10 and "perf/step_s" in step]           # the first wait for everything to start
        shares[name].append(sum(step["perf/rollout_wait_s"] for step in steps) / sum(step["perf/step_s"] for step in steps))
        evaluations += len(list((folder / "run").glob("eval/*.jsonl")))
    points = 100 * (statistics.mean(shares["with_it"]) - statistics.mean(shares["without"]))
    row = dict(drill="evaluation", steps=len(steps), evaluations=evaluations, **{f"wait_share_{name}": [round(share, 3) for share in found] for name, found in shares.items()},
               points=round(points, 1), holds=points < 5)
    print(json.dumps(row), flush=True)
    return row["holds"]


def simulated(names, seed):
    from conftest import SMALL_MODEL, tiny_lm
    from transformers import AutoTokenizer
    model = tempfile.mkdtemp(prefix="tiny")
    AutoTokenizer.from_pretrained(SMALL_MODEL).save_pretrained(model)
    tiny_lm(vocab=49152, num_hidden_layers=1, hidden_size=16).save_pretrained(model)
    held = []
    for name in names:
        if name == "evaluation":
            with tempfile.TemporaryDirectory() as folder, Server(answer, keep=False, model=model) as server:
                server.delay, answer.version, folder = 0.6, 0, Path(folder)
                (folder / "x.py").write_text(CONFIG.format(model=model, url=server.url, budget=120, length=None, prompts=400))
                held.append(evaluation(server, folder))
            continue
        rng = random.Random(f"{name} {seed}")
        rng.seed_ = seed
        with tempfile.TemporaryDirectory() as folder, Server(answer, keep=False, model=model) as server:
            server.delay, answer.version, folder = 0.05, 0, Path(folder)
            (folder / "x.py").write_text(CONFIG.format(model=model, url=server.url, budget=120, length=None, prompts=PROMPTS))
            held.append(drill(name, server, folder, rng, prompts=PROMPTS, **DRILLS[name]))
    return all(held)


def real(port, kills):
    """About 12 steps with real vLLM, killed so many times."""
    model, url = str(ROOT / "models" / "SmolLM2-135M-Instruct"), f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        (folder / "x.py").write_text(CONFIG.format(model=model, url=url, budget=200, length=128, prompts=48))
        server = subprocess.Popen([sys.executable, "serve.py", str(folder / "x.py")], cwd=ROOT, stdout=(Path(top) / "vllm").open("w"), stderr=subprocess.STDOUT,
                                  start_new_session=True)
        try:
            while not answers(url):
                assert server.poll() is None, (Path(top) / "vllm").read_text()[-2000:]
                time.sleep(1)
            rng = random.Random(0)
            rng.seed_ = 0
            return drill(f"real_killed_{kills}_times", None, folder, rng, kills, prompts=48)
        finally:
            os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    asked = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        held = real(8500, int(asked[1])) if asked[:1] == ["real"] else simulated(asked or [*DRILLS, "evaluation"], seed=0)
    finally:
        for run in STARTED:
            if run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
    sys.exit(0 if held else 1)
