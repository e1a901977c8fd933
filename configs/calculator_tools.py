"""Stateless tools, one sync and one async, and an ordinary reward. Another model with its own template: model=… chat_template_kwargs=none."""
from dataclasses import replace

from configs.increment_env import config as base
from rewards import number_match


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


rows = [dict(prompt=[dict(role="user", content=f"What is {a} * {b} + {c}?")], answer=a * b + c) for a in range(9) for b in range(9) for c in range(9)]
config = replace(base, environment_factory=None, tools=[multiply, add], train_dataset=rows, reward_funcs=number_match, vllm_max_model_length=640, token_budget=640)
