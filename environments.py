"""Environments: objects whose public methods are tools, with state for one rollout at a time, that set the task and may own the reward."""
import copy
import inspect
import math
import time
from collections.abc import Callable
from contextlib import asynccontextmanager

from config import Config, ConfigError
from metrics import Window
from tools import call_function

RESERVED = ("reset", "get_reward")


class EnvironmentPool:
    """Instances of the config's environments. One belongs to one rollout, then to the next; it is reset in between, whatever happened.

    One whose reset raises is dropped: back in the pool it would be lent first again, and fail every rollout that waits.
    """

    def __init__(self, factory: Callable | dict[str, Callable] | None, metrics: Callable[[], Window]):
        self.factories = factory if isinstance(factory, dict) else {None: factory} if factory else {}
        self.idle: dict[str | None, list] = {name: [] for name in self.factories}
        self.metrics = metrics

    async def open(self, config: Config) -> list[list[Callable]]:
        """Make one instance of each kind -> the tools that its rollouts see, or the config's alone. Raises ConfigError for what cannot work."""
        seen, rewarded = [], bool(config.reward_functions or config.loop_cls)
        for name, factory in self.factories.items():
            env = await call_function(factory, {})
            if not callable(getattr(env, "reset", None)):
                raise ConfigError(f"{type(env).__name__} of environment_factory has no method reset(**columns), which begins a rollout: add one.")
            if not rewarded and not hasattr(env, "get_reward"):
                raise ConfigError(f"nothing rewards the rollouts of {type(env).__name__}: pass reward_funcs, or let it define get_reward(self) -> float.")
            self.idle[name].append(env)
            seen.append([*(config.tools or []), *public_methods(env)])
            names = [tool.__name__ for tool in seen[-1]]
            if len({*names}) < len(names):
                raise ConfigError(f"two tools have one name ({', '.join(sorted(names))}): rename one, in tools or in {type(env).__name__}.")
        return seen or [list(config.tools or [])]

    @asynccontextmanager
    async def lend(self, row: dict, prompt: list[dict]):
        """An instance reset to the row's columns, but for the one that chooses among several environments; the task that reset returns is added to `prompt`, which is this rollout's own."""
        name = None if None in self.factories else row["environment"]
        idle = self.idle[name]
        env = idle.pop() if idle else await call_function(self.factories[name], {})
        started = time.monotonic()
        columns = {key: copy.deepcopy(value) for key, value in row.items() if name is None or key != "environment"}
        check_columns(env, columns)
        task = await call_function(env.reset, columns)
        self.metrics().add("env/reset_s", time.monotonic() - started)
        try:
            add_task(prompt, task, type(env).__name__)
            yield env
        finally:
            idle.append(env)

    async def reward(self, env) -> tuple[type, float] | None:
        """The environment's class and its own reward of the rollout just over; None where it has none. NaN, or None, is no reward: NaN."""
        if not hasattr(env, "get_reward"):
            return None
        started = time.monotonic()
        value = await call_function(env.get_reward, {})
        self.metrics().add("env/reward_s", time.monotonic() - started)
        value = math.nan if value is None else float(value)
        if math.isinf(value):
            raise ConfigError(f"{type(env).__name__}.get_reward returned {value}: return a finite number, or None for no reward.")
        return type(env), value


def check_columns(env, columns: dict) -> None:
    """Raises ConfigError where reset cannot be called with them: all rollouts would fail, each with a TypeError."""
    try:
        inspect.signature(env.reset).bind(**columns)
    except ValueError:                               # one of those in C that do not tell
        pass
    except TypeError as error:
        raise ConfigError(f"{type(env).__name__}.reset is called with the dataset's columns {', '.join(columns) or '(none)'} ({error}): let it accept **kwargs or that "
                          "column, and give what is no column a default.") from None


def public_methods(env) -> list[Callable]:
    """The methods that are tools, by name; looked up on the class, so that no property is computed."""
    names = [name for name, _ in inspect.getmembers(type(env), inspect.isroutine)]
    return [getattr(env, name) for name in names if not name.startswith("_") and name not in RESERVED]


def add_task(prompt: list[dict], task: str | None, owner: str) -> None:
    """Append the text that reset returned to the prompt's last user message, or make it one."""
    if not (task is None or isinstance(task, str)):
        raise ConfigError(f"{owner}.reset returned {type(task).__name__}: return the task as a string, or None.")
    users = [message for message in prompt if message["role"] == "user"]
    if task and not users:
        prompt.append(dict(role="user", content=task))
    elif task and isinstance(users[-1]["content"], str):
        users[-1]["content"] += task
    elif task:
        users[-1]["content"].append(dict(type="text", text=task))
    if not prompt:
        raise ConfigError(f"{owner}.reset returned no text and the row has no prompt: one of the two must give it.")
