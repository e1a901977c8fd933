"""Reward functions: how they are called, and those that ship.

A reward function takes (prompts, completions, completion_ids, **columns), each a list with one entry a rollout, and returns a
list of floats; None or NaN where it does not apply. It may be sync (run in a thread) or async.
"""
import asyncio
import inspect
import json
import logging
import math
import re
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from functools import partial
from importlib.util import find_spec

import numpy as np

from config import ConfigError

GRADE_SECONDS = 5           # of CPU time for one answer: how busy the machine is changes no reward
NUMBER = re.compile(r"(?<!\w)(?<!\d\.)-?(?:(?:\d{1,3}(?:,\d{3}){1,999}(?!\d)|\d{1,4000})(?:\.\d{1,4000}|/0*[1-9]\d{,3999})?|(?<!\.)\.\d{1,4000})")


def reward_name(func) -> str:
    func = func.func if isinstance(func, partial) else func
    return getattr(func, "__name__", type(func).__name__)


def reward_names(funcs: list) -> list[str]:
    """One name a function, for metrics and messages: two that are called score are ["score", "score_2"]."""
    names = [reward_name(func) for func in funcs]
    return [f"{name}_{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]


async def call_rewards(funcs: list, prompts: list, completions: list, completion_ids: list, columns: dict[str, list]) -> np.ndarray:
    """(functions, rollouts) float64, NaN for None. All run at once, each on copies of its own; ConfigError names one at fault and the prompt."""
    kwargs = dict(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
    return np.array(await asyncio.gather(*(_call_one(func, name, kwargs) for func, name in zip(funcs, reward_names(funcs)))), dtype=float).reshape(len(funcs), len(prompts))


async def _call_one(func, name: str, kwargs: dict[str, list]) -> list[float]:
    count, where = len(kwargs["prompts"]), f"(on prompt {str(kwargs['prompts'][0])[:200]})"

    def called():                              # in its thread, if it has one; lists of ints need no deepcopy, 20 times as slow
        return func(**{key: [*map(list if key == "completion_ids" else deepcopy, values)] for key, values in kwargs.items()})
    try:
        values = called() if inspect.iscoroutinefunction(func) else await in_thread(called, {})
        values = await values if inspect.isawaitable(values) else values       # an async callable object gives one too
    except (Exception, SystemExit, asyncio.CancelledError) as error:       # the last two would end the process or its task without a word
        if asyncio.current_task().cancelling():
            raise
        advice = f"let it take {', '.join(kwargs)}, or **columns" if isinstance(error, TypeError) and re.search(r"unexpected keyword|missing \d", str(error)) else "mend it, or let it return None for what it cannot score"
        raise ConfigError(f"reward function {name} raised {type(error).__name__}: {error} {where}: {advice}.") from error
    values = values.tolist() if hasattr(values, "tolist") else values      # a numpy array or a tensor
    listed = isinstance(values, (list, tuple))
    with suppress(TypeError, ValueError, OverflowError):
        rewards = [math.nan if v is None else float(v) for v in values if not isinstance(v, (str, bytes))] if listed else []
        if len(rewards) == len(values) == count and not any(map(math.isinf, rewards)):
            return rewards
    got = f"{values!r:.200}" if listed and len(values) == count else f"{len(values)} rewards" if listed else type(values).__name__
    raise ConfigError(f"reward function {name} returned {got} for {count} completions {where}: return one finite number or None for each.")


def in_thread(func, kwargs: dict[str, list]) -> asyncio.Future:
    """func(**kwargs) in a thread of its own: the loop's pool waits at its end for a call that hangs, and keeps every error in."""
    outcome = Future()
    outcome.set_running_or_notify_cancel()

    def work():
        try:
            outcome.set_result(func(**kwargs))
        except BaseException as error:         # asyncio cannot carry a StopIteration: the awaiting task would never end
            outcome.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)
    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(outcome)


def reply_text(completion) -> str:
    """A completion's last assistant message, or the plain string that it is; "" where there is no text."""
    messages = [dict(content=completion)] if isinstance(completion, str) else completion or []
    content = next((m.get("content") for m in reversed(messages) if m.get("role", "assistant") == "assistant"), None) or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def last_number(text: str) -> Fraction | None:
    """Of "$1,000.50 or 3/4, so -.5%." it is -1/2: signs of money and percent are not looked at."""
    found = NUMBER.findall(re.sub(r"\\?\$", "", text).replace("\u2212", "-"))
    return Fraction(found[-1].replace(",", "")) if found else None


def number_match(completions, answer, **columns) -> list[float | None]:
    """1.0 when the last number of the reply is the last number of `answer` ("#### 72": 72), else 0.0; None for an answer without one."""
    return [None if (wanted := last_number(str(gold))) is None else float(last_number(reply_text(reply)) == wanted) for reply, gold in zip(completions, answer, strict=True)]


def format_reward(completions, prompts=None, **columns) -> list[float]:
    """1.0 for one block <think>...</think> at the start and an answer after it, else 0.0. It may be opened before the completion: by a
    prompt (text, or a last assistant message) that ends with <think>, after which another <think> gives 0.0; or by the chat template,
    which no argument shows, so a completion without <think> is read as if it began with one.
    """
    rewards = []
    for prompt, completion in zip(prompts or [""] * len(completions), completions, strict=True):
        text = reply_text(completion).lstrip()
        if "<think>" not in text or reply_text(prompt if isinstance(prompt, str) else prompt[-1:]).rstrip().endswith("<think>"):
            text = "<think>" + text
        rewards.append(float(text.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1 and text.partition("</think>")[2].strip() != ""))
    return rewards


def soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int):
    """DAPO's length penalty (arXiv 2503.14476, Eq. 13), in tokens: 0 up to max - cache, then linear to -1 at max, and -1 beyond."""
    def soft_overlong_punishment(completion_ids, **columns):
        return [min(max((max_completion_len - soft_punish_cache - len(ids)) / max(soft_punish_cache, 1), -1.0), 0.0) for ids in completion_ids]
    return soft_overlong_punishment


