"""Rewards to advantages: what no function could score stays out of the mean, and a function's fault names the function."""
import asyncio
import math
import time
from functools import partial

import numpy as np
import pytest
from conftest import make_sample

from config import ConfigError
from rewards import accuracy_reward, call_rewards, reward_name
from rollout import AsyncRolloutLoop, RolloutGroup, has_signal, scorable

PROMPT = [dict(role="user", content="What is seven?")]


def call(*funcs, count=2, **columns):
    completions = [[dict(role="assistant", content="x" * i)] for i in range(count)]
    rewards = call_rewards(list(funcs), [PROMPT] * count, completions, [[7] * (i + 1) for i in range(count)], columns)
    return asyncio.run(asyncio.wait_for(rewards, 2))


def sync_length(completions, **columns):
    return [len(c[-1]["content"]) for c in completions]


async def async_length(completions, **columns):
    await asyncio.sleep(0)
    return sync_length(completions)


class AsyncJudge:
    async def __call__(self, completions, **columns):
        return await async_length(completions)


async def scaled(completions, factor, **columns):
    return [factor * value for value in await async_length(completions)]


@pytest.mark.parametrize("func", [sync_length, async_length, AsyncJudge(), partial(scaled, factor=1), partial(sync_length, unused=1),
                                  lambda completions, **columns: np.array([0, 1]), lambda completions, **columns: (False, True)])
def test_sync_and_async_functions_objects_and_partials_are_all_called_and_awaited(func):
    assert call(func).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("func, name", [
    (sync_length, "sync_length"), (AsyncJudge(), "AsyncJudge"), (partial(partial(scaled, factor=2), x=1), "scaled")])
def test_a_reward_is_named_after_its_function(func, name):
    assert reward_name(func) == name


def test_each_rollout_gets_its_own_entry_of_every_argument():
    def reward(prompts, completions, completion_ids, answer, **columns):
        assert prompts == [PROMPT, PROMPT] and columns == {}
        return [a + len(ids) for a, ids in zip(answer, completion_ids)]
    assert call(reward, answer=[10, 20]).tolist() == [[11.0, 22.0]]


def test_none_and_nan_mean_that_the_function_does_not_apply():
    rewards = call(lambda **columns: [None, 0.5], lambda **columns: [math.nan, None])
    assert np.array_equal(rewards, [[math.nan, 0.5], [math.nan, math.nan]], equal_nan=True)


@pytest.mark.parametrize("value, words", [
    ([1.0], "returned 1 rewards for 2 completions"), ([1.0] * 3, "returned 3 rewards for 2 completions"),
    (1.0, "returned float for 2 completions"), (None, "returned NoneType for 2 completions"), (["good", "bad"], "returned ['good', 'bad']"),
    ([[1.0], [2.0]], "returned [[1.0], [2.0]]")])
