"""The record of a KV block (`quant/kv/format.py`): sizes of well-known models, planes that do not overlap, and what
cannot be held.
"""

import subprocess
import sys

import pytest

from moedge.quant.formats.format import ALIGNMENT, FormatError
from moedge.quant.kv.format import KV_FORMATS, KVFormat, RecordLayout

# (layers, KV heads, head size) and KiB per token in bf16, int8, int4: docs/quality.md.
MODELS = {
    "Qwen3-30B-A3B": (48, 4, 128, (96, 48.75, 27.0)),
    "Mixtral-8x7B": (32, 8, 128, (128, 65.0, 36.0)),
    "gpt-oss-20b": (24, 8, 64, (48, 24.75, 15.0)),
}


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token_of_known_models(name: str, block: int) -> None:
    layers, heads, dim, wanted = MODELS[name]
    for kv_format, kib in zip(("bf16", "int8", "int4"), wanted, strict=True):
        layout = RecordLayout.of(KVFormat.parse(kv_format), heads, dim, block)
        assert layers * layout.nbytes / block / 1024 == pytest.approx(kib, rel=0.01)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 80, 16), (3, 256, 32)])
def test_planes_are_aligned_and_do_not_overlap(kv_format: str, shape: tuple[int, int, int]) -> None:
    layout = RecordLayout.of(KVFormat.parse(kv_format), *shape)
    planes = sorted((p for side in (layout.keys, layout.values) for p in side if p), key=lambda plane: plane.offset)
    end = 0
    for plane in planes:
        assert plane.offset >= end
        assert plane.offset % ALIGNMENT == 0
        end = plane.offset + plane.nbytes
    assert end <= layout.nbytes


def test_keys_and_values_may_differ() -> None:
    layout = RecordLayout.of(KVFormat.parse("int8/int4"), 2, 64, 32)
    assert (layout.keys.codes.dtype, layout.keys.codes.shape) == ("int8", (2, 32, 64))
    assert (layout.values.codes.dtype, layout.values.codes.shape) == ("uint8", (2, 32, 32))
    assert layout.keys.zeros is None
    assert layout.values.zeros is not None


def test_unknown_formats_and_odd_heads_are_refused() -> None:
    with pytest.raises(FormatError, match="use one of bf16"):
        KVFormat.parse("int2")
    with pytest.raises(FormatError, match="multiple of 2"):
        RecordLayout.of(KVFormat.parse("int4"), 1, 65, 16)


def test_sizes_need_no_torch() -> None:
    code = "import sys, moedge.quant.kv.format, moedge.runtime.kv.spec; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
