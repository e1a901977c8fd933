"""What the server sampled becomes what is trained: every sampled token once, under the context it was sampled in, with its own log-prob."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import TurnRecord, turns_to_samples

INF = float("inf")


def single(**changes):
    """One turn of a three-token prompt and three sampled tokens."""
    fields = dict(prompt_ids=[1, 2, 3], output_ids=[7, 8, 9], output_log_probs=[-0.1, -0.2, -0.3]) | changes
    (sample,), invalid = turns_to_samples([TurnRecord(**fields)], 2, 5, "r")
    return sample, invalid


def test_a_single_turn_trains_each_sampled_token_with_its_own_logprob():
    tops = [{7: -0.1, 4: -3.0}, {8: -0.2, 5: -2.0}, {6: -0.25, 9: -0.3}]
    sample, invalid = single(output_sampler_logprobs=tops, model_version=4)
    assert sample.input_ids.tolist() == [1, 2, 3, 7, 8, 9] and sample.trained_index.tolist() == [3, 4, 5] and invalid == 0
    assert sample.sampler_logprobs.tolist() == np.float32([-0.1, -0.2, -0.3]).tolist()
    assert sample.topk_ids.tolist() == [[7, 4], [8, 5], [6, 9]]
    assert sample.topk_logprobs.tolist() == np.float32([[-0.1, -3.0], [-0.2, -2.0], [-0.25, -0.3]]).tolist()
    assert (sample.advantage, sample.group_id, sample.version, sample.rollout_id) == (0.0, 5, 4, "r")
    assert sample.candidate_ids is None and sample.candidate_counts is None


@pytest.mark.parametrize("top, value", [
    ({4: -1.0, 7: -2.0, 5: -3.0}, -2.0), ({7: -9.0, 4: -1.0, 5: -3.0}, -9.0), ({4: -1.0, 5: -3.0}, -9.0)])
def test_a_sampled_token_of_any_rank_keeps_its_own_value_and_the_head_is_the_best_two(top, value):
    sample, _ = single(output_ids=[7], output_log_probs=[value], output_sampler_logprobs=[top])
    best = sorted(top.items(), key=lambda item: -item[1])[:2]
    assert sample.sampler_logprobs.tolist() == [value]
    assert sample.topk_ids.tolist() == [[i for i, _ in best]] and sample.topk_logprobs.tolist() == [[v for _, v in best]]


def test_two_ids_with_equal_logprobs_are_two_entries():
    sample, _ = single(output_ids=[7], output_log_probs=[-1.0], output_sampler_logprobs=[{7: -1.0, 8: -1.0}])
    assert sorted(sample.topk_ids[0].tolist()) == [7, 8] and sample.topk_logprobs.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("tops, ids, values", [
    ([{7: -0.5}], [[7, -1]], [[-0.5, -INF]]), ([{}], [[-1, -1]], [[-INF, -INF]]), (None, [[-1, -1]], [[-INF, -INF]]),
    ([{7: -0.5, 4: None}], [[7, -1]], [[-0.5, -INF]])])
def test_a_head_of_fewer_tokens_is_padded(tops, ids, values):
    sample, _ = single(output_ids=[7], output_log_probs=[-0.5], output_sampler_logprobs=tops)
    assert sample.topk_ids.tolist() == ids and sample.topk_logprobs.tolist() == values


def test_a_nan_never_enters_the_head():
    sample, _ = single(output_ids=[7], output_log_probs=[-0.5], output_sampler_logprobs=[{4: math.nan, 7: -0.5, 5: -1.0, 6: math.nan}])
    assert sample.topk_ids.tolist() == [[7, 5]] and sample.topk_logprobs.tolist() == [[-0.5, -1.0]]


@pytest.mark.parametrize("logprobs, trained", [
    ([-0.1, None, -0.3], [3, 5]), ([-0.1, math.nan, -0.3], [3, 5]), ([-INF, -0.2, -0.3], [4, 5]), ([-0.1, INF, -0.3], [3, 5]),
    ([-0.1, -0.2], [3, 4]), ([-0.1], [3])])
def test_a_token_without_a_usable_logprob_is_context_and_counted(logprobs, trained):
    sample, invalid = single(output_log_probs=logprobs, output_sampler_logprobs=[{7: -0.1}, {8: -0.2}, {9: -0.3}])
    assert sample.input_ids.tolist() == [1, 2, 3, 7, 8, 9] and sample.trained_index.tolist() == trained and invalid == 3 - len(trained)
    assert sample.sampler_logprobs.tolist() == np.float32([logprobs[i - 3] for i in trained]).tolist()
    assert sample.topk_ids[:, 0].tolist() == [i + 4 for i in trained]


@pytest.mark.parametrize("logprobs", [[], [None] * 3, [math.nan] * 3])
def test_a_rollout_without_any_usable_logprob_gives_no_sample_and_counts_every_token(logprobs):
    assert turns_to_samples([TurnRecord([1, 2, 3], [7, 8, 9], logprobs)], 2, 0) == ([], 3)


def test_a_masked_token_is_context_and_not_counted_as_invalid():
    sample, invalid = single(output_mask=[1, 0, 1], output_log_probs=[-0.1, None, -0.3])
    assert sample.trained_index.tolist() == [3, 5] and invalid == 0
    assert turns_to_samples([TurnRecord([1], [7, 8], [-0.1, -0.2], output_mask=[0, 0])], 2, 0) == ([], 0)


def test_a_turn_without_output_gives_no_sample():
    assert turns_to_samples([TurnRecord([1, 2], [])], 2, 0) == ([], 0)
    assert turns_to_samples([], 2, 0) == ([], 0)


def test_a_turn_that_extends_the_history_extends_the_sample():
    turns = [TurnRecord([1, 2], [7, 8], [-0.5, -1.0]), TurnRecord([1, 2, 7, 8, 3, 4], [9], [-1.5])]
    (sample,), _ = turns_to_samples(turns, 2, 0)
    assert sample.input_ids.tolist() == [1, 2, 7, 8, 3, 4, 9] and sample.trained_index.tolist() == [2, 3, 6]
    assert sample.sampler_logprobs.tolist() == [-0.5, -1.0, -1.5]


@pytest.mark.parametrize("prompt", [[1, 2, 8, 3], [1, 2, 7], [9, 1, 2, 7, 8], [1, 2]])
def test_a_turn_that_rewrites_the_history_starts_a_new_sample(prompt):
    turns = [TurnRecord([1, 2], [7, 8], [-0.5, -1.0], model_version=1), TurnRecord(prompt, [9], [-1.5], model_version=2)]
    (old, new), _ = turns_to_samples(turns, 2, 0, "r")
    assert old.input_ids.tolist() == [1, 2, 7, 8] and old.trained_index.tolist() == [2, 3]
    assert new.input_ids.tolist() == [*prompt, 9] and new.trained_index.tolist() == [len(prompt)]
    assert old.sampler_logprobs.tolist() == [-0.5, -1.0] and new.sampler_logprobs.tolist() == [-1.5]
    assert (old.version, new.version, old.rollout_id, new.rollout_id) == (1, 2, "r", "r")


def test_a_template_that_drops_earlier_thinking_trains_each_turn_under_the_prompt_the_server_saw():
    think, end = 50, 51
    turns = [TurnRecord([1], [think, 7, end], [-1.0, -2.0, -3.0]), TurnRecord([1, 7, end, 2], [think, 8, end], [-4.0, -5.0, -6.0]),
             TurnRecord([1, 7, end, 2, 8, end, 3], [think, 9, end], [-7.0, -8.0, -9.0])]
    samples, _ = turns_to_samples(turns, 2, 0)
    assert [s.input_ids.tolist() for s in samples] == [t.prompt_ids + t.output_ids for t in turns]
    assert [s.sampler_logprobs.tolist() for s in samples] == [t.output_log_probs for t in turns]


def test_a_samples_version_is_that_of_its_oldest_turn():
    turns = [TurnRecord([1], [7], [-0.5], model_version=6), TurnRecord([1, 7, 2], [8], [-0.5], model_version=3),
             TurnRecord([1, 7, 2, 8, 2], [9], [-0.5], model_version=8)]
    (sample,), _ = turns_to_samples(turns, 2, 0)
    assert sample.version == 3


def test_candidate_sets_follow_their_tokens():
    turns = [TurnRecord([1], [7, 8, 9], [-0.5, None, -0.5], output_sampling_mask=[[7, 4], [8], [9, 5, 6]]),
             TurnRecord([1, 7, 8, 9, 2], [3], [-0.5])]
    (sample,), _ = turns_to_samples(turns, 2, 0)
    assert sample.trained_index.tolist() == [1, 3, 5]
    assert sample.candidate_ids.tolist() == [7, 4, 9, 5, 6] and sample.candidate_counts.tolist() == [2, 3, 0]     # 0: whole vocabulary


@pytest.mark.parametrize("finish, output", [("stop token", [7, 8, 0]), ("stop string", [7, 8]), ("length", [7, 8, 9])])
def test_whatever_ended_the_turn_only_sampled_tokens_are_trained_and_none_is_added(finish, output):
    sample, _ = single(output_ids=output, output_log_probs=[-0.5] * len(output))
    assert sample.input_ids.tolist() == [1, 2, 3, *output]
    assert sample.input_ids[sample.trained_index].tolist() == output and len(sample.sampler_logprobs) == len(output)


def test_a_turn_end_marker_the_template_adds_is_context():
    turns = [TurnRecord([1], [7, 8], [-0.5, -1.0]), TurnRecord([1, 7, 8, 0, 2], [9, 0], [-1.5, -2.0])]     # the first was cut by its length
    (sample,), _ = turns_to_samples(turns, 2, 0)
    assert sample.input_ids.tolist() == [1, 7, 8, 0, 2, 9, 0] and sample.trained_index.tolist() == [1, 2, 5, 6]


token = st.integers(0, 3)
steps = st.lists(st.tuples(st.booleans(), st.lists(token, max_size=3), st.lists(st.tuples(token, st.booleans()), max_size=4)), max_size=6)


@settings(deadline=None, max_examples=300)
@given(steps)
def test_every_sampled_token_is_trained_exactly_once_under_the_context_it_was_sampled_in(steps):
    turns, truth, history = [], {}, [99]
    for number, (extends, context, output) in enumerate(steps):
        prompt = history + context if extends else [100 + number] + context
        ids, mask = [i for i, _ in output], [int(kept) for _, kept in output]
        values = [-float(len(truth) + sum(mask[:n]) + 1) for n in range(len(ids))]          # one of its own for each trained token
        truth |= {value: tuple(prompt + ids[:n + 1]) for n, value in enumerate(values) if mask[n]}
        turns.append(TurnRecord(prompt, ids, values, mask, output_sampler_logprobs=[{i: value} for i, value in zip(ids, values)]))
        history = prompt + ids
    samples, invalid = turns_to_samples(turns, 1, 0)
    trained = [(float(value), tuple(s.input_ids[:i + 1])) for s in samples for i, value in zip(s.trained_index, s.sampler_logprobs)]
    assert invalid == 0 and len(trained) == len(truth) and dict(trained) == truth
    for sample in samples:
        assert sample.topk_ids[:, 0].tolist() == sample.input_ids[sample.trained_index].tolist()
        assert sample.topk_logprobs[:, 0].tolist() == sample.sampler_logprobs.tolist()
