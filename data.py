"""Prompts: rows with a conversational `prompt` and any other columns, which reach the reward functions by name."""
import inspect
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from config import ConfigError


def load_rows(source, split: str = "train", option: str = "train_dataset", environments=None) -> Sequence[dict]:
    """The rows of `source`: a .jsonl path, a `datasets` name, a Dataset, a list of dicts, or a callable returning one.

    `environments` is the config's environment_factory: with one, rows need no prompt, and without a source there is one empty row,
    since the environment makes up its own tasks; with a dict, each row's `environment` is one of its names.
    Raises ConfigError when there is no row, or naming the first row whose prompt or environment is not as it must be.
    """
    if source is None and callable(environments):
        return [{}]
    origin = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
    if callable(source):
        try:
            inspect.signature(source).bind()
        except ValueError:                           # one of those in C that do not tell
            pass
        except TypeError as error:
            raise ConfigError(f"{option} {origin} is called without arguments ({error}): give each of its parameters a default.") from None
        source = source()
    if source is None:
        raise ConfigError(f"{option} is missing: give a .jsonl path, a `datasets` name, a list of rows, or a callable.")
    if isinstance(source, str):
        source = _read_jsonl(Path(source), option) if source.endswith((".jsonl", ".json")) else _load_dataset(source, split, option)
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise ConfigError(f"{option} {origin} has no rows: give a .jsonl path, a `datasets` name, a list of rows, or a callable that returns one.")
    rows = source if hasattr(source, "__len__") and hasattr(source, "__getitem__") else list(source)
    if len(rows) == 0:
        raise ConfigError(f"{option} {origin} has no rows.")
    for index, row in enumerate(islice(rows, len(rows))):        # a map-style dataset whose __getitem__ takes any number has no end
        if problem := _environment_problem(row, environments) or _prompt_problem(row, bool(environments)):
            raise ConfigError(f"row {index} of {option} {origin}: {problem}")
    return rows


def _read_jsonl(path: Path, option: str) -> list[dict]:
    if not path.is_file():
        raise ConfigError(f"{option} {path} is not a file.")
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not UTF-8 ({error}): save it as UTF-8.") from None
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number} is not JSON ({error}): put one object on each line.") from None
    return rows


def _load_dataset(name: str, split: str, option: str):
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{option}={name!r} is loaded with the `datasets` package: pip install datasets.") from None
    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}={name!r}, split {split!r}, could not be loaded, give a .jsonl path or the name of a dataset: {str(error).splitlines()[0]}") from error


def _environment_problem(row, environments) -> str | None:
    if isinstance(environments, dict) and not (isinstance(row, dict) and isinstance(row.get("environment"), str) and row["environment"] in environments):
        return f"its 'environment' column must name one of {', '.join(environments)}."
    return None


def _prompt_problem(row, optional: bool) -> str | None:
    """What is wrong with a row's prompt, as a sentence, or None."""
    if optional and isinstance(row, dict) and not row.get("prompt"):
        return None
    if not isinstance(row, dict) or "prompt" not in row:
        return "it has no 'prompt' column; rename yours to 'prompt'."
    prompt = row["prompt"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    return next(filter(None, map(_message_problem, prompt)), None) if messages else (
        "its prompt is not a conversation: make it a list of messages, e.g. [{'role': 'user', 'content': 'Hello'}].")


def _message_problem(message: dict) -> str | None:
    content = message["content"]
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = [kind for part in content for kind in ("image", "video", "audio") if kind in str(part.get("type")) or part.get(kind)]
        return f"its prompt has a part with {kinds[0]}: images, video and audio are not supported, leave such rows out." if kinds else None
    if isinstance(content, str) or (content is None and (message.get("tool_calls") or message.get("reasoning_content"))):
        return None
    return f"a message of its prompt has the content {content!r:.80}: make it text, or a list of parts like {{'type': 'text', 'text': 'Hello'}}."


def prompt_order(num_rows: int, seed: int, start: int = 0) -> Iterator[tuple[int, int, int]]:
    """(group_id, row index, epoch) without end: every row once an epoch, in an order that only `seed` and the epoch decide.

    `start` is the group id to begin with, so a resumed run goes on where it stopped.
    """
    epoch, offset = divmod(start, num_rows)
    group_id = start
    while True:
        order = list(range(num_rows))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for index in order[offset:]:
            yield group_id, index, epoch
            group_id += 1
        epoch, offset = epoch + 1, 0
