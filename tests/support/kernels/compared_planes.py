"""Packing, widening and transformed keys against torch's codecs and definitions, in published sizes."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st

from moedge.quant import tensor
from moedge.quant.formats import mxfp4
from moedge.quant.formats.format import ROWS, TILES, get_format
from moedge.quant.kv.codec import KeyTransform, decode, encode
from moedge.quant.kv.format import VECTOR_FORMATS
from moedge.quant.native import calls
from moedge.quant.tensor import pack
from support.kernels.relayout import from_planes

from ..published_widths import HEAD_DIMS, KV_HEADS, widths
from ..random_planes import random_planes

# Orders in which the library packs a format.
_PACKED = [("int8", ROWS), ("int4", ROWS), ("int4", TILES), ("nf4", ROWS), ("nf4", TILES),
           ("mxfp4", ROWS), ("mxfp4", TILES), ("int3", ROWS), ("int3", TILES), ("vq2", ROWS),
           ("vq2", TILES)]  # fmt: skip
_TILED = ("int8", "int8-g64-f16", "int4", "int4-g128-f16-zp", "nf4", "mxfp4", "int3", "vq2")


class Packed(NamedTuple):
    """A matrix [rows, columns] in a format and an order."""

    format: str
    order: str
    shape: tuple[int, int]
    seed: int


@st.composite
def packing_cases(draw: st.DrawFn) -> Packed:
    name, order = draw(st.sampled_from(_PACKED))
    columns = draw(widths(get_format(name).group or 1))
    # Rest of vocabularies, which end in the middle of a block.
    rows = (
        draw(st.sampled_from([1, 3, 65, 98]) | st.integers(1, 130)) if order != TILES else 64 * draw(st.integers(1, 3))
    )
    return Packed(name, order, (rows, columns), draw(st.integers(0, 99)))


def compare_packing(case: Packed) -> float:
    """0 where the library writes the bytes of the codec."""
    weight = torch.randn(case.shape, generator=torch.Generator().manual_seed(case.seed)).bfloat16()
    found = pack(weight, case.format, case.order)
    with mock.patch.object(tensor, "library_packs", return_value=False):
        wanted = pack(weight, case.format, case.order)
    same = [torch.equal(mine, theirs) for mine, theirs in zip(found.planes, wanted.planes, strict=True)]
    return 0 if all(same) else float("inf")


@st.composite
def widening_cases(draw: st.DrawFn) -> Packed:
    if draw(st.booleans()):
        return Packed("mxfp4", ROWS, (draw(st.integers(1, 70)), draw(widths(32))), draw(st.integers(0, 99)))
    name = draw(st.sampled_from(_TILED))
    columns = draw(widths(get_format(name).group or 32))
    return Packed(name, TILES, (64 * draw(st.integers(1, 3)), columns), draw(st.integers(0, 99)))


def compare_widening(case: Packed) -> float:
    """0 where the library gives the bits of the codec."""
    packed = from_planes(
        case.format, random_planes(get_format(case.format), case.shape, case.seed), "bfloat16", case.order
    )
    found, wanted = (torch.full(case.shape, 7.0).bfloat16() for _ in range(2))
    if case.order == TILES:
        assert calls.widen_tiles(packed.layout.codes, packed.planes, found)
        with mock.patch.object(calls, "widen_tiles", return_value=False):
            packed.dequantize(wanted)
    else:
        assert calls.widen_mxfp4(*packed.planes, found)
        exact = torch.empty(case.shape)
        with mock.patch.object(calls, "widen_mxfp4", return_value=False):
            mxfp4.unpack(packed.planes, exact, torch.empty(0))
        wanted.copy_(exact)
    return 0 if torch.equal(found, wanted) else float("inf")


class Keys(NamedTuple):
    """Keys [tokens, kv_heads, dim] that are transformed, encoded and decoded."""

    format: str
    tokens: int
    kv_heads: int
    dim: int
    tiled: bool


@st.composite
def key_cases(draw: st.DrawFn) -> Keys:
    heads = draw(st.sampled_from([each for each in KV_HEADS if each <= 16]))
    name = draw(st.sampled_from(["int8", "int4"]))
    return Keys(name, draw(st.integers(1, 90)), heads, draw(st.sampled_from(HEAD_DIMS)), draw(st.booleans()))


def compare_keys(case: Keys) -> float:
    """How far restored keys are from the keys, in half steps of their codes; products with queries as well."""
    generator = torch.Generator().manual_seed(case.tokens)
    k = torch.randn(case.tokens, case.kv_heads, case.dim, generator=generator)
    offsets = torch.randn(1, case.kv_heads, case.dim, generator=generator)
    transform, vectors = KeyTransform(offsets, case.tiled), VECTOR_FORMATS[case.format]
    stored = transform.keys(0, k)
    meant = (k.double() - offsets[0].double()) @ transform.rotation.double()
    turned = float((stored.double() - meant).abs().max()) / 1e-4
    restored = transform.restore(0, decode(encode(stored, vectors), vectors, torch.float32))
    groups = stored.view(*stored.shape[:-1], vectors.groups, -1)
    extent = groups.abs().amax(-1) * 2 / 254 if case.format == "int8" else (groups.amax(-1) - groups.amin(-1)) / 15
    # A code is off by half a step; a rotation moves that into other elements, and keeps its length.
    allowed = (0.53 * extent.square().mean(-1).sqrt() * case.dim**0.5) + 1e-3
    return max(turned, float(((restored - k).norm(dim=-1) / allowed).max()))
