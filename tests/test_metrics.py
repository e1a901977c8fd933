"""A metric's name says how a window aggregates it, and no NaN wipes a window or hides in one."""
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, tiny_config, tiny_moe
from fake_server import choice
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_worker import run as run_here
from test_sync import FakeVllm
from test_tools import Script, hermes
from transformers import AutoTokenizer
from wandb.proto import wandb_internal_pb2

import glossary
from config import ConfigError
from export import card
from metrics import Logger, Window, names_table, print_completions, rule
from train import describe_run, speed


@pytest.mark.parametrize("name, how", [
    ("sample/dropped_stale_count", "sum"), ("sampling/invalid_logprob_count", "sum"), ("tools/search/call_count", "sum"),
    ("completions/max_length", "max"), ("completions/max_terminated_length", "max"), ("rollout/turns_max", "max"),
    ("sampling/importance_sampling_ratio/max", "max"), ("clip_ratio/high_max", "max"), ("completions/min_length", "min"),
    ("clip_ratio/low_min", "min"), ("clip_ratio/low_mean", "mean"), ("reward", "mean"), ("reward_kept", "mean"), ("entropy", "mean"),
    ("rewards/max_count_reward/mean", "mean"), ("rewards/count_words/group_std", "mean"), ("frac_reward_zero_std", "mean"),
    ("perf/wall_clock_trained_tokens_per_s", "mean"), ("rollout/concurrency", "mean"), ("completions/mean_length", "mean"),
    ("num_tokens", "latest"), ("epoch", "latest"), ("loss", "mean"), ("learning_rate", "latest"), ("model_version", "latest")])
def test_the_name_says_how_a_window_aggregates(name, how):
    assert rule(name) == how


def window_of(*records):
    window = Window()
    for record in records:
        window.add(*record)
    return window


@pytest.mark.parametrize("missing", [math.nan, None])
def test_a_step_without_a_value_does_not_wipe_the_window(missing):
    window = window_of(*(("reward", value) for value in (0.5, missing, 0.8, 0.7)))
    assert window.result() == {"reward": pytest.approx(2 / 3)}


@pytest.mark.parametrize("name", ["reward", "completions/max_length", "completions/min_length", "sample/dropped_stale_count"])
def test_a_metric_nobody_could_measure_is_absent(name):
    assert window_of((name, math.nan), (name, None), (name, math.nan)).result() == {}


def test_a_mean_is_weighted_by_what_it_was_measured_over():
    assert window_of(("entropy", 2.0, 100), ("entropy", 0.5, 900)).result() == {"entropy": pytest.approx(0.65)}


def test_a_measurement_over_nothing_does_not_count():
    assert window_of(("entropy", 2.0, 0), ("reward", 1.0, 3), ("reward", 9.0, 0)).result() == {"reward": 1.0}


def test_a_rate_is_the_sum_of_tokens_over_the_sum_of_seconds():
    name = "perf/wall_clock_trained_tokens_per_s"
    assert window_of((name, 1000 / 1, 1), (name, 1000 / 9, 9)).result() == {name: pytest.approx(2000 / 10)}


def test_a_utilization_is_the_windows_work_over_its_seconds():
    """60 %·s of work in 2 s and again in 10 s: 10 %, not the mean of 30 and 6."""
    plan, window = SimpleNamespace(forwarded_tokens=1, trained_tokens=1), Window()
    assert speed(plan, 2.0, 5.0, 60.0)["perf/fwd_bwd_mfu"] == (30.0, 2.0) and not any("mfu" in name for name in speed(plan, 2.0, 5.0))
    for seconds in (2.0, 10.0):
        window.add_all(speed(plan, seconds, 2 * seconds, 60.0))
    metrics = window.result()
    assert metrics["perf/fwd_bwd_mfu"] == pytest.approx(10) and metrics["perf/wall_clock_mfu"] == pytest.approx(5)


