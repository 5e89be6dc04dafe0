"""The tokens that a sequence has seen, each once with its count in the answer (`runtime/sampling/draw.py`)."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.sampling.draw import TokenHistory

TOKENS = st.lists(st.integers(0, 30), max_size=60)


@given(TOKENS, TOKENS)
def test_every_seen_token_appears_once_with_its_output_count(prompt, output):
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    ids, counts = history.ids.tolist(), history.counts.tolist()
    assert len(ids) == len(set(ids))
    assert set(ids) == {*prompt, *output}
    assert {i: n for i, n in zip(ids, counts, strict=True) if n} == Counter(output)


def test_what_was_read_does_not_change_with_later_tokens():
    history = TokenHistory([3, 1])
    ids, counts = history.ids, history.counts
    for token_id in (1, 7, 7):
        history.append(token_id)
    assert (ids.tolist(), counts.tolist()) == ([1, 3], [0, 0])
    assert (history.ids.tolist(), history.counts.tolist()) == ([1, 3, 7], [1, 0, 2])


def test_an_empty_history_is_two_empty_arrays():
    history = TokenHistory([])
    assert history.ids.dtype == np.int64
    assert history.counts.dtype == np.int32
    assert len(history.ids) == len(history.counts) == 0
