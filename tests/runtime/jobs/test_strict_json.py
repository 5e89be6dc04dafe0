"""Cases I1 to I6 of the failure table: what one line of bytes may be (`runtime/rows/row.py`)."""

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.rows.row import MAX_DEPTH, MAX_NUMBER_CHARS, ErrorCode, InvalidRow, parse_object

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
# What the reference parser lets pass.
STRICTER = {ErrorCode.DUPLICATE_KEY, ErrorCode.NON_FINITE_NUMBER, ErrorCode.LONE_SURROGATE}
json_objects = st.dictionaries(st.text(), json_values, max_size=5)


def code_of(line: bytes) -> ErrorCode:
    with pytest.raises(InvalidRow) as caught:
        parse_object(line)
    assert len(caught.value.failure.message) < 1_000
    assert caught.value.failure.message.isprintable()
    return caught.value.failure.code


@given(json_objects, st.booleans())
def test_i1_every_object_that_json_can_write_is_read_back(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60) | json_objects.map(lambda value: json.dumps(value).encode()), st.data())
def test_i1_damaged_lines_get_the_verdict_of_the_reference_parser(line: bytes, data: st.DataObject) -> None:
    """Whatever is accepted here is accepted there with the same value; whatever fails there fails here."""
    cut = data.draw(st.integers(0, len(line)))
    line = line[:cut] + data.draw(st.binary(max_size=2)) + line[cut + data.draw(st.integers(0, 2)) :]
    try:
        expected = json.loads(line.decode("utf-8"))
    except ValueError:
        code_of(line)
        return
    if not isinstance(expected, dict):
        assert code_of(line) in STRICTER | {ErrorCode.INVALID_JSON_LINE}
        return
    try:
        found = parse_object(line)
    except InvalidRow:
        assert code_of(line) in STRICTER
    else:
        assert found == expected


@pytest.mark.parametrize(
    "line", [b"{", b'{"a":1', b"[]", b"3", b'"x"', b"null", b'{"a":1} {"b":2}', b"{'a':1}", b"{a:1}", b'{"a":"\n"}']
)
def test_i1_what_is_no_object_is_an_invalid_line(line: bytes) -> None:
    assert code_of(line) is ErrorCode.INVALID_JSON_LINE


@given(json_objects.filter(bool), st.data())
def test_i2_a_repeated_key_is_refused_at_any_depth(value: dict[str, object], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(value)))
    inner = json.dumps(value)[:-1] + f",{json.dumps(key)}:0}}"
    assert code_of(inner.encode()) is ErrorCode.DUPLICATE_KEY
    assert code_of(b'{"a":[' + inner.encode() + b"]}") is ErrorCode.DUPLICATE_KEY


def test_i2_keys_are_compared_after_their_escapes() -> None:
    assert code_of(rb'{"a":1,"\u0061":2}') is ErrorCode.DUPLICATE_KEY


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 398 + ".0"])
def test_i3_numbers_that_are_not_finite_are_refused(literal: str) -> None:
    assert code_of(f'{{"a":[{literal}]}}'.encode()) is ErrorCode.NON_FINITE_NUMBER


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_i3_every_finite_float_is_kept_exactly(value: float) -> None:
    read = parse_object(f'{{"a":{value!r}}}'.encode())["a"]
    assert read == value
    assert math.copysign(1, read) == math.copysign(1, value)


@pytest.mark.parametrize("depth", [65, 100, 1_000, 100_000, 300_000])
@pytest.mark.parametrize("opener", ['{"a":', "[", '[{"[":'])
def test_i4_depth_bombs_are_refused(depth: int, opener: str) -> None:
    assert code_of(b'{"a":' + (opener * depth).encode()) is ErrorCode.TOO_DEEP


@given(st.integers(1, MAX_DEPTH + 20), st.text(alphabet='[]{}"\\a', max_size=80))
def test_i4_the_limit_counts_brackets_outside_of_strings_only(depth: int, text: str) -> None:
    lists = depth - 1
    line = f'{{"k":{json.dumps(text)},"a":{"[" * lists}0{"]" * lists}}}'.encode()
    if depth > MAX_DEPTH:
        assert code_of(line) is ErrorCode.TOO_DEEP
    else:
        assert parse_object(line)["k"] == text


def test_i4_wide_is_not_deep() -> None:
    assert len(parse_object(b'{"a":[' + b"[],{}," * 50_000 + b"[]]}")["a"]) == 100_001


def test_i4_the_verdict_does_not_depend_on_the_callers_stack() -> None:
    line = f'{{"a":{"[" * 60}{"]" * 60}}}'.encode()

    def call_at(frames: int) -> object:
        return call_at(frames - 1) if frames else parse_object(line)

    assert call_at(sys.getrecursionlimit() - 250) == parse_object(line)


@pytest.mark.parametrize("literal", ["9" * 5_000, "-" + "9" * 5_000, "0." + "1" * 5_000, "1e" + "0" * 5_000])
def test_i5_numbers_of_thousands_of_digits_are_refused(literal: str) -> None:
    assert code_of(f'{{"a":{literal}}}'.encode()) is ErrorCode.NUMBER_TOO_LONG


def test_i5_long_integers_below_the_limit_are_exact() -> None:
    digits = "9" * MAX_NUMBER_CHARS
    assert parse_object(f'{{"a":{digits}}}'.encode())["a"] == int(digits)


@pytest.mark.parametrize("data", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80"])
def test_i6_invalid_utf8_is_refused(data: bytes) -> None:
    assert code_of(b'{"a":"' + data + b'"}') is ErrorCode.INVALID_UTF8


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00", rb"\uD83D", rb"\ude00\ud83d", rb"x\uDBFFy"])
def test_i6_lone_surrogates_are_refused_in_values_and_keys(text: bytes) -> None:
    assert code_of(b'{"a":"' + text + b'"}') is ErrorCode.LONE_SURROGATE
    assert code_of(b'{"' + text + b'":[1]}') is ErrorCode.LONE_SURROGATE


def test_i6_a_pair_of_surrogates_and_an_escaped_backslash_are_text() -> None:
    assert parse_object(rb'{"a":"\ud83d\ude00","b":"\\ud800"}') == {"a": "\N{GRINNING FACE}", "b": "\\ud800"}


def test_i6_an_escaped_nul_is_text_and_a_raw_one_is_not() -> None:
    assert parse_object(rb'{"a":"\u0000"}') == {"a": "\0"}
    assert code_of(b'{"a":"\0"}') is ErrorCode.INVALID_JSON_LINE


def test_the_place_of_a_raw_control_character_is_named() -> None:
    with pytest.raises(InvalidRow, match=r"^Invalid control character at column 7$"):
        parse_object(b'{"a":"\0"}')
