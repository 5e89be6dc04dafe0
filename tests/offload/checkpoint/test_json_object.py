"""Names stand once in every object of a header (`offload/checkpoint/header.py`), however it is counted; what else is
there does not matter.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.checkpoint.header import load_object

NAMES = st.text(':ab"\\{}', max_size=2)
VALUES = st.recursive(
    st.none() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(NAMES, inner), max_size=3).map(tuple),
    max_leaves=12,
)
OBJECTS = st.lists(st.tuples(NAMES, VALUES), max_size=4).map(tuple)


def written(value: Any) -> str:
    """Objects are tuples of pairs, so that names may come twice."""
    if isinstance(value, tuple):
        return "{" + ",".join(f"{json.dumps(name)}:{written(inner)}" for name, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def repeats(value: Any) -> bool:
    if isinstance(value, tuple):
        names = [name for name, _ in value]
        return len(set(names)) < len(names) or any(repeats(inner) for _, inner in value)
    return isinstance(value, list) and any(map(repeats, value))


@given(OBJECTS)
def test_an_object_is_taken_exactly_where_no_name_comes_twice(value: Any) -> None:
    text = written(value)
    if repeats(value):
        with pytest.raises(ValueError, match="times, wanted once"):
            load_object(text.encode())
    else:
        assert load_object(text.encode()) == json.loads(text)
