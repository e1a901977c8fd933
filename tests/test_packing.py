import time
from collections import Counter
from itertools import chain

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


def predecessors(row):
    """For each token that is not padding, the token before it on its path: the last but one that it sees."""
    return [int(seen(row, i)[-2]) if len(seen(row, i)) > 1 else -1 for i in range(row.num_tokens)]


def test_the_segments_of_the_worked_example():
    row = pack_row([make_sample([1, 2, 3, 4, 5], 3), make_sample([1, 2, 3, 6, 7], 3)])
    assert (row.segment_start.tolist(), row.segment_parent.tolist()) == ([0, 2, 5], [-1, 0, 0])
    assert row.segment_start.dtype == row.segment_parent.dtype == np.int64


@pytest.mark.parametrize("samples, multiple, start, parent", [
    ([], 1, [0], [-1]),                                                      # filler
    ([], 4, [0], [-1]),
    ([[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]], 1, [0], [-1]),            # prefixes and duplicates make no boundary
    ([[1, 2], [1, 2, 3]], 5, [0, 3], [-1, -1]),                              # padding is one segment
    ([[1, 2], [3, 4]], 4, [0, 2], [-1, -1]),                                 # two roots, full
    ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]], 9, [0, 1, 2, 4, 6, 8], [-1, 0, 1, 1, 0, -1]),     # 1 | 2 | 3 4 | 3 5 | 2 6 | padding
    ([[1, 2, 4], [1, 2, 5], [1, 2, 6]], 1, [0, 1, 3, 5], [-1, 0, 0, 0]),     # three branches of one fork
])
def test_segments_by_hand(samples, multiple, start, parent):
    row = pack_row([make_sample(ids, 1) for ids in samples], multiple)
    assert (row.segment_start.tolist(), row.segment_parent.tolist()) == (start, parent)


@settings(deadline=None, max_examples=300)
@given(tries, st.integers(1, 6))
def test_segments_are_the_maximal_chains_between_forks_and_continue_their_parents_last_token(lists, multiple):
    row = pack_row([make_sample(ids, 1) for ids in lists], multiple)
    true = predecessors(row)
    starts = row.segment_start.tolist()
    last = [s - 1 for s in [*starts[1:], len(row.input_ids)]]
    first_follows = {s: last[p] if p >= 0 else -1 for s, p in zip(starts, row.segment_parent)}
    assert [first_follows.get(i, i - 1) for i in range(row.num_tokens)] == true
    children = Counter(true)
    padding = [row.num_tokens] if row.num_tokens < len(row.input_ids) else []
    assert starts == [i for i, before in enumerate(true) if before < 0 or children[before] > 1] + padding
    assert all(p < i for i, p in enumerate(row.segment_parent)) and all(row.segment_parent[len(starts) - len(padding):] == -1)


@settings(deadline=None, max_examples=100)
@given(tries)
def test_every_term_keeps_the_numbers_of_its_sample_whatever_its_top_k_and_sampler_logprobs(lists):
    rng = np.random.default_rng(len(lists))
    samples = [make_sample(ids, 1, top_k=i % 3, advantage=i / 4, seed=i) for i, ids in enumerate(lists)]
    for sample in samples:
        sample.sampler_logprobs[rng.random(len(sample.sampler_logprobs)) < 0.3] = np.nan
    row, width = pack_row(samples), min(2, len(samples) - 1)
    terms = [(i, t) for i, s in enumerate(samples) for t in range(len(s.trained_index)) if np.isfinite(s.sampler_logprobs[t])]
    assert row.topk_ids.shape == row.topk_logprobs.shape == (len(terms), width)
    for m, (i, t) in enumerate(terms):
        sample, absent = samples[i], width - i % 3
        assert (row.term_sample[m], row.advantages[m], row.sampler_logprobs[m]) == (i, i / 4, sample.sampler_logprobs[t])
        assert row.topk_ids[m].tolist() == [*sample.topk_ids[t], *[-1] * absent]
        assert row.topk_logprobs[m].tolist() == [*sample.topk_logprobs[t], *[-np.inf] * absent]


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


