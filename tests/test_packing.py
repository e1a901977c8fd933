import numpy as np
import pytest
from conftest import make_sample, random_group
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import OpenRow, pack_row, plan_micro_batch, shared_length


def seen(row, i):
    """Row indices that query i sees."""
    j = np.arange(len(row.input_ids))
    return j[(j <= i) & (i < row.end)]


def naive_trie_size(samples):
    """Distinct (prefix up to and with the next token) over all samples; a last token counts as shared with any longer sample."""
    full = {tuple(s.input_ids[:p + 2]) for s in samples for p in range(len(s.input_ids) - 1)}
    ends = {tuple(s.input_ids) for s in samples}
    return len(full) + sum(not any(f[:-1] == e for f in full) for e in ends)


tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def test_two_rollouts_of_one_prompt_give_the_row_of_the_specification():
    row = pack_row([make_sample([1, 2, 3, 4, 5], 3), make_sample([1, 2, 3, 6, 7], 3)])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 3, 6, 7]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert row.end.tolist() == [8, 8, 5, 5, 5, 8, 8, 8]
    assert row.term_index.tolist() == [2, 3, 5, 6] and row.targets.tolist() == [4, 5, 6, 7]
    assert (row.raw_tokens, row.attention_cost) == (10, 1 + 2 + 3 + 4 + 5 + 3 + 4 + 5)


@settings(deadline=None, max_examples=300)
@given(tries)
def test_every_loss_term_sees_exactly_its_own_sample_and_the_trie_is_minimal(lists):
    samples = [make_sample(ids, 1, group_id=i) for i, ids in enumerate(lists)]
    row = pack_row(samples)
    assert len(row.input_ids) == naive_trie_size(samples)
    term = 0
    for number, sample in enumerate(samples):
        for p in sample.trained_index:
            visible = seen(row, row.term_index[term])
            assert row.input_ids[visible].tolist() == sample.input_ids[:p].tolist()
            assert row.position_ids[visible].tolist() == list(range(p))
            assert (row.targets[term], row.term_sample[term]) == (sample.input_ids[p], number)
            term += 1
    assert term == len(row.targets)


@settings(deadline=None, max_examples=300)
@given(tries)
def test_an_open_row_counts_what_packing_it_gives_whatever_the_order(lists):
    samples = [make_sample(ids, 1) for ids in lists]
    row = OpenRow(10_000)
    for sample in samples:
        row.add(sample, sample.key())
    packed = pack_row(samples)
    assert (row.tokens, row.terms, row.attention_cost) == (len(packed.input_ids), len(packed.targets), packed.attention_cost)


def test_keys_sort_like_token_sequences_also_beyond_a_byte():
    ids = [[1, 255], [1, 256], [1], [70000, 1], [2]]
    assert sorted(ids) == sorted(ids, key=lambda x: make_sample(x, 1).key())


def test_a_prefix_shares_its_last_token_and_a_branch_forks_one_token_early():
    assert shared_length(np.array([1, 2, 3]), np.array([1, 2, 3, 4])) == 3
    assert shared_length(np.array([1, 2, 3, 5]), np.array([1, 2, 3, 4])) == 2
    assert shared_length(np.array([1]), np.array([2])) == 0


def test_a_filler_row_has_one_token_and_no_term():
    row = pack_row([])
    assert (len(row.input_ids), row.num_tokens, len(row.targets), row.num_samples, row.raw_tokens, row.attention_cost) == (1, 0, 0, 0, 0, 0)
    assert row.end.tolist() == [1] and row.topk_ids.shape == (0, 0)


def test_padding_sees_only_itself_and_is_counted_nowhere():
    plain, padded = (pack_row([make_sample([1, 2, 3, 4, 5], 3), make_sample([1, 2, 3, 6], 3)], multiple) for multiple in (1, 5))
    assert len(padded.input_ids) == 10 and padded.end.tolist() == [*plain.end.tolist(), 8, 9, 10]
    assert [seen(padded, i).tolist() for i in (7, 8, 9)] == [[7], [8], [9]]
    assert (padded.num_tokens, padded.attention_cost, padded.term_index.tolist()) == (7, plain.attention_cost, plain.term_index.tolist())


def test_a_term_without_a_finite_sampler_logprob_is_left_out():
    sample = make_sample([1, 2, 3, 4, 5], 1)
    sample.sampler_logprobs[:3] = [np.nan, -np.inf, np.inf]
    assert pack_row([sample]).targets.tolist() == [5]


def test_the_first_token_of_a_sample_is_never_a_target():
    """Lengths 5, 1 and 7; the second and the third are trained from their first token on, as if they had no prompt."""
    from dataclasses import replace
    samples = [make_sample([1, 2, 3, 4, 5], 1), make_sample([6], 1), make_sample([7, 8, 9, 10, 11, 12, 13], 1)]
    for i in (1, 2):
        n = len(samples[i].input_ids)
        samples[i] = replace(samples[i], trained_index=np.arange(n, dtype=np.int32), sampler_logprobs=np.full(n, -1.0, np.float32),
                             topk_ids=np.zeros((n, 3), np.int32), topk_logprobs=np.zeros((n, 3), np.float32))
    row = pack_row(samples)
    assert row.targets.tolist() == [2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    assert row.position_ids[row.term_index].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


def test_candidate_sets_follow_their_terms_and_samples_without_one_keep_the_vocabulary():
    from dataclasses import replace
    with_sets = replace(make_sample([1, 2, 3], 1), candidate_ids=np.array([2, 5, 3], np.int32), candidate_counts=np.array([2, 1], np.int32))
    with_sets.sampler_logprobs[0] = np.nan
    row = pack_row([make_sample([4, 5], 1), with_sets])
    assert row.candidate_ids.tolist() == [3] and row.candidate_counts.tolist() == [0, 1]


def _chain(first, rest):
    yield first
    yield from rest


@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_planner_loses_nothing_and_keeps_every_row_within_both_budgets(num_rows, seed):
    rng = np.random.default_rng(seed)
    samples = [s for g in range(20) for s in random_group(rng, g, list(rng.integers(0, 37, rng.integers(1, 30))), 4, 25)]
    samples[7] = make_sample(rng.integers(0, 37, 90), 5, group_id=1)
    batches, dropped = [], []
    stream, left = iter(samples), None
    while True:
        rows, left = plan_micro_batch(stream if left is None else _chain(left, stream), num_rows, 80, dropped.append)
        if not any(rows):
            break
        batches.append(rows)
    placed = [id(s) for rows in batches for row in rows for s in row]
    assert sorted(placed) == sorted(id(s) for s in samples if len(s.input_ids) <= 80) and len(dropped) == 1
    for index, rows in enumerate(batches):
        assert index == len(batches) - 1 or all(rows), "only the last micro-batch may leave a rank without a sample"
        for row in map(pack_row, rows):
            assert len(row.input_ids) <= 80 and len(row.targets) <= 80


def test_a_group_stays_in_one_row_while_it_fits():
    rng = np.random.default_rng(0)
    samples = [s for g in range(2) for s in random_group(rng, g, [g + 1] * 20, 4, 8)]
    rows, left = plan_micro_batch(samples, 2, 200)
    assert left is None and [{s.group_id for s in row} for row in rows] == [{0}, {1}]


def test_rows_that_share_everything_still_close_by_their_loss_terms():
    same = [make_sample([1, 2, 3, 4, 5, 6], 1) for _ in range(10)]
    rows, left = plan_micro_batch(same, 1, 12)
    assert len(rows[0]) == 2 and left is same[2]
