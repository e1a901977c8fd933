"""Environments: one a rollout, its task in that rollout's prompt alone, its methods as tools, its own reward, and back to the pool."""
import asyncio
import json
import math
import re
from collections import Counter

import chat_templates
import pytest
from conftest import tiny_config
from fake_server import FakeServer
from test_rollout import drive
from test_tools import END, Script, hermes, tokenizer, trained_once  # noqa: F401  (tokenizer is a fixture)

from config import ConfigError
from data import load_rows
from environments import add_task, public_methods
from metrics import Window
from recording import read_groups
from replay import ReplayFeed
from rollout import AsyncRolloutLoop


class Counting:
    """Reaches a target by increments; keeps count of its instances, of resets and of who uses it."""

    made, resets = [], []

    def __init__(self):
        self.made.append(self)
        self.users = 0

    def reset(self, target=3, **columns):
        self.resets.append(columns | dict(target=target))
        self.users += 1
        assert self.users == 1, "lent to two rollouts at once"
        self.counter, self.target = 0, target
        return f" Reach {target}."

    async def get_reward(self):
        before = self.counter
        await asyncio.sleep(0.02)
        assert self.counter == before and self.users == 1, "another rollout used it while it was scored"
        self.users = 0
        return float(self.counter == self.target)

    @property
    def expensive(self):
        raise AssertionError("looking for tools must not compute properties")

    def increment(self, step: int) -> int:
        """Increments the counter.

        Args:
            step: By how much.
        """
        self.counter += step
        return self.counter

    def _hidden(self):
        pass


@pytest.fixture(autouse=True)
def nothing_made():
    Counting.made, Counting.resets = [], []


@pytest.fixture
def play(tokenizer):  # noqa: F811
    """drive() with environments and scripted replies."""
    with FakeServer() as server:
        def run(script, dataset=None, loop_cls=AsyncRolloutLoop, rows_of=None, **changes):
            scripted = Script(tokenizer, script)
            server.answer = scripted.answer
            changes = dict(environment_factory=Counting, tool_parser="hermes", reward_funcs=None, num_generations=4, max_completion_length=64,
                           max_model_len=1024, num_train_epochs=1,
                           train_dataset=dataset, max_steps=1 if dataset is None else -1) | changes
            rows = load_rows(dataset, environments=changes["environment_factory"])
            stop = dict(stop_after=changes["num_generations"]) if dataset is None else {}
            return drive(server, rows, loop_cls, tokenizer=tokenizer, eos=END, **(stop | changes)), scripted
        run.server = server
        yield run


def half_right(text, turn, seed):
    """Of four requests in a row two increment by the target and two by one."""
    if turn:
        return "done"
    return hermes("increment", step=int(re.findall(r"Reach (\d+)", text)[0]) if seed % 4 < 2 else 1)


def prompt_row(text="Play.", **columns):
    return dict(prompt=[dict(role="user", content=text)]) | columns


# The task

def test_the_text_of_reset_is_in_each_rollouts_prompt_once_and_the_rows_stay_as_they_are(play):
    dataset = [prompt_row(target=5)]
    out, scripted = play(half_right, dataset, num_train_epochs=2)
    firsts = [scripted.tokenizer.decode(prompt) for prompt, _ in scripted.sampled if scripted.tokenizer.decode(prompt).count("<|im_start|>assistant") == 1]
    assert len(firsts) == 8 and all(text.count("Play. Reach 5.<|im_end|>") == 1 and text.count("Reach") == 1 for text in firsts)
    assert dataset == [prompt_row(target=5)] and trained_once(out, scripted)


@pytest.mark.parametrize("prompt, task, expected", [
    ([dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="user", content="c"), dict(role="system", content="d")], " x",
     ["a", "b", "c x", "d"]),
    ([dict(role="user", content="a")], None, ["a"]), ([dict(role="user", content="a")], "", ["a"]),
    ([], "x", ["x"]), ([dict(role="system", content="s")], "x", ["s", "x"]),
    ([dict(role="user", content=[dict(type="text", text="a")])], "x", [[dict(type="text", text="a"), dict(type="text", text="x")]])])
