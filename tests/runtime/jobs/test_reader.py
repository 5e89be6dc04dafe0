"""The reader as a whole: a row or an error for every line, and never an exception. Case I9 of the failure table."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moedge.runtime.rows.answer_formats import Answers
from moedge.runtime.rows.fields import FIELDS, IGNORED, UNSUPPORTED
from moedge.runtime.rows.row import ErrorCode, Row, RowFailure, Severity

Read = Callable[..., list[Row | RowFailure]]
WHOLE_FILE = {ErrorCode.UNSUPPORTED_ENCODING, ErrorCode.DAMAGED_GZIP, ErrorCode.DAMAGED_ZSTD}

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
names = st.sampled_from([*FIELDS, *IGNORED, *UNSUPPORTED, "x-note", "temprature"]) | st.text(max_size=6)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]) | values, "content": values})
bodies = st.dictionaries(names, values, max_size=4).flatmap(
    lambda body: st.fixed_dictionaries(
        {}, optional={"messages": st.lists(message, max_size=2) | values, "prompt": st.text(max_size=5) | values}
    ).map(lambda prompt: body | prompt)
)
urls = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]) | values
batch_lines = st.fixed_dictionaries(
    {
        "custom_id": st.text(max_size=3) | values,
        "method": st.just("POST") | values,
        "url": urls,
        "body": bodies | values,
    }
)
short_lines = st.tuples(bodies, st.dictionaries(st.just("id"), values)).map(lambda pair: pair[0] | pair[1])
lines = (batch_lines | short_lines | values).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)


def not_blank(data: bytes) -> int:
    return sum(bool(line.strip(b" \t\r")) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))


@given(st.lists(lines, max_size=6).map(b"\n".join))
@example(b"\x1f\x8b")
@example(b"(\xb5/\xfd\n\0")
@example(b"\xff\xfe{\0")
def test_any_bytes_give_one_row_or_error_per_line_that_can_be_answered(read: Read, data: bytes) -> None:
    rows = read(data)
    assert [row.index for row in rows] == list(range(len(rows)))
    if not any(isinstance(row, RowFailure) and row.code in WHOLE_FILE for row in rows):
        assert len(rows) == not_blank(data)
    answers = Answers("m", 0, lambda token_id: ("", None))
    for row in rows:
        if isinstance(row, RowFailure):
            assert row.message.isprintable()
            line = answers.failure(row)
            assert line.isascii()
            json.loads(line)


def _batch(custom_id: object) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


def _lines(*objects: object) -> bytes:
    return b"\n".join(json.dumps(item).encode() for item in objects)


def test_i9_rows_without_an_id_are_named_by_their_line(read: Read) -> None:
    rows = read(b"\n" + _lines({"prompt": "a"}, _batch(None), {"id": None, "prompt": "a"}))
    assert [row.id for row in rows] == ["line-2", "line-3", "line-4"]
    assert [row.index for row in rows] == [0, 1, 2]
    assert all(isinstance(row, Row) for row in rows)


def test_i9_the_later_of_two_equal_ids_is_the_error_and_names_the_first(read: Read) -> None:
    first, other, later, form = read(_lines(_batch("a"), _batch("b"), _batch("a"), {"id": "a", "prompt": "x"}))
    assert isinstance(first, Row)
    assert isinstance(other, Row)
    for row in (later, form):
        assert isinstance(row, RowFailure)
        assert row.id == "a"
        assert row.code is ErrorCode.DUPLICATE_ID
        assert "line 1" in row.message


def test_i9_a_given_id_may_not_take_the_name_of_an_unnamed_line(read: Read) -> None:
    _, later = read(_lines({"prompt": "a"}, {"id": "line-1", "prompt": "b"}))
    assert isinstance(later, RowFailure)
    assert later.code is ErrorCode.DUPLICATE_ID


@pytest.mark.parametrize("custom_id", [7, 1.5, True, [], {}, "", "x" * 513, "x" * 60_000])
def test_i9_what_is_no_id_refuses_the_job(read: Read, custom_id: object) -> None:
    (row,) = read(_lines(_batch(custom_id)))
    assert isinstance(row, RowFailure)
    assert row.code is ErrorCode.INVALID_ID
    assert row.code.severity is Severity.LINE
    assert row.id == "line-1"


@given(st.lists(st.text(min_size=1, max_size=4)))
def test_i9_distinct_ids_stay_distinct_and_equal_ones_are_all_found(read: Read, ids: list[str]) -> None:
    rows = read(_lines(*(_batch(item) for item in ids)))
    kept = [row.id for row in rows if isinstance(row, Row)]
    assert sorted(kept) == sorted(set(ids))


def test_a_bad_row_keeps_its_id_and_its_form_for_the_answer(read: Read) -> None:
    lines = _lines({"id": "s", "prompt": "a", "echo": True}, _batch("b") | {"url": "/v1/embeddings"})
    short, batch, unreadable = read(lines + b"\n{")
    assert isinstance(short, RowFailure)
    assert (short.id, short.short, short.param) == ("s", True, "echo")
    assert isinstance(batch, RowFailure)
    assert (batch.id, batch.short, batch.code) == ("b", False, ErrorCode.UNKNOWN_URL)
    assert isinstance(unreadable, RowFailure)
    assert (unreadable.id, unreadable.short) == ("line-3", False)


def test_an_unreadable_line_is_answered_in_the_form_of_the_line_before_it(read: Read) -> None:
    start, _, after_short, _, after_batch = read(
        b"{\n" + _lines({"prompt": "a"}) + b"\n{\n" + _lines(_batch("b")) + b"\n{"
    )
    assert [row.short for row in (start, after_short, after_batch)] == [False, True, False]


def test_a_too_long_line_is_an_error_between_two_good_ones(read: Read) -> None:
    data = _lines({"prompt": "a"}, {"prompt": "x" * 200}, {"prompt": "b"})
    good, bad, also_good = read(data, max_line_nbytes=100)
    assert isinstance(good, Row)
    assert isinstance(also_good, Row)
    assert isinstance(bad, RowFailure)
    assert bad.code is ErrorCode.LINE_TOO_LONG
