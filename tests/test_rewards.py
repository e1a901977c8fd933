"""Rewards to advantages: what no function could score stays out of the mean, and a function's fault names the function."""
import asyncio
import math
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from conftest import make_sample, until

import rewards as rewards_module
from config import ConfigError
from rewards import (accuracy_reward, boxed, call_rewards, format_reward, last_number, number_match, plain, reply_text, reward_name, reward_names,
                     soft_overlong_punishment)
from rollout import AsyncRolloutLoop, RolloutGroup, has_signal, scorable

pytestmark = pytest.mark.filterwarnings("ignore:accuracy_reward leaves a completion unscored")
PROMPT = [dict(role="user", content="What is seven?")]


@pytest.fixture(autouse=True, scope="module")
def patient():
    """A machine that is busy charges its CPU time too: the limit is for the tests that are about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards_module, "GRADE_SECONDS", 60)
        yield


def call(*funcs, count=2, **columns):
    completions = [[dict(role="assistant", content="x" * i)] for i in range(count)]
    rewards = call_rewards(list(funcs), [PROMPT] * count, completions, [[7] * (i + 1) for i in range(count)], columns)
    return asyncio.run(asyncio.wait_for(rewards, 60))


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
                                  lambda completions, **columns: np.array([0, 1]), lambda completions, **columns: (False, True),
                                  lambda **columns: torch.tensor([0.0, 1.0], requires_grad=True), lambda **columns: [torch.tensor(0), np.float32(1)],
                                  lambda **columns: [Fraction(0), Decimal(1)]])
def test_sync_and_async_functions_objects_and_partials_are_all_called_and_awaited(func):
    assert call(func).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("func, name", [
    (sync_length, "sync_length"), (AsyncJudge(), "AsyncJudge"), (partial(partial(scaled, factor=2), x=1), "scaled")])
def test_a_reward_is_named_after_its_function(func, name):
    assert reward_name(func) == name


def test_functions_of_one_name_are_told_apart():
    funcs = [sync_length, AsyncJudge(), partial(sync_length, x=1), sync_length]
    assert reward_names(funcs) == ["sync_length", "AsyncJudge", "sync_length_2", "sync_length_3"]
    with pytest.raises(ConfigError, match="reward function <lambda>_2 returned"):
        call(lambda **columns: [1, 2], lambda **columns: 3)


def test_each_rollout_gets_its_own_entry_of_every_argument():
    def reward(prompts, completions, completion_ids, answer, **columns):
        assert prompts == [PROMPT, PROMPT] and columns == {}
        return [a + len(ids) for a, ids in zip(answer, completion_ids)]
    assert call(reward, answer=[10, 20]).tolist() == [[11.0, 22.0]]


def test_what_a_function_changes_in_a_message_no_other_function_scores_and_nothing_records():
    """One that kept what follows the thought, in place, made the other see no thought: 0 where it gave 1 alone."""
    def right(prompts, completions, completion_ids, answer, **columns):
        for prompt, completion, ids, gold in zip(prompts, completions, completion_ids, answer):
            prompt[0]["content"], completion[-1]["content"] = "", completion[-1]["content"].split("</think>")[-1].strip()
            ids.clear(), gold.append(1)
            assert gold == [3, 1]
        return [float(completion[-1]["content"] == "3") for completion in completions]
    prompts, completions, ids, columns = ([make() for _ in range(2)] for make in (
        lambda: [dict(role="user", content="1 + 2?")], lambda: [dict(role="assistant", content="<think>why</think> 3")], lambda: [7], lambda: [3]))
    columns = columns[:1] * 2                  # a group's rollouts share their row's
    for funcs in ([right, format_reward], [format_reward, right]):
        assert asyncio.run(call_rewards(funcs, prompts, completions, ids, dict(answer=columns))).tolist() == [[1.0, 1.0]] * 2
    assert completions[0][0]["content"] == "<think>why</think> 3" and prompts[1][0]["content"] == "1 + 2?" and ids == [[7]] * 2 and columns == [[3]] * 2


def test_a_column_that_cannot_be_copied_is_a_sentence_that_names_the_function():
    with pytest.raises(ConfigError, match="reward function format_reward raised TypeError: cannot pickle"):
        asyncio.run(call_rewards([format_reward], [[]], [[]], [[7]], dict(handle=[threading.Lock()])))


def test_none_and_nan_mean_that_the_function_does_not_apply():
    rewards = call(lambda **columns: [None, 0.5], lambda **columns: [math.nan, None], lambda **columns: torch.tensor([math.nan, 0.5]))
    assert np.array_equal(rewards, [[math.nan, 0.5], [math.nan, math.nan], [math.nan, 0.5]], equal_nan=True)


@pytest.mark.parametrize("value, words", [
    ([1.0], "returned 1 rewards for 2 completions"), ([1.0] * 3, "returned 3 rewards for 2 completions"),
    (1.0, "returned float for 2 completions"), (None, "returned NoneType for 2 completions"), (["good", "bad"], "returned ['good', 'bad']"),
    ([[1.0], [2.0]], "returned [[1.0], [2.0]]"), (["1", "0"], "returned ['1', '0']"), ("10", "returned str"), (b"10", "returned bytes"),
    ({0: 1.0, 1: 0.0}, "returned dict"), ({0.0, 1.0}, "returned set"), (iter([0.0, 1.0]), "returned list_iterator"),
    ([10 ** 400, 0], "returned [1000"),
    (np.array(1.0), "returned float"), (torch.tensor(1.0), "returned float"), (np.zeros((2, 1)), "returned [[0.0], [0.0]]"),
    ([1j, 0], "returned [1j, 0]")])
def test_a_wrong_return_value_names_the_function(value, words):
    def careless(**columns):
        return value
    with pytest.raises(ConfigError) as caught:
        call(careless)
    assert f"reward function careless {words}" in str(caught.value) and "What is seven?" in str(caught.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_names_the_function_since_its_advantage_would_be_nan(value):
    def unbounded(**columns):
        return [0.0, value]
    with pytest.raises(ConfigError, match="reward function unbounded returned .*inf.*What is seven?"):
        call(unbounded)


def raises_sync(**columns):
    raise KeyError("solution")


async def raises_async(**columns):
    raise ZeroDivisionError("division by zero")


def stops(**columns):
    return [next(iter([])), 1.0]


def exits(**columns):
    sys.exit(0)             # as code under test may: it would end the rollout process as if it were done


async def leaks_a_cancellation(**columns):
    raise asyncio.CancelledError        # as a shared task that was cancelled gives: it would end the scoring task without a word


@pytest.mark.parametrize("func, error", [(raises_sync, "KeyError"), (raises_async, "ZeroDivisionError"), (stops, "StopIteration"),
                                         (exits, "SystemExit"), (leaks_a_cancellation, "CancelledError")])
def test_a_function_that_raises_is_named_with_the_prompt_and_ends_in_seconds(func, error):
    with pytest.raises(ConfigError) as caught:
        call(sync_length, func)
    assert all(words in str(caught.value) for words in (func.__name__, error, "What is seven?"))


@pytest.mark.parametrize("func", [raises_sync, raises_async])
def test_the_error_carries_the_traceback_of_the_function(func):
    with pytest.raises(ConfigError) as caught:
        call(func)
    assert f"in {func.__name__}" in "".join(traceback.format_exception(caught.value))


def test_of_a_long_prompt_the_error_shows_200_characters():
    with pytest.raises(ConfigError) as caught:
        asyncio.run(call_rewards([raises_sync], ["a" * 1000], ["b"], [[1]], {}))
    assert "a" * 200 in str(caught.value) and "a" * 201 not in str(caught.value)


def takes_no_columns(prompts, completions, completion_ids):
    return [1.0, 0.0]


async def wants_a_solution(solution, **columns):
    return [1.0, 0.0]


@pytest.mark.parametrize("func, problem", [(takes_no_columns, "'answer'"), (wants_a_solution, "'solution'")])
def test_a_function_that_does_not_fit_the_columns_is_told_what_it_is_called_with(func, problem):
    with pytest.raises(ConfigError) as caught:
        call(func, answer=[1, 2])
    advice = "let it take answer, prompts, completions, completion_ids, or **columns"
    assert all(words in str(caught.value) for words in (func.__name__, problem, advice))


def test_a_type_error_inside_a_function_is_no_misfit():
    with pytest.raises(ConfigError, match="TypeError: float.. argument must be.*: mend it"):
        call(lambda **columns: [float(None), 1.0])


@pytest.mark.parametrize("sync, others", [(2, 0), (40, 40)])        # 40: more than the event loop's own pool has threads
def test_functions_run_concurrently_in_threads(sync, others):
    """None returns before the last has begun."""
    begun, all_begun = [], threading.Event()

    def begin():
        begun.append(1)
        if len(begun) == sync + others:
            all_begun.set()

    def meets(**columns):
        begin()
        return [float(all_begun.wait(30)), 0.0]

    async def meets_async(**columns):
        begin()
        while not all_begun.is_set():
            await asyncio.sleep(0.01)
        return [1.0, 0.0]
    assert call(*[meets] * sync, *[meets_async] * others).tolist() == [[1.0, 0.0]] * (sync + others)


@pytest.mark.parametrize("wrap", [lambda func: lambda **columns: func(30, **columns), lambda func: partial(func, 30)])
def test_a_sync_function_that_sleeps_does_not_delay_another_coroutine(wrap):
    begun, ticked = threading.Event(), threading.Event()

    def waits_for_the_other(seconds, **columns):
        begun.set()
        return [float(ticked.wait(seconds))]

    async def ticks_meanwhile():
        scoring = asyncio.create_task(call_rewards([wrap(waits_for_the_other)], [PROMPT], ["x"], [[1]], {}))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        ticked.set()
        return await scoring
    assert asyncio.run(ticks_meanwhile()).tolist() == [[1.0]]


def test_a_function_that_hangs_does_not_keep_the_error_of_another_in():
    threads, released = [], threading.Event()

    def hangs(**columns):
        threads.append(threading.current_thread())
        released.wait(60)
    with pytest.raises(ConfigError, match="raises_sync"):
        call(hangs, raises_sync)
    until(lambda: threads)
    assert threads[0].is_alive()                    # asyncio.run waits for the threads of the loop's own pool
    assert threads[0].daemon                        # so that the process can end too
    released.set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_scoring_that_is_cancelled_ends_as_cancelled():
    threads, released = [], threading.Event()

    async def cancelled():
        scoring = asyncio.create_task(call_rewards([waits_in_a_thread, sleeps], [PROMPT], ["x"], [[1]], {}))
        while len(threads) < 2:
            await asyncio.sleep(0.01)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        return scoring.cancelled()

    def waits_in_a_thread(**columns):
        threads.append(threading.current_thread())
        released.wait(60)
        return [1.0]

    async def sleeps(**columns):
        threads.append(None)
        await asyncio.sleep(60)
    assert asyncio.run(cancelled()) and any(thread and thread.is_alive() for thread in threads)
    released.set()
    for thread in filter(None, threads):
        thread.join()                               # it ends quietly


def test_a_function_that_changes_its_lists_changes_no_other_functions():
    def empties(completions, answer, **columns):
        completions.clear(), answer.clear()
        return [0.0, 0.0]
    columns = dict(answer=[1, 2])
    assert call(empties, sync_length, **columns).tolist() == [[0.0, 0.0], [0.0, 1.0]] and columns == dict(answer=[1, 2])


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
    ("Yes", r"\boxed{No}", 0.0), ("Yes", r"\boxed{yes}", 1.0), ("No", r"\boxed{\text{No}}", 1.0), ("No", r"\boxed{on}", 0.0),
    (False, r"\boxed{false}", 1.0), ("True", r"\boxed{true}", 1.0), (r"\text{east}", r"\boxed{east}", 1.0),
    (r"\text{east}", r"\boxed{seat}", 0.0), (r"\[5\]", "5", 1.0), (r"\(5\)", "5", 1.0), ("so $x = 2$ and \\boxed{5}.", "5", 1.0),
    ("A", r"\boxed{A}", 1.0), ("A", r"\boxed{B}", 0.0),
    ("4", r"\boxed{3}. Wait: \boxed{4}", 1.0), ("3", r"\boxed{3}. Wait: \boxed{4}", 0.0), ("1331 and 1728", r"\boxed{1331}, \boxed{1728}", 1.0),
    (r"\frac{1}{2^{99}}", r"$\frac{1}{2^{98}}$", 0.0), (r"\frac{1}{2^{99}}", r"$2^{-99}$", 1.0), ("0.0000001", "$0.0000002$", 0.0),
    ("0.0000001", "$10^{-7}$", 1.0), (r"\frac{1}{3}", "0.333333", 1.0), (r"0.05\%", "0.0005", 1.0),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\frac{\sqrt{3}}{2}}", 1.0)])
def test_accuracy_is_mathematical_equality_with_the_whole_solution(solution, text, reward):
    assert grade(solution, text) == reward


@pytest.mark.parametrize("solution", [None, "", "  ", "$$", r"\$", math.nan])
@pytest.mark.parametrize("text", ["", "4", r"\boxed{4}", "None"])
def test_a_solution_that_says_nothing_scores_no_completion(solution, text):
    assert grade(solution, text) is None


@pytest.mark.parametrize("solution", ["east", "no latex here"])
def test_a_solution_in_words_never_rewards_a_wrong_completion(solution):
    assert grade(solution, r"\boxed{4}") in (None, 0.0) and grade(solution, r"\boxed{west}") in (None, 0.0)


@pytest.mark.parametrize("solution", ["east", "no latex here", "Does not exist."])
@pytest.mark.parametrize("text", ["", r"\boxed{4}", r"\boxed{east}", r"\boxed{seat}"])
def test_a_solution_in_words_scores_no_completion_since_only_the_letters_would_count(solution, text):
    with pytest.warns(UserWarning, match="unscored whose solution is .*: it is no mathematics"):
        assert grade(solution, text) is None


@pytest.mark.parametrize("completion, text", [
    ("4", "4"), ([], ""), (None, ""), ([dict(role="assistant", content=None)], ""), ([dict(content="4")], "4"),
    ([dict(role="assistant", content="4"), dict(role="tool", content="5")], "4"), ([dict(role="tool", content="5")], ""),
    ([dict(role="assistant", content="3"), dict(role="user", content="no"), dict(role="assistant", content="4")], "4"),
    ([dict(role="assistant", content=[dict(type="text", text="4"), dict(type="image"), dict(type="text", text="2")])], "42")])
def test_the_text_of_a_completion_is_its_last_assistant_message(completion, text):
    assert reply_text(completion) == text
    assert accuracy_reward([completion], ["4"]) == number_match([completion], [4]) == [float(text == "4")]


FAKE_MATH_VERIFY = """
import os, pathlib
LatexExtractionConfig = list

