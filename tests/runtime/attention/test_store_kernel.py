"""The store kernel (`runtime/attention/kernels/paged.py`) writes the bits that `quant/kv/codec.py` writes, where it is
told to and nowhere else.
"""

import os

import pytest
import torch

from moedge.quant.kv.codec import decode, encode
from moedge.quant.kv.format import VECTOR_FORMATS
from moedge.runtime.attention.kernels.launch import Cached, store_launch
from support.kernels import paged_cases as cases
from support.kernels.paged_cases import Case

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] != "0" else "cuda"
NUM_BLOCKS, TOKENS = 5, 37
VECTORS = {"native": "fp32", "int8": "int8", "int4": "int4"}


def make_tokens(case: Case) -> torch.Tensor:
    """[T, H, D] as the model hands it over, heads first in memory; with constant, zero, tiny and huge rows."""
    torch.manual_seed(3)
    x = torch.randn(case.kv_heads, TOKENS, case.head_dim).transpose(0, 1)
    x[1] = 0.0
    x[2] = 1.25
    x[3] = torch.linspace(1e-9, 2e-9, case.head_dim)
    x[4] *= 1000
    x[5, 0, 3] = 60000.0
    return x.to(case.dtype)


def stored(side: torch.Tensor, slots: torch.Tensor, case: Case, is_code: bool) -> torch.Tensor:
    """What lies in the slots: [n, H, C] or [n, H, G]."""
    blocks, places = slots // case.block, slots % case.block
    return side[blocks, :, places] if is_code else side[blocks, :, :, places]


def run(case: Case, x: torch.Tensor) -> tuple[Cached, torch.Tensor, torch.Tensor]:
    """Stores x as keys and as values; returns the planes and the slots that were written, and those that were not."""
    sides = [cases.random_side(case, kind, [], NUM_BLOCKS) for kind in (case.keys, case.values)]
    cached = Cached(*sides, case.block)
    order = torch.randperm(NUM_BLOCKS * case.block)
    slots = order[: len(x)].clone()
    # Padding is not stored.
    slots[7] = -1
    store_launch(x.to(DEVICE), x.to(DEVICE), cached, slots.to(DEVICE)).run()
    return cached, slots, order[len(x) :]


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize(("head_dim", "block", "dtype"), [(64, 16, torch.float32), (80, 32, torch.bfloat16)])
def test_codes_are_those_of_the_codec(kind: str, head_dim: int, block: int, dtype: torch.dtype) -> None:
    case = Case(kind, "int8", head_dim, block=block, dtype=dtype, device=DEVICE)
    x = make_tokens(case)
    cached, slots, untouched = run(case, x)
    for side, vectors in ((cached.keys, VECTOR_FORMATS[VECTORS[kind]]), (cached.values, VECTOR_FORMATS["int8"])):
        coded = encode(x, vectors)
        for plane, expected in zip(side[:3], coded, strict=True):
            if plane is None:
                assert expected is None
                continue
            is_code = plane is side.codes
            found = stored(plane.cpu(), slots[slots >= 0], case, is_code)
            assert torch.equal(found, expected[slots >= 0])
            rest = stored(plane.cpu(), untouched, case, is_code).contiguous()
            assert (rest.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(kind: str, strange: float) -> None:
    case = Case(kind, kind, device=DEVICE)
    x = make_tokens(case)
    x[9, 1, 40] = strange
    cached, slots, _ = run(case, x)
    planes = [None if plane is None else plane.cpu() for plane in cached.keys[:3]]
    coded = [None if p is None else stored(p, slots[9:10], case, p is planes[0]) for p in planes]
    back = decode(type(encode(x, VECTOR_FORMATS[kind]))(*coded), VECTOR_FORMATS[kind], torch.float32)
    assert not back[0, 1].isfinite().all()
    assert back[0, 0].isfinite().all()
