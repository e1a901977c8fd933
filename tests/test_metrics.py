"""A metric's name says how a window aggregates it, and no NaN wipes a window or hides in one."""
import json
import math

import pytest
from conftest import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Logger, Window, rule


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


def test_the_console_shows_one_line_a_step_and_a_verdict_at_the_end(tmp_path, capsys):
    logger = logger_in(tmp_path)
    for step in range(1, 11):
        logger.log(step, {"reward": step / 10, "perf/rollout_wait_s": 1.0, "perf/step_s": 4.0})
    logger.close()
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 11 and "reward 0.100" in out[0] and "wait  25%" in out[0] and "kept -" in out[0]
    assert out[-1] == "reward: 0.300 over the first 5 logged steps, 0.800 over the last 5"
