"""Runs the grouped product at tiny sizes in every weight format and compares it with float64. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..tensor import PackedTensor, pack
from .operands import ACTIVATIONS, Gate
from .product import GroupedProduct
from .tuning import FORMATS

# The largest difference from float64, divided by the largest result. Rounding causes at most a tenth of it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ROWS, _COLUMNS, _TOKENS = 64, 128, 9


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A launch with `counts` rows of each matrix, gathered by token ids or not; an alternating `gate` adds biases."""

    format: str
    counts: tuple[int, ...]
    gathered: bool
    gate: Gate | None

    @property
    def name(self) -> str:
        gate = f" with {self.gate.activation}" if self.gate else ""
        return f"product of {sum(self.counts)} rows in {self.format}{gate}"


def product_cases() -> Iterator[ProductCase]:
    """Both launches of a layer of experts in each format, with few and with many rows: tiles of 16 and of 64 rows."""
    for name in FORMATS:
        yield ProductCase(name, (3, 20), gathered=True, gate=Gate("silu"))
        yield ProductCase(name, (3, 20), gathered=False, gate=None)
        alternating = name != "none"
        gate = Gate("clamped_swiglu", alternating=True) if alternating else Gate("gelu_tanh")
        yield ProductCase(name, (70,), gathered=True, gate=gate)


def try_products(torch_device: torch.device, dtype: torch.dtype) -> str:
    """The name of the first case that computes wrong numbers, "" if none does. Raises what Triton and CUDA raise."""
    for case in product_cases():
        # Negated, since every comparison with NaN is false.
        if not product_error(case, torch_device, dtype) <= TOLERANCE[dtype]:
            return case.name
    return ""


@torch.inference_mode()
def product_error(case: ProductCase, torch_device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference of a launch from float64 over the same codes; NaN if rows are not written."""
    generator = torch.Generator().manual_seed(0)
    num_out = sum(case.counts)
    x = torch.randn(_TOKENS if case.gathered else num_out, _COLUMNS, generator=generator).to(dtype)
    token_ids = torch.randint(_TOKENS, (num_out,), generator=generator) if case.gathered else None
    matrices = [
        pack((torch.randn(_ROWS, _COLUMNS, generator=generator) / 8).to(dtype), case.format) for _ in case.counts
    ]
    biased = case.gate is not None and case.gate.alternating
    biases = [torch.randn(_ROWS, generator=generator).to(dtype) for _ in case.counts] if biased else []
    ends = list(accumulate(case.counts))
    spans = [slice(end - count, end) for end, count in zip(ends, case.counts, strict=True)]
    width = _ROWS if case.gate is None else _ROWS // 2
    out = torch.full((num_out, width), float("nan"), dtype=dtype, device=torch_device)
    there, ids = x.to(torch_device), None if token_ids is None else token_ids.to(torch_device)
    # Local variables keep them alive: a launch refers to all but the first by their addresses only.
    moved = [_moved(matrix, torch_device) for matrix in matrices]
    moved_biases = [bias.to(torch_device) for bias in biases]
    product = GroupedProduct(torch_device)
    product.launch(there, out, moved, moved_biases, product.rows(spans, there), ids, case.gate).run()
    rows = x.double() if token_ids is None else x.double()[token_ids]
    wanted = torch.cat(
        [_by_definition(rows[span], matrices[i], biases[i : i + 1], case.gate) for i, span in enumerate(spans)]
    )
    return float((out.cpu().double() - wanted).abs().max() / wanted.abs().max())


def _moved(matrix: PackedTensor, torch_device: torch.device) -> PackedTensor:
    """The same matrix on `torch_device`."""
    return PackedTensor(matrix.layout, tuple(plane.to(torch_device) for plane in matrix.planes))


def _by_definition(
    rows: torch.Tensor, matrix: PackedTensor, biases: list[torch.Tensor], gate: Gate | None
) -> torch.Tensor:
    """rows float64 [n, K] times the dequantized matrix, plus its bias, activated."""
    weight = matrix.dequantize(torch.empty(matrix.shape)).double()
    result = rows @ weight.T + sum(bias.double() for bias in biases)
    if gate is None:
        return result
    halves = (result[:, ::2], result[:, 1::2]) if gate.alternating else result.chunk(2, 1)
    return ACTIVATIONS[gate.activation](*halves)