def accuracy_reward(completions, solution, **columns) -> list[float | None]:
    r"""1.0 when a completion's answer equals its `solution`, else 0.0; None where the solution is no mathematics or grading fails.
    Equality is math-verify's; 28\% equals 28 and 0.28. Of several \boxed{} the last counts, or all of them as a set. WITHOUT
    math-verify the last balanced \boxed{} must be the solution but for spelling, or the last number where there is no box.
    Words are no mathematics, since math-verify multiplies their letters (seat = east), except for yes, no, true and false.
    """
    rewards = []
    for reply, gold in zip(completions, solution, strict=True):
        gold, text, outcome = "" if gold is None else str(gold), reply_text(reply), "it is no mathematics"
        if plain(gold) != "" and not re.fullmatch(r"(?si)(?=.*[a-z]{3})(?!(?:yes|true|false)\s*$)[a-z\s.,;:'!?-]+", gold):
            answer, wanted = (boxed(text) or [str(last_number(text))])[-1], (boxed(gold) or [gold])[-1]
            outcome = _grade_apart(gold, text) if find_spec("math_verify") else float(plain(answer) == plain(wanted))
        if isinstance(outcome, str):
            warnings.warn(f"accuracy_reward leaves a completion unscored whose solution is {gold!r:.200}: {outcome}")
        rewards.append(None if isinstance(outcome, str) else outcome)
    return rewards


def plain(text: str) -> Fraction | str:
    r"""Text as compared without math-verify: "\frac{1}{2}", "1/2", "$0.50$." and "50/100" are Fraction(1, 2); "50\%" is 50."""
    text = re.sub(r"\\left|\\right|\\[,;:! %$]|\\text\{([^{}]*)\}|[\s$%]", r"\1", text).rstrip(".")
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    return last_number(text) if NUMBER.fullmatch(text) else text


def boxed(text: str) -> list[str]:
    r"""What is in each \boxed{} whose braces balance, by where it begins: "\boxed{\frac{1}{2}} or \boxed{3" -> ["\frac{1}{2}"]."""
    found, starts = [], []                     # starts: of the braces open here; None for one that is no box's
    for token in re.finditer(r"\\boxed\s*(\{)|\\.|[{}]", text, re.DOTALL):
        if token[0] == "}" and starts:
            found.append((starts.pop(), token.start()))
        elif token[0] == "{" or token[1]:
            starts.append(token.end() if token[1] else None)
    return [text[start:end] for start, end in sorted(span for span in found if span[0] is not None)]


_idle, _lock = [], threading.Lock()            # the grading process, while nothing is graded


def _grade_apart(gold: str, text: str) -> float | str:
    """`_grade` in a process, which the kernel ends when it has used GRADE_SECONDS; in words why there is no reward. math-verify's own
    limits are signals, for main threads only, and without a limit 9^{9^{9}} holds the interpreter's lock, and so generation, forever.
    """
    with _lock:
        process = _idle.pop() if _idle and _idle[-1].poll() is None else subprocess.Popen(
            [sys.executable, __file__, str(GRADE_SECONDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(json.dumps([gold, text]), file=process.stdin, flush=True)
        if reply := process.stdout.readline():
            _idle.append(process)              # not sooner: a call cut short leaves no process with an unread reply
            return json.loads(reply)
    return f"grading ended with code {process.wait()} ({-signal.SIGPROF}: it took over {GRADE_SECONDS} s)"


def _grade(gold_text: str, text: str) -> float | str:
    from math_verify import LatexExtractionConfig, parse, verify
    gold_text, text = (re.sub(r"(?i)(^\s*|\\boxed\{)(yes|no|true|false)(\s*$|\})", r"\1\\text{\2}\3", part) for part in (gold_text, text))
    if not any(mark in gold_text for mark in ("$", r"\boxed", r"\[")):
        gold_text = f"${gold_text}$"           # of bare text only the first number counts: 3 of \left(3, ...\right)
    gold = parse(gold_text, extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
    size = abs(gold[0].evalf()) if gold and getattr(gold[0], "is_number", False) else 1
    zeros = -math.floor(math.log10(size)) if getattr(size, "is_Float", False) and 0 < size < 1e-3 else 0     # six decimals make 2^-99 equal 2^-98
    answers = [parse(answer, parsing_timeout=None) for answer in (text, *(rf"\boxed{{{content}}}" for content in boxed(text)[1:][-1:]))]
    same = any(verify(gold, answer, 6 + zeros, 15 + zeros, timeout_seconds=None) for answer in answers)
    return float(same) if gold else "it cannot be parsed"


if __name__ == "__main__":      # the grading process: a line [solution, reply] in, a line with what `_grade` says out
    replies, sys.stdout = sys.stdout, sys.stderr                # a library may print
    logging.getLogger("math_verify").setLevel(logging.ERROR)    # it warns of its time limits
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        try:
            outcome = _grade(*json.loads(line))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps(outcome), file=replies, flush=True)
