"""DeepSpeed's dialect of JSON, and where its fields stand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.document import Document, parse_yaml
from zsim.errors import InputError
from zsim.plan.hjson import parse_hjson

TEXT = """{
  // a comment with "quotes": {and braces}
  "a": 1, "b": {"c": 5e8,  # to the end of the line
    "d": [1, {"e": "x # no comment"}],
  },
  /* over
     lines */ unquoted: words without quotes, and a comma
  "f": true,
}
"""


def test_comments_commas_and_quoteless_text() -> None:
    assert parse_hjson(TEXT, "f.json").data == {
        "a": 1,
        "b": {"c": 5e8, "d": [1, {"e": "x # no comment"}]},
        "unquoted": "words without quotes, and a comma",
        "f": True,
    }


def test_places() -> None:
    places = parse_hjson(TEXT, "f.json").places
    lines = {".".join(map(str, path)): line for path, (_, line) in places.items()}
    assert lines == {"a": 3, "b": 3, "b.c": 3, "b.d": 4, "b.d.1.e": 4, "unquoted": 7, "f": 8}


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('{"a": 1\n "a": 2}', 2, "stands here twice"),
        ('{\n  "a": {"b": 1,\n "b": 2}}', 3, "stands here twice"),
        ("{\n  ...\n}", 2, "left out"),
        ('{"a": [1, 2}', 1, "not JSON"),
        ('{"a": 1', 1, "not JSON"),
        ("[1]", None, "holds no fields"),
        ("{" * 100000, None, "not JSON"),
    ],
)
def test_refused(text: str, line: int | None, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        parse_hjson(text, "f.json")
    assert refused.value.line == line or says == "not JSON"
    assert refused.value.file == "f.json"


keys = st.text("abcdefgh_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc {}[],:#/\"'\\\n", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def check_places(document: Document, text: str) -> None:
    lines = text.split("\n")

    def walk(value: object, path: tuple[str | int, ...]) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                _, line = document.places[*path, key]
                assert line is not None
                assert json.dumps(key) in lines[line - 1]
                walk(inner, (*path, key))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                walk(inner, (*path, index))

    walk(document.data, ())


@given(st.dictionaries(keys, values, max_size=5))
def test_every_json_is_read_with_the_line_of_every_field(data: dict[str, object]) -> None:
    """Also by the YAML reader, of whose language JSON is a part."""
    text = json.dumps(data, indent=1)
    for parse in (parse_hjson, parse_yaml):
        document = parse(text, "f")
        assert document.data == data
        check_places(document, text)
