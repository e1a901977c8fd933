"""report.py makes one page that needs no network and a PNG a picture, from what a run logged, be it little or cut short."""
import json
import re

import numpy as np
import pytest
from PIL import Image

import report


def write_run(folder, steps=30, seed=0, completions=True, **changes):
    rng = np.random.default_rng(seed)
    folder.mkdir()
    records = [{"step": step, "reward": step / steps, "reward_kept": 0.5, "frac_reward_zero_std": 0.1, "entropy": 2 - step / steps, "grad_norm": 1 + rng.random(),
                "completions/mean_length": 9 + rng.random(), "sample/staleness_mean": 1.0, "sampling/sampling_logp_difference/mean": 0.04, "perf/step_s": 10.0,
                "perf/fwd_bwd_s": 5.0, "perf/optimizer_s": 1.0, "perf/weight_sync_s": 1.0, "perf/rollout_wait_s": 2.0, "perf/wall_clock_trained_tokens_per_s": 40.0,
                "verdict/bound": "generation", "verdict/lost_frac": 0.2, "verdict/advice": "give the servers <more> GPUs"} | changes for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(json.dumps(dict(config=dict(num_generations=8, weight_sync_steps=1, logging_steps=1))))
    if completions:
        (folder / "completions.jsonl").write_text("".join(json.dumps(dict(step=step, prompt="1 < 2?", completion=f"<script>{step}</script> & yes", reward=[1.0, None][i], advantage=1.0 - i)) + "\n"
                                                          for step in range(1, steps + 1) for i in range(2)))
    return folder


def page_of(*folders):
    report.main([str(folder) for folder in folders])
    return (folders[0] / "report" / "report.html").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("one") / "run")
    return folder, page_of(folder)


def test_the_page_asks_for_nothing_from_outside_and_runs_nothing(page):
    _, text = page
    assert all(link.startswith(("#", "data:")) for link in re.findall(r"(?:src|href)=['\"]([^'\"]*)", text))
    assert "<script" not in text and "@import" not in text and not re.search(r"url\((?!#)", text)


def test_no_two_pictures_share_an_id(page):
    ids = re.findall(r'\bid="([^"]*)"', page[1])
    assert len(ids) == len(set(ids)) > 50 and all(target in set(ids) for target in re.findall(r'(?:url\(#|href="#)([^")]*)', page[1]))


def test_each_picture_is_a_png_as_wide_as_a_readme(page):
    folder, text = page
    names = {path.stem for path in (folder / "report").glob("*.png")}
    assert names == {"reward", "time", "saturation", "lengths", "staleness", "mismatch", "throughput", "entropy", "gradient"} and text.count("<svg") == len(names)
    with Image.open(folder / "report" / "reward.png") as image:
        assert image.width == 992


def test_the_page_says_what_held_the_run_back_reads_saturation_and_shows_completions_of_steps_far_apart(page):
    _, text = page
    assert "generation-bound in 30 of 30 windows" in text and "give the servers &lt;more&gt; GPUs" in text and "healthy: most groups produce a gradient" in text
    assert re.findall(r"<th>step (\d+)</th>", text) == ["1", "11", "20", "30"]
    assert "&lt;script&gt;20&lt;/script&gt; &amp; yes" in text and "reward 1, advantage +1.00" in text and "no reward" in text
    assert ">0.183</span>" in text and ">0.85</span>" in text, "the reward's first and last third"


def test_the_parts_of_a_step_are_stacked_to_its_wall_time(tmp_path):
    figure = report.draw_budget(report.read_run(write_run(tmp_path / "run")))
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in figure.axes[0].collections]
    assert tops == [5.0, 6.0, 7.0, 9.0, 10.0]


def test_an_evaluation_is_drawn_at_the_step_it_was_asked_for_and_a_step_once():
    records = [{"step": 40, "eval/step": 32.0, "eval/reward": 0.7}, {"step": 40, "reward": 0.5}, {"step": 64, "reward": 0.6}, {"step": 64, "eval/step": 56.0, "eval/reward": 0.75},
               {"step": 64, "reward": 0.1}, {"step": 64, "eval/step": 64.0, "eval/reward": 0.8}]
    run = report.Run("run", records, [], {})
    assert [list(map(list, run.series(name))) for name in ("reward", "eval/reward")] == [[[40, 64], [0.5, 0.6]], [[32, 56, 64], [0.7, 0.75, 0.8]]]


def test_several_runs_share_each_picture_and_are_told_apart(tmp_path):
    runs = [report.read_run(write_run(tmp_path / name, seed=i)) for i, name in enumerate(("first", "second"))]
    axes = report.draw("gradient", runs).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first: grad_norm", "second: grad_norm"]
    assert len({line.get_color() for line in axes.lines}) == 2
    assert "time_1" in report.pictures(runs)


def test_a_run_that_was_killed_while_it_wrote_and_kept_no_completions_still_gives_a_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=2, completions=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    run = report.read_run(folder)
    assert [record["step"] for record in run.records] == [1, 2] and "train with log_completions=True" in report.page([run], {"reward": report.draw("reward", [run])})


def test_a_folder_that_is_no_run_and_a_run_without_a_step_are_sentences(tmp_path):
    with pytest.raises(SystemExit, match="has no metrics.jsonl"):
        report.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="nothing was logged yet in empty"):
        report.main([str(write_run(tmp_path / "empty", steps=0))])
