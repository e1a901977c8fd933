"""Every source of prompts gives the same rows, and the order visits each row once an epoch."""
import inspect
import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import ConfigError
from data import load_rows, prompt_order


def chat(text):
    return [dict(role="user", content=text)]


ROWS = [dict(prompt=chat("1 + 1?"), answer=2), dict(prompt=chat("2 + 2?"), answer=4), dict(prompt=chat("Größe?"), answer=5)]


def as_jsonl(folder, rows=ROWS, **options):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, **options) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def as_dataset(folder):
    import datasets
    return datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize("source", [
    as_jsonl, lambda folder: as_jsonl(folder, ensure_ascii=False), as_dataset, lambda folder: ROWS, lambda folder: tuple(ROWS),
    lambda folder: lambda: ROWS, lambda folder: lambda: iter(ROWS), lambda folder: lambda: as_jsonl(folder),
    lambda folder: lambda: as_dataset(folder)],
    ids=["jsonl", "jsonl_utf8", "dataset", "list", "tuple", "callable", "callable_iterator", "callable_path", "callable_dataset"])
def test_every_kind_of_source_gives_the_same_rows(tmp_path, source):
    rows = load_rows(source(tmp_path))
    assert len(rows) == 3 and [rows[i] for i in range(3)] == ROWS


class Sums:
    """As a torch Dataset: problems made from their number, whatever it is. Counts what it was asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 5

    def __getitem__(self, i):
        self.asked.append(i)
        assert i < 99, "asked for without end"
        return dict(prompt=chat(f"{i} + {i}?"), answer=2 * i)


def test_of_a_map_style_dataset_each_row_up_to_its_length_is_looked_at_even_where_no_index_is_an_error():
    """Without __iter__ Python asks for rows until an IndexError: the start never ended."""
    sums = Sums()
    assert load_rows(sums) is sums and sums.asked == [0, 1, 2, 3, 4]


def test_blank_lines_of_a_jsonl_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(ROWS[0]) + "\n\n  \n" + json.dumps(ROWS[1]) + "\n")
    assert list(load_rows(str(path))) == ROWS[:2]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_unicode_line_separator_inside_a_json_string_ends_no_line(tmp_path, separator):
    row = dict(prompt=chat(f"one{separator}two"))
    assert list(load_rows(as_jsonl(tmp_path, [row, ROWS[0]], ensure_ascii=False))) == [row, ROWS[0]]


def no_rows():
    return []


@pytest.mark.parametrize("source, words", [
    (None, "train_dataset is missing"), ("/nowhere/rows.jsonl", "train_dataset /nowhere/rows.jsonl is not a file."),
    ([], "train_dataset list has no rows"), (no_rows, "train_dataset no_rows has no rows"),
    ([ROWS[0], dict(question=chat("hi"))], "row 1 of train_dataset list: it has no 'prompt' column"),
    (5, "train_dataset int has no rows"), (lambda split: ROWS, "is called without arguments"), ("/nowhere/folder", "'/nowhere/folder', split 'train', could not be loaded"),
    (["text"], "row 0 of train_dataset list: it has no 'prompt' column"),
    ([dict(prompt="hi")], "row 0 of train_dataset list: its prompt is not a conversation"),
    ([dict(prompt=[])], "not a conversation"), ([dict(prompt=["hi"])], "not a conversation"),
    ([dict(prompt=[dict(role="user")])], "not a conversation"), ([dict(prompt=None)], "not a conversation")])
def test_a_source_that_cannot_be_used_is_one_sentence(source, words):
    with pytest.raises(ConfigError) as caught:
        load_rows(source)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def part(**fields):
    return [dict(prompt=[dict(role="user", content=[dict(type="text", text="What is it?"), fields])])]


@pytest.mark.parametrize("source, words", [
    *((part(**fields), "row 0 of train_dataset list: its prompt has a part with image: images, video and audio are not supported") for fields in (
        dict(type="image"), dict(type="image_url", image_url=dict(url="x")), dict(image="x.png"))),
    (part(type="video", video="x"), "a part with video"), (part(type="input_audio", input_audio={}), "a part with audio"),
    *(([ROWS[0], dict(prompt=[dict(role="user", content=content)])], f"row 1 of train_dataset list: a message of its prompt has the content {content!r}: make it text") for content in (
        None, 3, dict(text="a"), ["a"]))])
def test_a_message_without_text_or_with_an_image_is_one_sentence_at_the_start(source, words):
    with pytest.raises(ConfigError) as caught:
        load_rows(source)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_text_parts_and_calls_without_text_are_messages():
    rows = [*part(type="text", text="a", image=None, video=""), dict(prompt=[*chat("a"), dict(role="assistant", content=None, tool_calls=[dict(function=dict(name="f", arguments={}))])]),
            dict(prompt=[*chat("a"), dict(role="assistant", content=None, reasoning_content="why")])]
    assert load_rows(rows) is rows


def test_a_jsonl_that_is_not_utf_8_is_one_sentence(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(ROWS[2], ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ConfigError, match="train_dataset .*rows.jsonl is not UTF-8 .*save it as UTF-8"):
        load_rows(str(path))


def test_a_callable_that_does_not_tell_its_parameters_is_called():
    with pytest.raises(ValueError):
        inspect.signature(dict)
    with pytest.raises(ConfigError, match="train_dataset dict has no rows"):
        load_rows(dict)


def test_the_option_that_is_wrong_is_the_one_that_is_named():
    for name in ("nofile.jsonl", "/nowhere/folder"):
        with pytest.raises(ConfigError, match=f"eval_dataset.*{name}"):
            load_rows(name, "test", "eval_dataset")


@pytest.mark.parametrize("line", ['{"prompt": [', "prompt: hello", "{'prompt': 1}"])
def test_a_broken_line_of_a_jsonl_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n" + json.dumps(ROWS[1]) + "\n")
    with pytest.raises(ConfigError, match="rows.jsonl, line 3 is not JSON"):
        load_rows(str(path))


def first(count, *args):
    return list(islice(prompt_order(*args), count))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31), st.integers(1, 4))
def test_every_row_comes_exactly_once_an_epoch_with_ids_in_order(num_rows, seed, epochs):
    order = first(num_rows * epochs, num_rows, seed)
    assert [group_id for group_id, _, _ in order] == list(range(num_rows * epochs))
    assert sorted((epoch, row) for _, row, epoch in order) == [(e, r) for e in range(epochs) for r in range(num_rows)]


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31), st.integers(0, 50))
def test_starting_at_a_group_continues_the_very_same_sequence(num_rows, seed, start):
    assert first(20, num_rows, seed, start) == first(start + 20, num_rows, seed)[start:]


def test_each_epoch_has_an_order_of_its_own():
    order = [row for _, row, _ in first(20 * 10, 20, 7)]
    assert len({tuple(order[i:i + 20]) for i in range(0, 200, 20)}) == 10


def test_the_seed_decides_the_order():
    assert first(60, 20, 1) == first(60, 20, 1) != first(60, 20, 2)