def parse(text, **options):
    if text == "fail":
        raise ZeroDivisionError("an internal error")
    return [] if text == "$no mathematics 1$" else [text]

def verify(gold, answer, *digits, **limits):
    print("what a library prints is no reward")
    if answer == ["9 ** 9 ** 9"]:
        written = pathlib.Path(__file__).with_name("written")
        written.write_text(str(os.getpid()))
        written.rename(written.with_name("endless"))
    return gold == ["$7$"] and answer == ["9 ** 9 ** 9"] and 9 ** 9 ** 9 > 1 or gold == ["$7$"] and answer == ["seven"]
"""


@pytest.fixture
def fake_math_verify(monkeypatch, tmp_path):
    """The grading process with this in place of the library."""
    (tmp_path / "math_verify.py").write_text(FAKE_MATH_VERIFY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(rewards_module, "_idle", [])
    monkeypatch.setattr(rewards_module, "GRADE_SECONDS", 1)


def test_the_solution_is_passed_to_verify_first(fake_math_verify):
    assert accuracy_reward(["seven", "7"], ["7", "$seven$"]) == [1.0, 0.0]


def test_a_solution_that_cannot_be_parsed_and_a_grader_that_fails_leave_the_completion_unscored(fake_math_verify):
    """0 for everything would look like a policy that learns nothing."""
    with pytest.warns(UserWarning) as caught:
        assert accuracy_reward(["fail", "1"], ["7", "no mathematics 1"]) == [None, None]
    assert [str(warning.message).split(": ", 1)[1] for warning in caught] == ["ZeroDivisionError: an internal error", "it cannot be parsed"]


def test_an_answer_without_end_is_left_unscored_and_stalls_neither_the_loop_nor_the_next_answer(fake_math_verify, tmp_path):
    """9 ** 9 ** 9 holds the interpreter's lock: in a thread it would stop everything, and no limit on waiting would end it."""
    async def scored():
        completions, meanwhile = ["seven", "9 ** 9 ** 9", "seven", "8"], 0
        scoring = asyncio.create_task(call_rewards([accuracy_reward], [PROMPT] * 4, completions, [[1]] * 4, dict(solution=[7] * 4)))
        while not scoring.done():
            await asyncio.sleep(0.01)
            if (tmp_path / "endless").exists():                 # with the process that computes it, until it is ended
                meanwhile += psutil.pid_exists(int((tmp_path / "endless").read_text()))
        return scoring.result()[0], meanwhile
    with pytest.warns(UserWarning, match="it took over 1 s"):
        values, meanwhile = asyncio.run(scored())
    assert np.array_equal(values, [1.0, math.nan, 1.0, 0.0], equal_nan=True) and meanwhile > 5     # of 100 on a quiet machine