def test_the_text_goes_to_the_last_user_message_or_becomes_one(prompt, task, expected):
    add_task(prompt, task, "Env")
    assert [message["content"] for message in prompt] == expected


def test_each_rollout_is_recorded_with_its_own_task_and_a_folder_with_one_prompt_a_group_replays_as_before(play, tmp_path):
    """All four were recorded as rollouts of the first one's task."""
    class Numbered(NoReward):
        made = []

        def reset(self, **columns):
            self.made.append(len(self.made))
            self.target = self.made[-1]
            return f"Reach {self.target}."

        def get_reward(self):
            return float(self.target)
    play(lambda text, turn, seed: re.findall(r"Reach (\d+)", text)[0], [{}], environment_factory=Numbered, save_rollouts=True, output_dir=str(tmp_path))
    group, = read_groups(tmp_path / "rollouts")
    assert {(r["prompt"][0]["content"], r["completion"][0]["content"], r["reward"]) for r in group["rollouts"]} == {(f"Reach {n}.", f"{n}", n) for n in range(4)}
    old = tmp_path / "old"
    old.mkdir()
    before = group | dict(prompt=group["rollouts"][0]["prompt"], rollouts=[{name: value for name, value in r.items() if name != "prompt"} for r in group["rollouts"]])
    (old / "groups_00000.jsonl").write_text(json.dumps(before) + "\n")
    replayed = [[s.input_ids.tolist() for s in ReplayFeed(tiny_config(replay=str(folder), token_budget=999), Window()).recorded] for folder in (tmp_path / "rollouts", old)]
    assert replayed[0] == replayed[1] and len(replayed[0]) == 4


def test_a_reset_that_gives_neither_text_nor_none_or_no_prompt_at_all_is_a_sentence():
    with pytest.raises(ConfigError, match="Env.reset returned int: return the task as a string, or None"):
        add_task([dict(role="user", content="a")], 3, "Env")
    with pytest.raises(ConfigError, match="Env.reset returned no text and the row has no prompt"):
        add_task([], None, "Env")


def test_reset_gets_the_rows_columns_but_not_the_environments_name(play):
    play(half_right, [dict(environment="b", target=2, extra=[1])], environment_factory=dict(a=Counting, b=Counting))
    assert Counting.resets == [dict(target=2, extra=[1])] * 4


def test_where_there_is_one_environment_a_column_of_that_name_is_the_datasets_own_and_reaches_reset(play):
    play(half_right, [dict(environment="kitchen", target=2)])
    assert Counting.resets == [dict(environment="kitchen", target=2)] * 4


def test_an_environment_may_own_the_data_without_any_dataset(play):
    out, _ = play(half_right)
    assert {s.reward for s in out.samples} == {0.0, 1.0} and all(columns == dict(target=3) for columns in Counting.resets)
    assert load_rows(None, environments=Counting) == [{}]


@pytest.mark.parametrize("rows, environments, words", [
    (None, dict(a=Counting), "train_dataset is missing"), ([dict(environment="c")], dict(a=Counting, b=Counting), "row 0.*must name one of a, b"),
    ([dict(target=1)], dict(a=Counting), "row 0.*must name one of a"), ([dict(environment=["a"])], dict(a=Counting), "row 0.*must name one of a"),
    ([dict(environment=3)], dict(a=Counting), "row 0.*must name one of a"), ([dict(target=1)], None, "no 'prompt' column"),
    ([dict(prompt="text")], Counting, "not a conversation")])
def test_rows_that_do_not_fit_the_environments_are_a_sentence(rows, environments, words):
    with pytest.raises(ConfigError, match=words):
        load_rows(rows, environments=environments)


@pytest.mark.parametrize("row, words", [(dict(goal=2, target=3), "called with the dataset's columns goal, target .*unexpected keyword argument 'target'.*accept ..kwargs or that column"),
                                        ({}, "called with the dataset's columns .none. .missing a required argument: 'goal'.*a default")])