def all_micro_batches(samples, num_rows, budget):
    """Every micro-batch that a stream of samples gives, and the samples that were too long."""
    batches, dropped, stream, left = [], [], iter(samples), None
    while True:
        rows, left = plan_micro_batch(stream if left is None else chain([left], stream), num_rows, budget, dropped.append)
        if not any(rows):
            assert left is None
            return batches, dropped
        batches.append(rows)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_planner_loses_nothing_and_keeps_every_row_within_both_budgets(num_rows, seed):
    rng = np.random.default_rng(seed)
    samples = [s for g in range(20) for s in random_group(rng, g, list(rng.integers(0, 37, rng.integers(1, 30))), 4, 25)]
    samples[7] = make_sample(rng.integers(0, 37, 90), 5, group_id=1)
    batches, dropped = all_micro_batches(samples, num_rows, 80)
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


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("budget", [25, 60, 1000])
def test_every_rank_gets_a_row_of_every_micro_batch_also_with_fewer_groups_than_ranks(groups, num_rows, budget):
    """One group on two ranks once left a rank without a row: it did no forward, and the collectives of the others waited for it."""
    samples = [s for g in range(groups) for s in random_group(np.random.default_rng(g), g, [g] * 10, 4, 12)]
    too_long = make_sample(np.arange(budget + 1) % 37, 5, group_id=0)
    batches, dropped = all_micro_batches([*samples[:2], too_long, *samples[2:]], num_rows, budget)
    assert dropped == [too_long] and bool(batches) == (groups > 0)
    assert sorted(id(s) for rows in batches for row in rows for s in row) == sorted(map(id, samples))
    for rows in batches:
        packed = [pack_row(row) for row in rows]
        assert len(packed) == num_rows and all(len(row.input_ids) >= 1 for row in packed)
        assert sum(len(row.targets) for row in packed) == sum(len(s.trained_index) for row in rows for s in row)


def test_a_sample_as_long_as_the_budget_is_kept_and_the_last_partial_micro_batch_comes_out():
    samples = [make_sample(np.full(20, g), 1, group_id=g) for g in range(5)]
    batches, dropped = all_micro_batches(samples, 2, 20)
    assert dropped == [] and [[len(row) for row in rows] for rows in batches] == [[1, 1], [1, 1], [1, 0]]


def sizes_after(first, second, extra, budget):
    """Samples in each of two rows that hold `first` and `second`, once `extra` came; None: the micro-batch closed before it."""
    rows, left = plan_micro_batch([first, second, extra], 2, budget)
    assert [row[0] for row in rows] == [first, second]
    return None if left is extra else [len(row) for row in rows]


def test_a_sample_leaves_the_full_row_of_its_group_only_if_the_most_expensive_row_stays_the_most_expensive():
    full, large = make_sample(np.arange(1, 31), 10, group_id=0), make_sample(np.arange(100, 128), 1, group_id=0)
    seven, twelve = (make_sample([40] * n, 1, group_id=1) for n in (7, 12))
    assert sizes_after(full, seven, large, 40) == [1, 2]             # 28 + 406 pairs, fewer than the 465 of the full row
    assert sizes_after(full, twelve, large, 40) is None              # 78 + 406
    assert sizes_after(full, twelve, make_sample(large.input_ids, 1, group_id=2), 40) == [1, 2], "a new group may raise it"


def test_a_group_too_large_for_one_row_takes_an_empty_one_before_it_joins_another_group():
    other = make_sample([40] * 5, 1, group_id=1)
    group = [make_sample([*range(10), *[20 + i] * 20], 10, group_id=0) for i in range(3)]
    rows, left = plan_micro_batch([group[0], other, *group[1:]], 3, 40)
    assert rows == [[group[0]], [other], [group[1]]] and left is group[2]        # beside `other` it would cost 15 + 465, the others 465


def test_an_empty_row_takes_the_rest_of_a_split_group_even_if_it_becomes_the_most_expensive():
    short, long = make_sample(np.arange(10), 1), make_sample(np.arange(40, 75), 1)
    assert plan_micro_batch([short, long], 2, 40) == ([[short], [long]], None)


def test_groups_of_one_size_spread_evenly_over_the_ranks():
    rng = np.random.default_rng(0)
    samples = [s for g in range(32) for s in random_group(rng, g, list(rng.integers(0, 37, 40)), 4, 40)]
    rows, left = plan_micro_batch(samples, 4, 10_000)
    costs = [pack_row(row).attention_cost for row in rows]
    assert left is None and max(costs) < 1.15 * np.mean(costs)


def short_samples(n):
    rng = np.random.default_rng(0)
    return [make_sample([1, 2, 3, *rng.integers(0, 37, 7)], 3, group_id=i // 8) for i in range(n)]


def conversation(raw_tokens, turns=40):
    """Samples that are each a prefix of the next."""
    ids = np.random.default_rng(0).integers(0, 37, 2 * raw_tokens // (turns + 1))
    ends = np.linspace(0, len(ids), turns + 1).astype(int)
    return [make_sample(ids[:stop], start + 1) for start, stop in zip(ends, ends[1:])]


@pytest.mark.parametrize("make, size", [(short_samples, 500), (conversation, 200_000)])
def test_time_grows_like_the_tokens_not_like_their_square(make, size):
    def seconds(samples):
        started = time.process_time()
        for row in plan_micro_batch(samples, 1, 10**9)[0]:
            pack_row(row)
        return time.process_time() - started
    small, large = make(size), make(16 * size)               # linear: 16, and up to 3 times that where the large one's memory is new; its square: 256
    assert min(seconds(large) for _ in range(5)) < 64 * min(seconds(small) for _ in range(5))
