"""Sampling sorts logits by keys, the lower id first among equals, and reads the very bits back
(`runtime/sampling/sampler.py`).
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moedge.runtime.sampling.sampler import below_peak, first_keys, rank_keys, read_keys

FLOATS = st.floats(width=32, allow_nan=False, max_value=float(np.float32(3e38)))
# Few distinct values, both zeros and -inf among them: rows full of ties.
TIED = st.sampled_from(np.float32([-np.inf, -1e30, -1.0, -0.0, 0.0, 1.0, 1e-45, 1e30]).tolist())
ROWS = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=FLOATS | TIED)


def legal(rows):
    return rows[np.isfinite(rows.max(axis=-1))]


@given(ROWS)
def test_keys_sort_as_logits_do_with_the_lower_id_first_among_equals(rows):
    logits = torch.from_numpy(legal(rows))
    _, distances = below_peak(logits)
    _, ids = read_keys(first_keys(distances, logits.shape[-1]))
    for row, away, order in zip(logits.tolist(), distances.tolist(), ids.tolist(), strict=True):
        assert order == sorted(range(len(row)), key=lambda i: (away[i], i))
        assert order[0] == row.index(max(row))


@given(ROWS, st.integers(1, 40))
def test_the_first_keys_are_a_prefix_of_all_keys(rows, count):
    logits = torch.from_numpy(legal(rows))
    _, distances = below_peak(logits)
    count = min(count, logits.shape[-1])
    assert torch.equal(first_keys(distances, count), first_keys(distances, logits.shape[-1])[:, :count])
    assert torch.equal(first_keys(distances, logits.shape[-1]), rank_keys(distances).sort(dim=-1).values)


@given(ROWS)
def test_reading_keys_gives_back_the_very_bits_that_were_packed(rows):
    _, distances = below_peak(torch.from_numpy(legal(rows)))
    read, ids = read_keys(rank_keys(distances))
    assert torch.equal(read.view(torch.int32), distances.view(torch.int32))
    assert torch.equal(ids, torch.arange(rows.shape[-1]).expand_as(ids))


@pytest.mark.parametrize("zeros", [[0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, -0.0, 0.0], [-0.0] * 4])
def test_both_zeros_are_equal_logits(zeros):
    _, distances = below_peak(torch.tensor([zeros]))
    assert distances.view(torch.int32).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("broken", [[1.0, torch.nan], [torch.inf, 1.0], [-torch.inf, -torch.inf]])
def test_the_peak_of_a_broken_row_is_not_finite(broken):
    assert not below_peak(torch.tensor([broken]))[0].isfinite().item()