def test_a_reset_that_does_not_take_the_rows_columns_is_a_sentence_that_names_its_class(play, row, words):
    class Narrow(NoReward):
        def reset(self, goal):
            return "Go."
    with pytest.raises(BaseExceptionGroup) as caught:
        play(half_right, [row], environment_factory=Narrow, reward_funcs=len)
    error = caught.value.exceptions[0]
    assert isinstance(error, ConfigError) and re.match(f"Narrow.reset is {words}", str(error)) and play.server.bodies == []


# Tools and rewards

def test_the_public_methods_but_reset_and_get_reward_are_tools():
    assert [method.__name__ for method in public_methods(Counting())] == ["increment"]


def test_only_the_rows_own_environments_tools_are_shown_beside_the_configs(play):
    def lookup(key: str) -> str:
        """Looks up.

        Args:
            key: What.
        """

    class Game(Counting):
        increment = None

        def move(self, way: str) -> str:
            """Moves.

            Args:
                way: Where.
            """
    _, scripted = play(lambda text, turn, seed: "done", [dict(environment="count"), dict(environment="game")], environment_factory=dict(count=Counting, game=Game),
                       tools=[lookup], tool_parser=None, chat_template_kwargs=dict(chat_template=chat_templates.QWEN25))
    shown = Counter(tuple(sorted(set(re.findall(r'"name": "(\w+)"', scripted.tokenizer.decode(prompt))))) for prompt, _ in scripted.sampled)
    assert shown == {("increment", "lookup"): 4, ("lookup", "move"): 4}


def test_an_environments_reward_is_added_to_the_reward_functions_and_logged_under_its_class(play):
    out, _ = play(half_right, [prompt_row(target=5)], reward_funcs=lambda completions, **columns: [10.0] * len(completions))
    assert sorted(s.reward for s in out.samples) == [10, 10, 11, 11]
    wanted = {"rewards/Counting/mean": 0.5, "rewards/Counting/group_std": 0.5, "reward": 10.5, "reward_group_std": 0.5}
    assert {name: out.metrics[name] for name in wanted} == wanted
    assert out.metrics["env/reward_s"] >= 0.02 and out.metrics["env/reset_s"] > 0 and out.metrics["tools/increment/call_count"] == 4


def test_a_reward_of_none_or_nan_is_no_reward_and_one_that_is_infinite_is_a_sentence(play):
    class Silent(Counting):
        def get_reward(self):
            self.users = 0
            return None if len(self.resets) % 2 else math.nan

    class Infinite(Counting):
        def get_reward(self):
            return float("inf")
    out, _ = play(half_right, [prompt_row()], environment_factory=Silent, reward_funcs=lambda completions, **columns: [float(i) for i, _ in enumerate(completions)])
    assert sorted(s.reward for s in out.samples) == [0, 1, 2, 3] and "rewards/Silent/mean" not in out.metrics
    with pytest.raises(BaseExceptionGroup) as caught:
        play(half_right, [prompt_row()], environment_factory=Infinite)
    assert "Infinite.get_reward returned inf" in str(caught.value.exceptions[0])


class NoReward:
    def reset(self, **columns):
        return "Go."


class NoReset:
    pass


@pytest.mark.parametrize("environment, words", [(NoReward, "nothing rewards the rollouts of NoReward"), (NoReset, "NoReset of environment_factory has no method reset")])
def test_an_environment_that_lacks_what_it_needs_is_a_sentence_before_the_first_request(play, environment, words):
    with pytest.raises(ConfigError, match=words):
        play(lambda *_: "x", environment_factory=environment)
    assert play.server.bodies == []


def test_an_environment_without_tools_plays_single_turns(play):
    class Quiz(NoReward):
        def get_reward(self):
            return 1.0
    out, scripted = play(lambda text, turn, seed: hermes("increment", step=1), [{}], environment_factory=Quiz, reward_funcs=lambda completion_ids, **columns: [0, 1, 2, 3])
    assert out.metrics["rollout/turns_mean"] == 1 and sorted(s.reward for s in out.samples) == [1, 2, 3, 4]