def test_a_wrong_return_value_names_the_function(value, words):
    def careless(**columns):
        return value
    with pytest.raises(ConfigError) as caught:
        call(careless)
    assert f"reward function careless {words}" in str(caught.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_names_the_function_since_its_advantage_would_be_nan(value):
    def unbounded(**columns):
        return [0.0, value]
    with pytest.raises(ConfigError, match="unbounded"):
        call(unbounded)


def raises_sync(**columns):
    raise KeyError("solution")


async def raises_async(**columns):
    raise ZeroDivisionError("division by zero")


def stops(**columns):
    return [next(iter([])), 1.0]


@pytest.mark.parametrize("func, error", [(raises_sync, "KeyError"), (raises_async, "ZeroDivisionError"), (stops, "StopIteration")])
def test_a_function_that_raises_is_named_with_the_prompt_and_ends_in_seconds(func, error):
    with pytest.raises(ConfigError) as caught:
        call(sync_length, func)
    assert all(words in str(caught.value) for words in (func.__name__, error, "What is seven?"))


def test_functions_run_concurrently_in_threads():
    def slow(**columns):
        time.sleep(0.3)
        return [1.0, 0.0]
    started = time.monotonic()
    call(slow, slow)
    assert time.monotonic() - started < 0.5


def grade(solution, text):
    return accuracy_reward([[dict(role="assistant", content=text)]], [solution])[0]


@pytest.mark.parametrize("solution, text, reward", [
    (r"$\boxed{m \geq \sqrt{2}}$", r"$m \in [\sqrt{2}, \infty)$", 1.0),     # false with gold and answer swapped
    (r"\frac{1}{3}", r"so \boxed{\frac{1}{3}}", 1.0), (r"\frac{1}{3}", r"so \boxed{\frac{1}{2}}", 0.0),
    ("1331 and 1728", "1728", 0.0), ("1331 and 1728", r"\boxed{1728}", 0.0), ("1331 and 1728", "$1331$ and $1728$", 1.0),
    (r"\left(3,\frac{\pi}{2}\right)", r"$\left(3,\frac{\pi}{2}\right)$", 1.0), (r"\left(3,\frac{\pi}{2}\right)", "$3$", 0.0),
    (7, "The answer is 7.", 1.0), (7, "The answer is 8.", 0.0), (0, r"\boxed{0}", 1.0), (0, r"\boxed{1}", 0.0), (0.0, "$0$", 1.0),
    ("12", "First 12, no, 13", 0.0), ("12", "no number", 0.0), ("12", "", 0.0), ("-3", "$-3$", 1.0), ("3", "$-3$", 0.0),
    ("1/2", "0.5", 1.0), ("10,000", "10000", 1.0), ("x=5", "5", 1.0), (r"\{1,2\}", r"$\{2,1\}$", 1.0), ("(1,2)", "$(2,1)$", 0.0),
    (r"28\%", "0.28", 1.0), (r"28\%", "28", 1.0), ("5 cm", "5", 1.0), (r"\text{east}", r"\boxed{\text{west}}", 0.0),
    ("Yes", r"\boxed{No}", 0.0)])
def test_accuracy_is_mathematical_equality_with_the_whole_solution(solution, text, reward):
    assert grade(solution, text) == reward


@pytest.mark.parametrize("solution", [None, "", "  ", "$$"])
@pytest.mark.parametrize("text", ["", "4", r"\boxed{4}", "None"])
def test_a_solution_that_says_nothing_scores_no_completion(solution, text):
    assert grade(solution, text) is None


@pytest.mark.parametrize("solution", ["east", "no latex here"])
def test_a_solution_in_words_never_rewards_a_wrong_completion(solution):
    assert grade(solution, r"\boxed{4}") in (None, 0.0) and grade(solution, r"\boxed{west}") in (None, 0.0)


def test_accuracy_is_the_same_in_the_main_thread_and_in_a_worker_thread():
    texts = ["$7$", r"\boxed{7}", "8", "14/2", "none"]
    completions = [[dict(role="assistant", content=text)] for text in texts]
    in_worker = asyncio.run(call_rewards([accuracy_reward], [PROMPT] * 5, completions, [[1]] * 5, dict(solution=["7"] * 5)))
    assert in_worker[0].tolist() == accuracy_reward(completions, ["7"] * 5) == [1.0, 1.0, 0.0, 1.0, 0.0]


def group_of(rewards, trained=None):
    """A group with these summed rewards (None: no source scored) whose rollouts have a trained token where `trained` says so."""
    count = len(rewards)
    sequences = [[make_sample([1, 2, 3], 2)] if has_token else [] for has_token in (trained or [True] * count)]
    return RolloutGroup([PROMPT] * count, {}, [[]] * count, [[]] * count, sequences, 0, 0, 0, [None] * count,
                        rewards=np.array([math.nan if r is None else r for r in rewards]))


def advantages(rewards, trained=None):
    return AsyncRolloutLoop.compute_advantages(None, group_of(rewards, trained)).tolist()


@pytest.mark.parametrize("rewards, expected", [
    ([1.0, 0.0, None], [1, -1, 0]), ([-1.0, -2.0, None], [1, -1, 0]), ([0.0, 1.0, 1.0, 1.0], [-3 ** 0.5, 3 ** -0.5, 3 ** -0.5, 3 ** -0.5]),
    ([None, None, None], [0, 0, 0]), ([None, 5.0, None], [0, 0, 0]), ([0.5, 0.5], [0, 0]), ([3.0, 1.0, 2.0], [1.5 ** 0.5, -1.5 ** 0.5, 0])])
def test_an_advantage_is_the_reward_standardised_over_the_scored_rollouts_with_the_population_std(rewards, expected):
    assert advantages(rewards) == pytest.approx(expected, abs=1e-6)


def test_a_rollout_without_a_trained_token_is_left_out_of_mean_and_std():
    assert advantages([1.0, 0.0, 100.0], [True, True, False]) == pytest.approx([1, -1, 0], abs=1e-6)


@pytest.mark.parametrize("rewards, trained, kept", [
    ([1.0, 0.0, None], None, True), ([None, None, None], None, False), ([1.0, None, None], None, False), ([1.0, 1.0, None], None, False),
    ([1.0, 1.0, 0.0], [True, True, False], False), ([1.0, 0.0], [True, False], False), ([0.0, 1e-9], None, True)])
def test_a_group_is_kept_when_two_scorable_rollouts_differ(rewards, trained, kept):
    assert bool(has_signal(group_of(rewards, trained))) is kept


def test_equal_rewards_whose_rounded_std_is_above_zero_carry_no_signal():
    rewards = np.full(7, 0.1, np.float32)
    assert rewards.std() > 0
    group = group_of([0.0] * 7)
    group.rewards = rewards
    assert not has_signal(group)


def test_scorable_means_a_reward_and_a_trained_token():
    assert scorable(group_of([1.0, None, 1.0, None], [True, True, False, False])).tolist() == [True, False, False, False]
