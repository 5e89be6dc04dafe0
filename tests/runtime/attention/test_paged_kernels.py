"""Attention over pages (`runtime/attention/kernels/paged.py`) agrees with its definition in float64 over the same
codes: every format, kernel and feature.

tests/matrix/kernels.py does what is done here for every combination.
"""

import dataclasses
import itertools
import os

import pytest
import torch

from support.kernels import paged_cases as cases
from support.kernels.paged_cases import Case

INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"
DEVICE = "cpu" if INTERPRETED else "cuda"
PAIRS = list(itertools.product(cases.KINDS, cases.KINDS))
# Every pair of formats meets every kernel, and over them every feature, head size, group and block goes round.
# The fast lane takes two or three pairs with each kernel, and over the kernels every pair.
SAMPLE = [
    pytest.param(
        kernel,
        Case(
            keys,
            values,
            cases.HEAD_DIMS[(pair + turn) % 5],
            cases.GROUPS[(pair + 2 * turn) % 5],
            cases.BLOCKS[(pair + turn) % 3],
            **list(cases.FEATURES.values())[(pair * 4 + turn) % 7],
        ),
        marks=[] if pair % 4 == turn else [pytest.mark.slow],
    )
    for turn, kernel in enumerate(cases.KERNELS)
    for pair, (keys, values) in enumerate(PAIRS)
]


@pytest.mark.parametrize(("kernel", "case"), SAMPLE, ids=lambda x: x if isinstance(x, str) else f"{x.keys}-{x.values}")
def test_every_kernel_agrees_with_float64(kernel: str, case: Case) -> None:
    assert cases.check(cases.on(case, DEVICE), kernel) < 2e-6


CODED = [pair for pair in PAIRS if pair != ("native", "native")]
# What only products of codes in float16 have: offsets of codes, sizes of queries, units of values.
IN_HALVES = [
    pytest.param(
        kernel,
        Case(
            keys,
            values,
            (72, 112, 64, 128, 96, 256, 40, 80)[pair],
            (7, 1, 8, 4, 5, 2, 16, 3)[(pair + turn) % 8],
            cases.BLOCKS[(pair + turn) % 3],
            **list(cases.FEATURES.values())[(pair + turn * 3) % 7],
            dtype=torch.float16,
        ),
        marks=[] if (pair + turn) % 3 == 0 else [pytest.mark.slow],
    )
    for turn, kernel in enumerate(("decode", "split decode", "extend"))
    for pair, (keys, values) in enumerate(CODED)
]


@pytest.mark.parametrize(
    ("kernel", "case"), IN_HALVES, ids=lambda x: x if isinstance(x, str) else f"{x.keys}-{x.values}"
)
def test_codes_are_multiplied_in_float16_without_losing_its_digits(kernel: str, case: Case) -> None:
    """Queries, probabilities and results have 11 bits."""
    assert cases.check(cases.on(case, DEVICE), kernel) < 1e-3


@pytest.mark.parametrize(("keys", "values"), [("int8", "int8"), ("int4", "int4")])
def test_neither_large_queries_nor_small_values_leave_the_range_of_float16(keys: str, values: str) -> None:
    case = cases.on(Case(keys, values, 96, 7, dtype=torch.float16), DEVICE)
    cache = cases.Cache.make(case)
    # Rotated queries are float32.
    cache.q, cache.features = cache.q.float() * 2.0**18, cache.features._replace(scale=0.3 * 2.0**-18)
    cache.out = torch.full_like(cache.out, float("nan"), dtype=torch.float16)
    for plane in (cache.cached.values.scales, cache.cached.values.zeros):
        if plane is not None:
            plane.mul_(2.0**-6)
    reference = cache.reference()
    assert cases.relative_error(cache.run("decode"), reference) < 2e-3


@pytest.mark.parametrize("feature", ["window", "chunk", "softcap", "sinks", "shift"])
def test_a_feature_that_is_left_out_is_noticed(feature: str) -> None:
    case = Case("int8", "int8", lengths=((60, 1),), **cases.FEATURES[feature])
    cache = cases.Cache.make(cases.on(case, DEVICE))
    reference = cache.reference()
    cache.features = cache.features._replace(**{feature: None})
    assert cases.relative_error(cache.run("decode"), reference) > 1e-3


def test_a_stray_read_is_noticed() -> None:
    cache = cases.Cache.make(cases.on(Case("native", "native", lengths=((40, 1), (100, 1))), DEVICE))
    # One place more than what is stored, in the same block.
    cache.case = dataclasses.replace(cache.case, lengths=((41, 1), (101, 1)))
    assert cache.run("decode").isnan().all()


def test_what_lies_behind_the_window_is_seen_without_it() -> None:
    """Negative control of blocks that are given back: poison there shows as soon as a kernel forgets the window."""
    cache = cases.Cache.make(cases.on(Case("native", "native", lengths=((60, 1), (100, 1)), window=20), DEVICE))
    expected = cache.run("decode").clone()
    for table, (past, _) in zip(cache.tables, cache.case.lengths, strict=True):
        for plane in (cache.cached.keys.codes, cache.cached.values.codes):
            plane[table[: (past - 19) // cache.case.block]] = float("nan")
    assert torch.equal(cache.run("decode"), expected)
    cache.features = cache.features._replace(window=None)
    assert cache.run("decode").isnan().all()


@pytest.mark.sample("int4")
@pytest.mark.parametrize("keys", ["native", "int4"])
def test_a_row_has_the_same_bits_in_every_chunk(keys: str) -> None:
    """Extend cuts rows and keys at multiples of their position: what `--deterministic` builds on."""
    asked = Case(keys, "int8", kv_heads=1, window=30)
    whole = cases.Cache.make(cases.on(dataclasses.replace(asked, lengths=((0, 37),)), DEVICE))
    expected = whole.run("extend").clone()
    for past in (3, 17, 36):
        part = cases.Cache.make(cases.on(dataclasses.replace(asked, lengths=((past, 37 - past),)), DEVICE))
        part.cached, part.tables, part.q, part.out = whole.cached, whole.tables, whole.q[past:], whole.out[past:]
        assert torch.equal(part.run("extend"), expected[past:]), past


def test_bfloat16_rows_lose_no_more_than_their_own_rounding() -> None:
    """The interpreter computes in float32 (its bfloat16 is wrong); a GPU computes in bfloat16."""
    case = cases.on(Case("int4", "native", dtype=torch.bfloat16, native=torch.bfloat16), DEVICE)
    for kernel in ("decode", "extend"):
        assert cases.check(case, kernel) < (4e-3 if INTERPRETED else 2e-2)
