"""Blocks of GGUF's types as floats: those of the gguf package, bit for bit, whatever their bytes are."""

import gguf
import numpy as np
import pytest
import torch

from moedge.quant.native import library
from moedge.quant.native.calls import dequantize_blocks, look_up
from moedge.quant.native.library import ENUMS

KINDS = sorted(kind.upper() for kind in ENUMS["block_type"] if kind != "byte")


def meant(blocks: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])  # type: ignore[no-any-return]


@pytest.mark.skipif(not library.available(), reason="no library of CPU kernels")
@pytest.mark.parametrize("count", [1, 3, 2880])
@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_those_of_the_gguf_package(kind: str, count: int) -> None:
    """Every byte is any byte: scales are subnormal, infinite and NaN too."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(count).integers(0, 256, (count, nbytes), dtype=np.uint8)
    found = dequantize_blocks(torch.from_numpy(blocks), kind, weights)
    assert found is not None
    wanted = meant(blocks, kind)
    assert np.array_equal(np.isnan(found.numpy()), np.isnan(wanted))
    number = ~np.isnan(wanted)
    assert np.array_equal(found.numpy()[number].view(np.int32), wanted[number].view(np.int32))


def test_other_types_are_left_to_the_gguf_package() -> None:
    assert dequantize_blocks(torch.zeros(1, 66, dtype=torch.uint8), "IQ2_XXS", 256) is None


@pytest.mark.parametrize("numbers", [16, 256])
@pytest.mark.parametrize("columns", [1, 37, 2880])
def test_bytes_mean_the_numbers_of_a_table(columns: int, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library and without it, where rows lie apart, too; NaN is a number like others."""
    generator = torch.Generator().manual_seed(columns)
    table = torch.randn(numbers, generator=generator)
    table[3] = torch.nan
    codes = torch.randint(numbers, (5, 2 * columns), dtype=torch.uint8, generator=generator)[:, :columns]
    wanted = table[codes.long()]
    torch.testing.assert_close(look_up(codes, table), wanted, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(library, "_refusals", ["a test wants torch's numbers"])
    torch.testing.assert_close(look_up(codes, table), wanted, rtol=0, atol=0, equal_nan=True)
