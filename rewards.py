"""Reward functions: how they are called, and those that ship.

A reward function takes (prompts, completions, completion_ids, **columns), each a list with one entry a rollout, and returns a
list of floats; None or NaN where it does not apply. It may be sync (run in a thread) or async.
"""
import asyncio
import inspect
import math
from functools import partial

import numpy as np

from config import ConfigError


def reward_name(func) -> str:
    while isinstance(func, partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


async def call_rewards(funcs: list, prompts: list, completions: list, completion_ids: list, columns: dict[str, list]) -> np.ndarray:
    """(functions, rollouts) float64, NaN where a function gave None. All run concurrently.

    Raises ConfigError naming the function and the prompt when one raises or returns the wrong number of rewards.
    """
    kwargs = dict(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
    return np.array(await asyncio.gather(*(_call_one(func, kwargs, prompts[0], len(prompts)) for func in funcs)), dtype=float).reshape(len(funcs), len(prompts))


async def _call_one(func, kwargs: dict, prompt, count: int) -> list[float]:
    name = reward_name(func)
    try:
        values = await asyncio.to_thread(_call_sync, func, kwargs) if not inspect.iscoroutinefunction(func) else func(**kwargs)
        if inspect.isawaitable(values):        # an async callable object, or a partial of an async function
            values = await values
    except Exception as error:
        raise ConfigError(f"reward function {name} raised {type(error).__name__}: {error} (on prompt {str(prompt)[:200]}): "
                          "mend it, or let it return None for what it cannot score.") from error
    if not hasattr(values, "__len__") or len(values) != count:
        got = f"{len(values)} rewards" if hasattr(values, "__len__") else type(values).__name__
        raise ConfigError(f"reward function {name} returned {got} for {count} completions: return one number or None for each.")
    try:
        rewards = [math.nan if value is None else float(value) for value in values]
        if any(map(math.isinf, rewards)):
            raise ValueError
        return rewards
    except (TypeError, ValueError):
        raise ConfigError(f"reward function {name} returned {values!r:.200}: return one number or None for each completion.") from None


def _call_sync(func, kwargs: dict):
    try:
        return func(**kwargs)
    except StopIteration as error:      # asyncio cannot carry one out of a thread: the awaiting task would never end
        raise RuntimeError("StopIteration") from error


def accuracy_reward(completions, solution, **columns):
    """1.0 when the last answer in a completion equals `solution` mathematically (math-verify), else 0.0; None for an unparsable solution."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise ConfigError("accuracy_reward needs math-verify: pip install math-verify.") from None
    rewards = []
    for completion, gold_text in zip(completions, solution):
        # The library's own time limits use signals, which only work in a main thread; rewards run in others.
        text = "" if gold_text is None else str(gold_text)
        gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
        if not text.strip() or not gold:
            rewards.append(None)
            continue
        answer = parse(completion[-1]["content"], parsing_timeout=None)
        rewards.append(float(verify(gold, answer, timeout_seconds=None)))
    return rewards