def test_rollouts_of_an_environment_without_tools_count_among_those_that_used_their_turns_up_or_not(play):
    """Only the others did: 1.0 where half of the rollouts had no tool at all. And the last message's calls, which are not run, are calls."""
    class Quiz(NoReward):
        def get_reward(self):
            return 1.0
    call = hermes("increment", step=1)
    out, _ = play(lambda text, turn, seed: "done" if "Go." in text else call if turn == 0 else call * 3, [dict(environment="quiz"), dict(environment="count")],
                  environment_factory=dict(quiz=Quiz, count=Counting), max_tool_calling_iterations=1)
    wanted = {"tools/loop_exhausted_frac": 0.5, "tools/parallel_calls_mean": 2, "tools/call_frequency": 0.5, "rollout/turns_mean": 1.5}
    assert {name: out.metrics[name] for name in wanted} == wanted


# The pool

@pytest.mark.parametrize("where", ["reset", "generate_one", "get_reward", "nowhere"])
def test_instances_are_never_more_than_rollouts_at_once_go_back_whatever_fails_and_are_reset(play, where):
    calls = Counter()

    def every_third(place):
        calls[place] += 1
        if place == where and calls[place] % 3 == 0:
            raise OSError("sandbox lost")

    class Fragile(Counting):
        def reset(self, **columns):
            self.users = 0
            task = super().reset(**columns)
            every_third("reset")
            return task

        async def get_reward(self):
            every_third("get_reward")
            return await super().get_reward()

    class Loop(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            every_third("generate_one")
            return await super().generate_one(prompt, tools, group_id)
    out, _ = play(half_right, [prompt_row(target=2 + i) for i in range(5)], Loop, environment_factory=Fragile, max_concurrent_rollouts=4)
    idle = out.loop.environments.idle[None]
    dropped = calls["reset"] // 3 if where == "reset" else 0
    assert len(Counting.made) <= 4 + dropped and {*map(id, idle)} <= {*map(id, Counting.made)} and len(Counting.resets) == 20
    assert len(idle) == len({*map(id, idle)}) == len(Counting.made) - dropped
    assert out.metrics.get("rollout/failed_count", 0) == (0 if where == "nowhere" else calls[where] // 3)


def test_one_instance_that_died_costs_one_rollout_and_no_other(play):
    class Mortal(Counting):
        def reset(self, **columns):
            if self is self.made[0] and self.resets:
                raise OSError("sandbox lost")
            return super().reset(**columns)
    out, _ = play(half_right, [prompt_row(target=2 + i) for i in range(5)], environment_factory=Mortal, max_concurrent_rollouts=4)
    assert out.metrics["rollout/failed_count"] == 1 and len(Counting.resets) == 19 and Counting.made[0] not in out.loop.environments.idle[None]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_an_environment_that_exits_costs_its_rollout_alone(play, method, error):
    class Leaving(Counting):
        calls = []

        async def reset(self, **columns):
            self._leave("reset")
            return super().reset(**columns)

        async def get_reward(self):
            self._leave("get_reward")
            return await super().get_reward()

        def _leave(self, place):
            self.calls.append(place)
            if place == method and self.calls.count(place) == 2:
                self.users = 0
                raise error("exit() in model-written code")
    out, _ = play(half_right, [prompt_row(target=2 + i) for i in range(3)], environment_factory=Leaving)
    assert out.metrics["rollout/failed_count"] == 1 and len(out.samples) >= 8


def test_instances_are_reused_and_no_rollout_sees_the_state_of_another(play):
    out, scripted = play(half_right, [prompt_row(target=2 + i) for i in range(4)], max_concurrent_rollouts=2)
    assert len(Counting.made) <= 2 and len(Counting.resets) == 16 and out.metrics.get("rollout/failed_count", 0) == 0
    seen = [re.findall(r"Reach (\d+).*<\|im_start\|>tool\n(\d+)", scripted.tokenizer.decode(prompt), re.DOTALL) for prompt, _ in scripted.sampled]
    counted = [found[0] for found in seen if found]
    assert len(counted) == 16 and all(result in (target, "1") for target, result in counted)


def test_a_factory_that_fails_names_itself(play):
    def broken():
        raise OSError("no sandbox")
    with pytest.raises(OSError, match="no sandbox"):
        play(half_right, environment_factory=broken)
