"""Compares the grouped product on a GPU with its definition, in every format, on a model's widths. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..formats.format import ROWS, FormatError, get_format
from ..kernels.operands import ACTIVATIONS, Gate
from ..kernels.product import GroupedProduct
from ..kernels.tuning import FORMATS
from ..tensor import PackedTensor, dtype_name
from .selftest import BOUNDS, GATE, banded, definition, errors, random_matrix, trimmed

# Of a row's units of roundoff: two products and the gate between them are rounded.
_ROUNDINGS = 3


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A launch with `counts` rows of each of several matrices [rows, columns], gathered by token ids or not, or of one
    `alone`; an alternating `gate` adds biases."""

    format: str
    counts: tuple[int, ...]
    gathered: bool
    gate: Gate | None
    rows: int = 64
    columns: int = 128
    alone: bool = False

    @property
    def name(self) -> str:
        gate = f" with {self.gate.activation}" if self.gate else ""
        return f"product of {sum(self.counts)} rows with {self.rows} x {self.columns} in {self.format}{gate}"


def product_cases(experts: Iterable[tuple[int, int]]) -> Iterator[ProductCase]:
    """Both launches of layers of experts, (hidden, inner) columns wide, in each format that can hold them: with few
    rows, and with as many as have larger tiles; and those of single matrices."""
    for hidden, inner in experts:
        for name in FORMATS:
            yield ProductCase(name, (3, 20), True, GATE, 2 * inner, hidden)
            yield ProductCase(name, (70,), False, None, hidden, inner)
            yield ProductCase(name, (3,), False, None, hidden, inner, alone=True)


def wrong_grouped(torch_device: torch.device, dtype: torch.dtype, experts: Iterable[tuple[int, int]]) -> str:
    """The name of the first case that computes wrong numbers, "" if none does. Raises what Triton and CUDA raise."""
    for case in product_cases(experts):
        # Negated, since every comparison with NaN is false.
        if not product_error(case, torch_device, dtype) <= _ROUNDINGS * BOUNDS[dtype_name(dtype)]:
            return case.name
    return ""


@torch.inference_mode()
def product_error(case: ProductCase, torch_device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative L2 distance of a row from the definition; NaN if a row is not written, 0 where the format
    cannot hold the matrix."""
    try:
        layout = trimmed(get_format(case.format).in_order(ROWS).layout((case.rows, case.columns), dtype_name(dtype)))
    except FormatError:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    num_out, num_rows = sum(case.counts), layout.shape[0]
    x = banded(num_out, case.columns, dtype)
    token_ids = torch.randperm(num_out, generator=generator) if case.gathered else None
    matrices = [random_matrix(layout, seed) for seed in range(len(case.counts))]
    biased = case.gate is not None and case.gate.alternating
    biases = [torch.randn(num_rows, generator=generator).to(dtype) for _ in matrices] if biased else []
    ends = list(accumulate(case.counts))
    spans = [slice(end - count, end) for end, count in zip(ends, case.counts, strict=True)]
    width = num_rows if case.gate is None else num_rows // 2
    out = torch.full((num_out, width), float("nan"), dtype=dtype, device=torch_device)
    there, ids = x.to(torch_device), None if token_ids is None else token_ids.to(torch_device)
    # Local variables keep them alive: a launch refers to all but the first by their addresses only.
    moved = [PackedTensor(each.layout, tuple(plane.to(torch_device) for plane in each.planes)) for each in matrices]
    moved_biases = [bias.to(torch_device) for bias in biases]
    product = GroupedProduct(torch_device)
    if case.alone:
        product.multiply(there, moved[0], out).run()
    else:
        product.launch(there, out, moved, moved_biases, product.rows(spans, there), ids, case.gate).run()
    rows = x if token_ids is None else x[token_ids]
    wanted = [_gated(rows[span], matrices[i], biases[i : i + 1], case.gate) for i, span in enumerate(spans)]
    return float(errors(out.cpu(), torch.cat(wanted)).max())


def _gated(rows: Tensor, matrix: PackedTensor, biases: list[Tensor], gate: Gate | None) -> Tensor:
    """rows [n, K] times the matrix by its definition, plus its bias, activated."""
    result = rows.float() @ definition(matrix).t() + sum(bias.float() for bias in biases)
    if gate is None:
        return result
    halves = (result[:, ::2], result[:, 1::2]) if gate.alternating else result.chunk(2, 1)
    return ACTIVATIONS[gate.activation](*halves)
