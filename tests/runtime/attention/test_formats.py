"""Attention over every KV format (`runtime/attention/torch_backend.py`) agrees with float64 over the same codes,
whatever a model asks of it.
"""

from itertools import product

import pytest
import torch

from moedge.quant.kv.format import KV_FORMATS
from moedge.runtime.attention import torch_backend
from support.kernels.attention_setup import FEATURES, LENGTHS, Setup, worst

# (query heads, KV heads, head size): every head size and group size that models have, each once.
SHAPES = [(2, 2, 64), (8, 2, 80), (5, 1, 96), (16, 1, 128), (4, 2, 256)]
FORMATS = ["fp32", "int8", "int8/int4", "int4"]
# The fast lane meets every feature, every format and every shape.
CASES = [
    pytest.param(
        kv_format, name, shape, id="-".join([kv_format, name, "x".join(map(str, shape))]),
        marks=[] if (row, size) == (at % 4, at % 5) else pytest.mark.slow,
    )
    for (row, kv_format), (at, name), (size, shape) in product(*map(enumerate, (FORMATS, FEATURES, SHAPES)))
]  # fmt: skip


@pytest.mark.parametrize(("kv_format", "name", "shape"), CASES)
def test_decode_and_prefill_agree_with_float64(kv_format: str, name: str, shape: tuple[int, int, int]) -> None:
    """Chunks of one row are decode's path, longer ones a prompt's; 130 rows cross a tile, 9 rows do not end with it.

    Of the longest sequences the last 40 rows are decoded, across the borders of chunks, windows and the tile.
    """
    for chunk, tiled, last in ((1, False, 40), (9, False, None), (200, False, None), (200, True, None)):
        setup = Setup(shape, kv_format, tiled, name)
        assert worst(setup.run(chunk, last=last), setup.wanted()) < 2e-6, (chunk, tiled)


@pytest.mark.numerics
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kv_format", ["bf16", "fp16"])
def test_narrow_native_formats_and_other_blocks(kv_format: str, block: int) -> None:
    """Arithmetic in fp32 over a cache in 16 bits: what is stored is what is attended over."""
    for chunk in (1, 50):
        setup = Setup((8, 2, 64), kv_format, False, "all", block)
        assert worst(setup.run(chunk), setup.wanted()) < 2e-6


@pytest.mark.numerics
# Features one by one are in test_torch_backend.py.
@pytest.mark.sample("all-bf16", "all-int8/int4")
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["all", "plain"])
def test_tiled_attention_has_the_same_bits_in_every_chunking(kv_format: str, name: str) -> None:
    """Rotation and codes included: neither chunks nor neighbours nor blocks are a numeric variable."""
    wanted = Setup((8, 2, 80), kv_format, True, name).run(200)
    for block, chunk, together in ((16, 1, True), (64, 5, False), (32, 50, True)):
        outs = Setup((8, 2, 80), kv_format, True, name, block).run(chunk, together)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)), (block, chunk, together)


def test_a_dropped_shift_is_seen() -> None:
    """Negative control: with sinks, scores that lack the keys' offset are wrong, so the test above can fail."""
    setup = Setup((8, 2, 64), "int8", False, "sinks")
    assert setup.pool.key_transform is not None
    setup.pool.key_transform.shifts = lambda layer, q: torch.zeros(len(q), 8)  # type: ignore[method-assign]
    assert worst(setup.run(1), setup.wanted()) > 1e-3


@pytest.mark.numerics
@pytest.mark.sample("plain-fp32-8", "all-int8-32", "all-int4-8")
@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_tokens_that_are_gathered_one_by_one(
    name: str, kv_format: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scratch for one sequence at a time the result is the same."""
    monkeypatch.setattr(torch_backend, "GATHERED_NUMEL", 0)
    runs, run = [], torch_backend.DecodeRuns._run
    monkeypatch.setattr(torch_backend.DecodeRuns, "_run", lambda *given: (runs.append(len(given[3])), run(*given))[1])
    setup = Setup((8, 2, 64), kv_format, False, name, block)
    assert worst(setup.run(1), setup.wanted()) < 2e-6
    assert set(runs) == {1}
    assert len(runs) == sum(LENGTHS)
