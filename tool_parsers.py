"""Tool calls out of a reply's text, in the formats that model families were trained to write.

A parser takes (text, schemas): the reply with its special tokens and without its end-of-turn token, and the JSON schemas of the tools. It
returns the text that is not a call, and the calls in order. What begins like a call and is not one becomes a call with an `error`, so
that the model reads what it did wrong: nothing is guessed and nothing is lost.
"""
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Call:
    """One tool call as the model wrote it; with an `error` it must not be run."""

    name: str | None
    arguments: dict = field(default_factory=dict)
    error: str | None = None


Parser = Callable[[str, list[dict]], tuple[str, list[Call]]]


def call_of(value, key: str = "arguments") -> Call:
    """The call that a decoded JSON value {"name": …, key: {…}} stands for. Absent arguments are none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Call(None, error=f'a tool call is a JSON object with a "name" and "{key}", not {json.dumps(value)[:200]}')
    arguments = value.get(key, {})
    if isinstance(arguments, str):                   # some models write the object as a string
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return Call(value["name"], error=f'"{key}" must be a JSON object, not {json.dumps(value.get(key), default=str)[:200]}')
    return Call(value["name"], arguments)


def _finite(text: str) -> float:
    """ValueError for NaN, Infinity and what overflows to it, which JSON does not know."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)       # models write newlines inside strings


def _json(text: str):
    """The decoded value, or the decoding error itself, which no JSON value is."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:    # a ValueError too for a number of thousands of digits
        return error


def _call_from(text: str, key: str = "arguments") -> Call:
    value = _json(text.strip())
    return Call(None, error=f"the tool call is not valid JSON ({value}): {text.strip()[:200]}") if isinstance(value, Exception) else call_of(value, key)


def _arguments_call(name: str, text: str) -> Call:
    """A call whose name stands outside of the JSON."""
    value = _json(text.strip() or "{}")
    error = f"the arguments are not valid JSON ({value}): {text.strip()[:200]}" if isinstance(value, Exception) else None
    return Call(name, error=error) if error else call_of(dict(name=name, arguments=value))


def parse_hermes(text: str, schemas: list[dict]) -> tuple[str, list[Call]]:
    """Qwen 2.5, Qwen 3, Hermes: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""
    block = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
    return block.sub("", text).strip(), [_call_from(body) for body in block.findall(text)]


def parse_llama3_json(text: str, schemas: list[dict]) -> tuple[str, list[Call]]:
    """Llama 3: the whole reply is {"name": …, "parameters": {…}}, several with ; between, <|python_tag|> before them or not."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    marked, values, at = body != text.strip(), [], 0
    while at < len(body):
        try:
            value, at = DECODER.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            begun = marked or values or re.match(r'\{\s*"(name|type)"', body)
            return ("", [*values, Call(None, error=f"the tool call is not valid JSON ({error}): {body[at:at + 200]}")]) if begun else (text, [])
        if not marked and not (isinstance(value, dict) and value.keys() & {"parameters", "arguments"} and "name" in value):
            return text, []                          # an answer that happens to be JSON
        values.append(call_of(value, "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"))
        at = re.compile(r"[\s;]*").match(body, at).end()
    return "", values


def parse_mistral(text: str, schemas: list[dict]) -> tuple[str, list[Call]]:
    """Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or since 2025 [TOOL_CALLS]name[ARGS]{…} for each call."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in map(str.strip, parts):
        if named := re.match(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", part, re.DOTALL):
            calls.append(_arguments_call(named[1], named[2]))
        elif isinstance(listed := _json(part), list):
            calls += map(call_of, listed)
        else:
            calls.append(_call_from(part))
    return content.strip(), calls


def parse_deepseek(text: str, schemas: list[dict]) -> tuple[str, list[Call]]:
    """DeepSeek V3 and R1: <call begin>function<sep>name, a fenced JSON, <call end>; V3.1: <call begin>name<sep>{…}<call end>."""
    content = re.split("<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>", text)[0]
    calls = []
    for body in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|$)", text, re.DOTALL):
        head, _, rest = body.partition("<｜tool▁sep｜>")
        fenced = re.match(r"\s*([^\n]+)\n```json\n(.*?)\n?```", rest, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head, rest)
        calls.append(_arguments_call(name.strip(), arguments) if name.strip() and rest else
                     Call(None, error=f"the tool call names no function: {body.strip()[:200]}"))
    return content.strip(), calls


def _typed(text: str, kind: str | list[str] | None):
    """The value that a parameter's text stands for by its schema's type, or several, or none (anything); the decoding error where it may not be text."""
    if kind == "string":
        return text
    lower = text.strip().lower()                     # models write Python's True
    value = _json(lower if "boolean" in (kind or ()) and lower in ("true", "false") else text)
    return text if isinstance(value, Exception) and (kind is None or "string" in kind) else value


def parse_qwen3_coder(text: str, schemas: list[dict]) -> tuple[str, list[Call]]:
    """Qwen3-Coder, Qwen 3.5: <tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>; values by the schema's types."""
    kinds = {s["function"]["name"]: {k: p.get("type") for k, p in s["function"]["parameters"]["properties"].items()} for s in schemas}
    calls = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", text, re.DOTALL):
        function = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", body, re.DOTALL)
        if not function:
            calls.append(Call(None, error=f"a tool call is <function=name> … </function>, not {body.strip()[:200]}"))
            continue
        name, arguments, error = function[1].strip(), {}, None
        parameter = re.compile(r"<parameter=([^>\n]+)>((?:(?!<parameter=).)*?)</parameter>", re.DOTALL)
        if unread := re.search("<parameter=[^>\n]*>?", parameter.sub("", function[2])):
            error = f"{unread[0]} has no </parameter> after its value"
        for key, value in parameter.findall(function[2]):
            value = value.removeprefix("\n").removesuffix("\n")
            decoded = _typed(value, kinds.get(name, {}).get(key.strip(), "string"))
            if isinstance(decoded, Exception):
                error = f"the parameter {key.strip()} must be {kinds[name][key.strip()]}, not {value[:200]}"
            arguments[key.strip()] = decoded
        calls.append(Call(name, error=error) if error else Call(name, arguments))
    return re.split("<tool_call>", text)[0].strip(), calls


def parse_json_fence(text: str, schemas: list[dict]) -> tuple[str, list[Call]]:
    """Models trained on no format of their own: ```json {"name": …, "arguments": {…}} ```; a block without a name is no call."""
    block, calls, kept = re.compile(r"```(?:json|tool_call)\s*\n(.*?)(?:```|$)", re.DOTALL), [], text
    for match in block.finditer(text):
        call = _call_from(match[1])
        if call.name or isinstance(_json(match[1].strip()), Exception):
            calls, kept = [*calls, call], kept.replace(match[0], "", 1)
    return kept.strip(), calls


PARSERS: dict[str, Parser] = dict(
    qwen3_coder=parse_qwen3_coder, hermes=parse_hermes, mistral=parse_mistral, deepseek=parse_deepseek, llama3_json=parse_llama3_json,
    json=parse_json_fence)