def test_a_grading_process_that_was_killed_is_replaced(fake_math_verify):
    assert grade(7, "seven") == 1.0
    process, = rewards_module._idle
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert grade(7, "seven") == 1.0 and rewards_module._idle[-1].pid != process.pid


def test_threads_that_grade_at_once_each_get_their_own_answers():
    rewards = {}

    def work(number):
        rewards[number] = accuracy_reward([str(number), str(number + 1)] * 5, [number] * 10)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {number: [1.0, 0.0] * 5 for number in range(4)}


def test_accuracy_is_the_same_in_the_main_thread_and_in_a_worker_thread():
    texts = ["$7$", r"\boxed{7}", "8", "14/2", "none"]
    completions = [[dict(role="assistant", content=text)] for text in texts]
    in_worker = asyncio.run(call_rewards([accuracy_reward], [PROMPT] * 5, completions, [[1]] * 5, dict(solution=["7"] * 5)))
    assert in_worker[0].tolist() == accuracy_reward(completions, ["7"] * 5) == [1.0, 1.0, 0.0, 1.0, 0.0]
    with multiprocessing.get_context("spawn").Pool(1) as pool:         # its processes are daemons, as the rollout process is
        assert pool.apply(accuracy_reward, (completions, ["7"] * 5)) == in_worker[0].tolist()


