"""`key=value` on the command line, parsed by the type that the config declares for the key."""
import ast
import difflib
import json
import typing
from dataclasses import fields


class ConfigError(Exception):
    """Something the user can put right: the message is one sentence that says what to change."""


def parse_override(cls: type, text: str) -> tuple[str, object]:
    """The field of the dataclass `cls` that `text` names, and its value. Raises ConfigError."""
    key, equals, value = text.removeprefix("--").partition("=")
    names = [field.name for field in fields(cls)]
    if not equals:
        raise ConfigError(f"{text!r} is not an override: write key=value.")
    if key not in names:
        raise ConfigError(unknown_option(cls, key))
    return key, _parse_value(key, value, typing.get_type_hints(cls)[key])


def unknown_option(cls: type, key: str) -> str:
    near = difflib.get_close_matches(key, [field.name for field in fields(cls)], n=1, cutoff=0.4)
    return f"unknown option {key!r}" + (f": did you mean {near[0]!r}?" if near else ": see config.py for the list.")


def _parse_value(key: str, text: str, declared) -> object:
    choices = typing.get_args(declared) or (declared,)
    if type(None) in choices and text.lower() == "none":
        return None
    kind = next(choice for choice in choices if choice is not type(None))
    try:
        if kind is bool:
            known = {"true": True, "1": True, "false": False, "0": False}
            return known.get(text.lower(), text) if str in choices else known[text.lower()]
        if kind in (int, float, str):
            return kind(text)
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = json.loads(text)
        if kind is dict and not isinstance(value, dict):
            raise ValueError
        return value
    except (KeyError, ValueError, SyntaxError):
        if kind is typing.Any and key in ("train_dataset", "eval_dataset", "tool_parser"):
            return text
        wanted = {typing.Any: "a Python literal (set functions in the config file)"}.get(kind, getattr(kind, "__name__", str(kind)))
        raise ConfigError(f"{key}={text}: the value must be {wanted}.") from None