def test_what_a_run_records_of_its_config_is_every_option_but_the_hubs_token(tmp_path, monkeypatch):
    monkeypatch.setattr("train.dist.get_world_size", lambda: 2)
    config = tiny_config(output_dir=str(tmp_path), hub_token="hf_secret", learning_rate=3e-5)
    recorded = json.loads(json.dumps(describe_run(config), default=repr))
    assert recorded["config"].keys() == vars(config).keys() - {"hub_token"} and recorded["config"]["learning_rate"] == 3e-5 and recorded["world_size"] == 2
    assert not any("hf_secret" in text for text in (json.dumps(recorded), card(config)))


def test_counts_are_summed_and_extremes_kept():
    window = Window()
    for value in (3.0, -1.0, 7.0, 2.0):
        window.add_all({"tools/call_count": value, "rollout/turns_max": value, "clip_ratio/low_min": value, "epoch": value}, 5.0)
    assert window.result() == {"tools/call_count": 11.0, "rollout/turns_max": 7.0, "clip_ratio/low_min": -1.0, "epoch": 2.0}


def test_a_key_that_appears_late_is_averaged_over_its_own_measurements():
    assert window_of(("reward", 1.0), ("reward", 0.0), ("reward_dropped", 0.25)).result() == {"reward": 0.5, "reward_dropped": 0.25}


def test_a_nan_loss_is_not_hidden():
    assert math.isnan(window_of(("loss", 0.5), ("loss", math.nan)).result()["loss"])
    assert math.isnan(window_of(("loss", math.nan), ("loss", 0.5)).result()["loss"])
    assert math.isnan(window_of(("grad_norm", math.nan), ("grad_norm", 0.5)).result()["grad_norm"])
    assert window_of(("loss", 0.25), ("loss", 0.75)).result() == {"loss": 0.5}


def test_a_window_is_empty_after_its_result():
    window = window_of(("reward", 1.0), ("completions/max_length", 9.0))
    assert window.result() and window.result() == {}
    window.add("completions/max_length", 2.0)
    assert window.result() == {"completions/max_length": 2.0}


names = st.sampled_from(["reward", "x/call_count", "x/length_max", "x/length_min", "epoch"])
records = st.lists(st.tuples(names, st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.none()), st.floats(0.1, 100)))


@settings(deadline=None, max_examples=200)
@given(st.lists(records, max_size=4))
def test_merging_windows_equals_recording_everything_in_one_and_the_sums_by_hand(parts):
    direct, merged = Window(), Window()
    for part in parts:
        direct.merge(window_of(*part).drain())
        for record in part:
            merged.add(*record)
    by_hand = {"reward": lambda vs, ws: sum(v * w for v, w in zip(vs, ws)) / sum(ws), "x/call_count": lambda vs, ws: sum(vs),
               "x/length_max": lambda vs, ws: max(vs), "x/length_min": lambda vs, ws: min(vs), "epoch": lambda vs, ws: vs[-1]}
    expected = {}
    for name, reference in by_hand.items():
        valid = [(v, w) for part in parts for n, v, w in part if n == name and v is not None and not math.isnan(v)]
        if valid:
            expected[name] = pytest.approx(reference(*zip(*valid)), rel=1e-9, abs=1e-6, nan_ok=True)
    assert direct.result() == expected and merged.result() == expected


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def logger_in(folder):
    return Logger(tiny_config(output_dir=str(folder), disable_tqdm=True), None)