@pytest.mark.parametrize("solution, text, reward", [
    (r"\frac{1}{3}", r"so \boxed{\frac{1}{3}}.", 1.0), ("1/3", r"so $\boxed{\dfrac{1}{3}}$", 1.0), ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
    ("0.50", "It is 0.5.", 1.0), ("1,234", "that is $1234$", 1.0), ("1234", r"\boxed{1,\!234}", 1.0), ("50", r"\boxed{50\%}", 1.0),
    ("50%", "50", 1.0),
    (r"\$5", "5 dollars", 1.0), ("-3", r"\boxed{ - 3 }", 1.0), ("3", r"\boxed{-3}", 0.0), ("4", r"\boxed{3} or \boxed{4}", 1.0),
    ("3", r"\boxed{3} or \boxed{4}", 0.0), ("3", r"\boxed{3} then \boxed{4", 1.0), ("7", "First 12, then 7", 1.0), ("12", "First 12, then 7", 0.0),
    (r"x^{2}+1", r"\boxed{x^{2} + 1}", 1.0), (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{(3, \frac{\pi}{2})}", 1.0), (r"\boxed{5}", "5", 1.0),
    ("Yes", r"\boxed{\text{Yes}}", 1.0), ("7", "seven", 0.0), ("7", "", 0.0), (0, r"\boxed{0}", 1.0), ("east", r"\boxed{east}", None),
    ("", "7", None),
    (None, "None", None), ("1/0", "1/0", 0.0)])
def test_without_math_verify_the_last_box_or_else_the_last_number_is_compared(monkeypatch, solution, text, reward):
    monkeypatch.setattr(rewards_module, "find_spec", lambda name: None)
    assert grade(solution, text) == reward


@pytest.mark.parametrize("text, contents", [
    (r"\boxed{1}", ["1"]), (r"a \boxed{\frac{1}{\sqrt{2}}} b {c} \boxed {2}", [r"\frac{1}{\sqrt{2}}", "2"]), (r"\boxed{\{1,2\}}", [r"\{1,2\}"]),
    (r"\boxed{\left\{x\right.}", [r"\left\{x\right."]), (r"\boxed{\boxed{3}}", [r"\boxed{3}", "3"]), (r"\boxed{1", []),
    (r"\boxed{1} \boxed{2", ["1"]),
    (r"}} \boxed{1}", ["1"]), (r"{ \boxed{1}", ["1"]), ("boxed{1} {2}", []), ("", [])])
def test_boxed_gives_what_is_in_balanced_boxes(text, contents):
    assert boxed(text) == contents


def test_a_reply_that_repeats_itself_costs_no_time_and_breaks_nothing():
    started = time.thread_time()
    assert boxed(r"\boxed{" * 20000) == [] and number_match(["9" * 30000, "1," * 30000, "1,111" * 10000, "1/" * 30000], [9] * 4) == [0.0] * 4
    assert plain("9" * 30000) == "9" * 30000 and time.thread_time() - started < 2


@pytest.mark.parametrize("text, number", [
    ("The answer is 12.", 12), ("5-3", 3), ("5 - 3 = 2", 2), ("x=-4", -4), ("$-4$", -4), ("\u22124", -4), ("-$4", -4),
    (r"\$1,234.50", Fraction(2469, 2)),
    ("3/4", Fraction(3, 4)), (".5", Fraction(1, 2)), ("0.50", Fraction(1, 2)), ("50%", 50), ("so...7", 7), ("**7**", 7), ("(1,2)", 2), ("H2O", None),
    ("#### 72", 72), ("5cm", 5), ("1.2.3", Fraction(6, 5)), ("no number", None), ("", None)])
def test_last_number(text, number):
    assert last_number(text) == number


def test_number_match_is_equality_of_last_numbers_and_none_without_one_in_the_answer():
    replies = [[dict(role="assistant", content=text)] for text in ("3 + 4 = 7", "7, or 8", "seven", "7.0", "7")]
    assert number_match(replies, [7, 7, 7, "#### 7", "seven"]) == [1.0, 0.0, 0.0, 1.0, None]


@pytest.mark.parametrize("text, reward", [
    ("<think>\nFirst... </think> The answer is 4.", 1.0), ("First... </think> The answer is 4.", 1.0), ("\n<think></think>4", 1.0),
    ("no tags", 0.0), ("", 0.0),
    ("<think>a <think>b</think> 4", 0.0), ("<think>a</think> <think>b</think> 4", 0.0), ("<think>a</think></think> 4", 0.0),
    ("a</think>b</think> 4", 0.0),
    ("<think>cut short", 0.0), ("cut short", 0.0), ("<think>a</think>", 0.0), ("a</think> \n", 0.0), ("Hm. <think>a</think> 4", 0.0),
    ("</think>4<think>", 0.0)])
def test_the_format_is_one_think_block_and_an_answer_wherever_the_block_was_opened(text, reward):
    completions = [[dict(role="assistant", content=text)]]
    assert format_reward(completions) == format_reward([text]) == format_reward(completions, prompts=[PROMPT]) == [reward]


@pytest.mark.parametrize("prompt", ["What is 2 + 2? <think>\n", [*PROMPT, dict(role="assistant", content="<think>\n")]])
@pytest.mark.parametrize("text, reward", [("a</think> 4", 1.0), ("<think>a</think> 4", 0.0), ("a <think>b</think> 4", 0.0), ("a", 0.0)])
def test_a_block_that_the_prompt_opened_is_not_opened_again(prompt, text, reward):
    assert format_reward([text, text], prompts=[prompt, PROMPT]) == [reward, float("</think>" in text and not text.startswith("a <"))]


def test_a_user_who_speaks_of_the_tag_has_not_opened_the_block():
    assert format_reward(["<think>a</think> 4"], prompts=[[dict(role="user", content="Begin with <think>")]]) == [1.0]


def test_the_overlong_punishment_is_equation_13_of_dapo():
    """Its setting: 16,384 tokens free, a cache of 4,096."""
    reward = soft_overlong_punishment(20480, 4096)
    lengths = [0, 16384, 16385, 18432, 20480, 20481, 99999]
    assert reward(completion_ids=[[1] * n for n in lengths], prompts=None) == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]
    assert soft_overlong_punishment(100, 0)(completion_ids=[[1] * 100, [1] * 101]) == [0.0, -1.0]
    assert reward_name(reward) == "soft_overlong_punishment"


def group_of(rewards, trained=None):
    """A group with these summed rewards (None: no source scored) whose rollouts have a trained token where `trained` says so."""
    count = len(rewards)
    sequences = [[make_sample([1, 2, 3], 2)] if has_token else [] for has_token in (trained or [True] * count)]
    known = dict(completions_sequences=sequences, rewards=np.array([math.nan if r is None else r for r in rewards]))
    return RolloutGroup(**{field.name: None for field in fields(RolloutGroup)} | known)


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