def lines(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_the_log_is_valid_json_and_shows_a_nan_as_null(tmp_path):
    logger = logger_in(tmp_path)
    logger.log(1, {"loss": math.nan, "reward": 0.25, "grad_norm": math.inf})
    logger.log(2, {"loss": 0.5})
    logger.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first.pop("time_s") >= 0 and first == {"step": 1, "loss": None, "reward": 0.25, "grad_norm": None}
    assert second.pop("time_s") >= 0 and second == {"step": 2, "loss": 0.5}


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = logger_in(tmp_path)
    logger.log(1, {"reward": 1.0})
    assert lines(tmp_path / "metrics.jsonl")[0]["reward"] == 1.0
    logger.close()


def test_the_logs_of_earlier_runs_are_kept_aside(tmp_path):
    for reward in (1.0, 2.0, 3.0):                # three runs within a second
        logger = logger_in(tmp_path)
        logger.log(1, {"reward": reward})
        logger.close()
    assert lines(tmp_path / "metrics.jsonl")[0]["reward"] == 3.0
    assert sorted(lines(path)[0]["reward"] for path in tmp_path.glob("metrics*.jsonl")) == [1.0, 2.0, 3.0]


def test_a_resumed_run_goes_on_after_the_step_it_resumes_from(tmp_path):
    logger = logger_in(tmp_path)
    for step in (1, 2, 3):
        logger.log(step, {"reward": float(step)})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "cut sh')             # as a kill leaves it
    logger = Logger(tiny_config(output_dir=str(tmp_path), disable_tqdm=True), None, resumed=2)
    logger.log(3, {"reward": 30.0})
    logger.close()
    assert [(line["step"], line["reward"]) for line in lines(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_the_console_shows_one_line_a_step_and_a_summary_at_the_end(tmp_path, capsys):
    logger = logger_in(tmp_path)
    for step in range(1, 11):
        logger.log(step, {"reward": step / 10, "perf/rollout_wait_s": 1.0, "perf/step_s": 4.0})
    logger.close()
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 13 and "reward 0.100" in out[0] and "generation-bound 25%" in out[0] and "kept -" in out[0] and "mfu" not in out[0]
    assert out[-3] == "reward: 0.300 over the first 5 logged steps, 0.800 over the last 5" and out[-2].startswith("saturation: healthy")
    assert out[-1].startswith("verdict: generation-bound for 100% of the time, 25% of it lost; ")


def test_an_evaluation_is_a_line_of_its_own_and_changes_no_verdict_no_summary_and_no_metric_of_the_models_card(tmp_path, capsys):
    logger = logger_in(tmp_path)
    for step in range(1, 11):
        logger.log(step, {"reward": step / 10, "perf/rollout_wait_s": 1.0, "perf/step_s": 4.0})
        logger.log(step, {"eval/step": step - 1, "eval/reward": 0.25, "eval/pass@1": 0.125})
    logger.close()
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "step    1  evaluation of step 0: reward 0.250  pass@1 0.125" and out[-3].startswith("reward: 0.300 over") and out[-1].startswith("verdict: generation-bound for 100%")
    text = card(tiny_config(output_dir=str(tmp_path)))
    assert "| reward | 1 |" in text and "| eval/reward | 0.25 |" in text and "| eval/step | 9 |" in text


def test_a_terminal_shows_a_bar_with_the_verdict_and_every_line_above_it(tmp_path, capsys):
    logger = Logger(tiny_config(output_dir=str(tmp_path), disable_tqdm=False), 2)
    logger.log(1, {"perf/rollout_wait_s": 1.0, "perf/step_s": 4.0})
    logger.log(1, {"eval/step": 0, "eval/reward": 0.25})
    logger.close()
    shown = capsys.readouterr()
    assert "step    1" in shown.out and "1/2" in shown.err and "generation-bound 25%" in shown.err.rsplit("1/2", 1)[1]


def test_tensorboard_has_every_number_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    logger = Logger(tiny_config(output_dir=str(tmp_path), disable_tqdm=True, report_to="tensorboard"), None)
    for step in (1, 2):
        logger.log(step, {"reward": step / 4, "loss": math.nan, "perf/step_s": 4.0})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("reward", "perf/step_s", "verdict/lost_frac"):
        assert [event.value for event in events.Scalars(name)] == [line[name] for line in lines(tmp_path / "metrics.jsonl")]
    assert "loss" not in events.Tags()["scalars"]


def test_a_missing_tensorboard_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        Logger(tiny_config(output_dir=str(tmp_path), disable_tqdm=True, report_to="tensorboard"), None)


def test_completions_are_kept_with_their_step_and_an_unscored_one_as_null(tmp_path, capsys):
    logger = Logger(tiny_config(output_dir=str(tmp_path), disable_tqdm=True, log_completions=True), None)
    logger.log(3, {"reward": 0.5}, [dict(prompt="1+1?", completion="2", reward=1.0, advantage=0.5), dict(prompt="1+1?", completion="3", reward=math.nan, advantage=0.0)])
    logger.close()
    assert [(line["step"], line["completion"], line["reward"]) for line in lines(tmp_path / "completions.jsonl")] == [(3, "2", 1.0), (3, "3", None)]


def test_a_completion_that_looks_like_markup_and_a_prompt_of_parts_are_printed_as_they_are(capsys):
    pytest.importorskip("rich")
    print_completions(1, [dict(prompt=[dict(type="text", text="1+1?")], completion="[INST]2[/INST]", reward=1.0, advantage=0.5)], None)
    out = capsys.readouterr().out
    assert "[INST]2[/INST]" in out and "1+1?" in out


# Every name: the specification's, and where each is to be seen

SPEC = """
num_tokens completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
completions/min_terminated_length completions/max_terminated_length completions/clipped_ratio completions/duplicate_frac
tools/call_frequency tools/failure_frequency rewards/{reward_func_name}/mean rewards/{reward_func_name}/group_std reward
reward_group_std reward_kept reward_dropped frac_reward_zero_std sampling/sampling_logp_difference/mean
sampling/sampling_logp_difference/max sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean
sampling/importance_sampling_ratio/max sampling/masked_mean sampling/sampler_mass entropy aux_loss clip_ratio/region_mean
clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max rollout/duration_s
rollout/generated_tokens_per_s rollout/concurrency rollout/concurrency_cap rollout/turns_mean rollout/turns_max
rollout/samples_per_rollout rollout/fork_frac rollout/drift_tokens_mean rollout/drift_tokens_max rollout/score_queue_size
rollout/queue_size rollout/score_s rollout/score_wait_s rollout/score_block_s rollout/backpressure_s rollout/vllm_retry_count
rollout/vllm_kv_cache_usage_frac rollout/vllm_running_requests rollout/vllm_queued_requests rollout/vllm_preemption_count
tools/latency_s tools/{tool_name}/latency_s tools/{tool_name}/call_count tools/{tool_name}/failure_count
tools/unknown_name_count tools/parallel_calls_mean tools/loop_exhausted_frac env/reset_s env/reward_s
sample/forwarded_tokens_mean sample/forwarded_tokens_max sample/trained_tokens_mean sample/time_in_queue_s
sample/staleness_mean sample/staleness_max sample/dropped_stale_count batch/forwarded_tokens_per_step
batch/trained_tokens_per_step batch/samples_per_step batch/groups_per_step batch/microbatches_per_step batch/masked_token_frac
batch/samples_per_row batch/row_tokens_mean batch/row_tokens_max batch/row_fill_frac batch/row_imbalance batch/packing_ratio
batch/pad_frac batch/dropped_oversize_count perf/step_s perf/fwd_bwd_s perf/fwd_s perf/optimizer_s perf/rollout_wait_s
perf/weight_sync_s perf/fwd_bwd_forwarded_tokens_per_s perf/wall_clock_forwarded_tokens_per_s
perf/wall_clock_trained_tokens_per_s perf/fwd_bwd_mfu perf/wall_clock_mfu perf/weight_sync_pause_s perf/weight_sync_barrier_s
perf/weight_sync_transfer_s
""".split()
RUN = """
import flops
from config import Config
flops.PEAKS["cpu"] = dict(float32=1e12)          # so that a utilization is known here
def odd(completion_ids, prompts, **columns):
    return [0.5 if int(prompt[-1]["content"]) % 2 else float(ids[0] % 2) for ids, prompt in zip(completion_ids, prompts)]
config = Config(model={model!r}, reward_funcs=odd, verify_sync_steps=0, train_dataset=lambda: [dict(prompt=[dict(role="user", content=str(i))]) for i in range(20)],
                num_generations=4, max_completion_length=4, num_sampler_logprobs=2, bf16=False, use_cpu=True, disable_tqdm=True, max_staleness=2,
                token_budget=200, max_steps=6, logging_steps=2, log_completions=True, report_to="wandb", project="test", gradient_checkpointing=False)
"""
AGENT_RUN = """
import sys
sys.path.insert(0, {tests!r})
from agent_examples import DatasetIncrementEnv, multiply, targets
from chat_templates import FORGETFUL
from config import Config
config = Config(model={model!r}, tools=[multiply], environment_factory=DatasetIncrementEnv, train_dataset=targets, chat_template_kwargs=dict(chat_template=FORGETFUL),
                num_generations=4, max_completion_length=64, num_sampler_logprobs=2, bf16=False, use_cpu=True, disable_tqdm=True, token_budget=1000, max_steps=2,
                logging_steps=2, verify_sync_steps=0, gradient_checkpointing=False)
"""
LOAD = """vllm:cache_config_info{kv_cache_size_tokens="6400"} 1.0
vllm:kv_cache_usage_perc 0.25
vllm:num_requests_running 3
vllm:num_requests_waiting 1
vllm:num_preemptions_total 0
"""


def some_end(body):
    """Three tokens that differ between five requests in a row; every other ends with the tokenizer's end of sequence."""
    n = body["sampling_params"]["seed"]
    return choice([20 + n % 5, 30 + n % 5, 2 if n % 2 else 40], [-0.5, -1.0, -1.5], body["sampling_params"]["logprobs"])


def trained(folder, config, model, answer, here=False):
    """(folder, metrics.jsonl) of train.py with a fake server and wandb offline, as a process or, with `here`, its main in this one."""
    (folder / "x.py").write_text(config.format(model=model, tests=str(ROOT / "tests")))
    with FakeVllm(answer, keep=False, model=model, length=512) as server:
        server.metrics = LOAD
        argv = [str(folder / "x.py"), f"vllm_server_base_url={server.url}", f"output_dir={folder}/run"]
        if here:
            run_here(argv)
        else:
            done = subprocess.run([sys.executable, "train.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=600, env=os.environ | dict(WANDB_MODE="offline", WANDB_SILENT="true"))
            assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run", lines(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    """Of a Mixture-of-Experts model."""
    folder = tmp_path_factory.mktemp("run")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder / "moe")
    tiny_moe(vocab=49152).save_pretrained(folder / "moe")
    return trained(folder, RUN, str(folder / "moe"), some_end)


@pytest.fixture(scope="module")
def agent_run(tmp_path_factory, tiny_folder):
    """Of an agent with a tool and an environment, whose template drops its thoughts, so that turns fork."""
    def reply(text, turn, seed):
        target = int(re.search(r"counter by (\d)", text)[1])
        calls = [hermes("increment", step=target + seed % 2), *[hermes("multiply", a=2, b=3), hermes("fly", far=True)][:seed % 3]]
        return "<think>\nwhy\n</think>\n\n" + ("\n".join(calls) if turn == 0 else "done")
    return trained(tmp_path_factory.mktemp("agent"), AGENT_RUN, tiny_folder, Script(AutoTokenizer.from_pretrained(tiny_folder), reply).answer, here=True)


def pattern(name):
    """Of the names that a name of the table stands for."""
    return re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(name)) + "$")


def test_the_table_has_the_names_of_the_specification_and_their_units():
    table = {row["name"]: row for row in glossary.rows()}
    assert [name for name, row in table.items() if not row["own"]] == sorted(SPEC, key=list(table).index) and len(SPEC) == len(set(SPEC)) == 97
    for name in SPEC:
        unit = table[name]["unit"]
        wanted = "tokens/s" if name.endswith("tokens_per_s") else "s" if name.endswith("_s") else "fraction" if name.endswith("_frac") else unit
        assert unit == wanted and table[name]["meaning"] and table[name]["healthy"]


def test_readme_shows_every_name():
    assert names_table() in (ROOT / "README.md").read_text(), "run: python metrics.py names"


def test_two_runs_log_every_name_under_its_condition_and_none_that_is_not_in_the_table(run, agent_run):
    seen, of_agents = ({name for record in records for name in record} for _, records in (run, agent_run))
    agents = [name for name in SPEC if name.split("/")[0] in ("tools", "env") or "{env}" in name]
    assert [name for name in SPEC if not any(map(pattern(name).match, seen | of_agents))] == []
    assert [name for name in agents if not any(map(pattern(name).match, of_agents)) or any(map(pattern(name).match, seen))] == []
    known = [pattern(row["name"]) for row in glossary.rows()]
    assert [name for name in (seen | of_agents) - {"step", "time_s"} if not any(known_one.match(name) for known_one in known)] == []


def test_an_agents_numbers_hang_together(agent_run):
    """Of the seeds' 2 × 3 kinds each calls its environment, a third a tool too, and a third another that does not exist; two samples a rollout, each from a fork.

    One window: the rollouts run ahead, so a step of its own may have had none that ended in it.
    """
    record, = agent_run[1]
    calls = {name: record.get(f"tools/{name}/call_count", 0) for name in ("increment", "multiply", "fly")}
    assert calls["increment"] > calls["multiply"] > 0 == calls["fly"] == record["tools/increment/failure_count"]
    assert record["tools/unknown_name_count"] > 0
    assert record["tools/parallel_calls_mean"] == pytest.approx((sum(calls.values()) + record["tools/unknown_name_count"]) / calls["increment"])
    assert (record["rollout/turns_mean"], record["rollout/fork_frac"], record["rollout/samples_per_rollout"]) == (2, 1, 2)
    assert record["tools/multiply/latency_s"] >= 0 and record["env/reset_s"] >= 0 and record["env/reward_s"] >= 0 and 0 < record["reward"] < 1


def test_a_windows_numbers_hang_together(run):
    """Two steps a window: what is summed, averaged, and kept of the end."""
    _, records = run
    assert [record["step"] for record in records] == [2, 4, 6] and records[-1]["model_version"] == 6
    forwarded = [record["batch/forwarded_tokens_per_step"] * 2 for record in records]
    assert [record["num_tokens"] for record in records] == [sum(forwarded[:i + 1]) for i in range(3)]
    scored = [record for record in records if "reward" in record]             # the rollouts run ahead, so none may have ended in a window
    assert scored and all(record["reward_dropped"] == 0.5 and 0 < record["frac_reward_zero_std"] < 1 and record["rollout/turns_max"] == 1 for record in scored)
    for record in records:
        assert record["perf/wall_clock_forwarded_tokens_per_s"] == pytest.approx(record["batch/forwarded_tokens_per_step"] / record["perf/step_s"])
        assert record["perf/fwd_bwd_mfu"] / record["perf/wall_clock_mfu"] == pytest.approx(record["perf/step_s"] / record["perf/fwd_bwd_s"])
        assert record["perf/fwd_s"] < record["perf/fwd_bwd_s"] < record["perf/step_s"] and record["aux_loss"] == pytest.approx(2, rel=0.3)


def wandb_records(path):
    """Those of a .wandb file: after 7 bytes of its own, LevelDB's log, blocks of 32 KiB of chunks (checksum 4, length 2, kind 1: full, first, middle, last)."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:                # too little for a chunk's header
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        parts += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_offline_has_the_values_of_the_log_and_the_completions(run):
    folder, records = run
    path, = folder.glob("wandb/offline-run-*/*.wandb")
    history = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
               for record in wandb_records(path) if record.WhichOneof("record_type") == "history"]
    logged = {}
    for line in history:
        logged.setdefault(line["_step"], {}).update(line)
    for record in records:
        there = logged[record["step"]]
        assert {name: there[name] for name in record if name not in ("step", "time_s") and record[name] is not None} == {
            name: value for name, value in record.items() if name not in ("step", "time_s") and value is not None}
        assert there["completions/ncols"] == 5 and there["completions/nrows"] == 4
