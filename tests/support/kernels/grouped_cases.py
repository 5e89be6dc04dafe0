"""Random rows grouped by packed matrices, and their products by definition in float64 over the same codes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from moedge.quant.formats.format import ROWS, get_format
from moedge.quant.kernels.operands import ACTIVATIONS, Gate
from moedge.quant.kernels.product import GroupedProduct, Launch
from moedge.quant.tensor import PackedTensor, dtype_name, fill, pack_into
from support.kernels.relayout import planes_of
from support.random_planes import defined, random_planes

FORMATS = ("none", "int8", "int4", "nf4", "mxfp4", "int3", "vq2")


@dataclass(frozen=True)
class Case:
    """`counts` rows of each matrix [num_rows, num_columns]; rows come from `num_tokens` tokens, or are x's own."""

    format: str
    num_rows: int = 96
    num_columns: int = 128
    counts: tuple[int, ...] = (1, 0, 20, 16, 3)
    num_tokens: int | None = 7
    gate: Gate | None = None
    bias: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    copies: bool = False
    """Whether all matrices are copies of one, which is much faster to make."""


@dataclass
class Product:
    """A case's tensors."""

    case: Case
    x: torch.Tensor
    token_ids: torch.Tensor | None
    matrices: list[PackedTensor]
    biases: list[torch.Tensor] | None
    spans: list[slice]
    out: torch.Tensor

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> Product:
        torch.manual_seed(seed)
        num_out = sum(case.counts)
        ends = list(itertools.accumulate(case.counts))
        spans = [slice(end - count, end) for end, count in zip(ends, case.counts, strict=True) if count]
        matrices = pack_apart(case, len(spans))
        rows = case.num_tokens or num_out
        x = torch.randn(rows, case.num_columns).to(case.device, case.dtype)
        token_ids = torch.randint(rows, (num_out,), device=case.device) if case.num_tokens else None
        biases = [torch.randn(case.num_rows).to(case.device, case.dtype) for _ in spans] if case.bias else None
        width = case.num_rows // 2 if case.gate else case.num_rows
        out = torch.full((num_out, width), float("nan"), dtype=case.dtype, device=case.device)
        return cls(case, x, token_ids, matrices, biases, spans, out)

    def launch(self) -> Launch:
        product = GroupedProduct(self.x.device)
        rows = product.rows(self.spans, self.x)
        return product.launch(self.x, self.out, self.matrices, self.biases or [], rows, self.token_ids, self.case.gate)

    def reference(self, most: int | None = None) -> torch.Tensor:
        """The rows of the first `most` matrices, of all by default."""
        x = self.x.cpu().double()
        gathered = x if self.token_ids is None else x[self.token_ids.cpu()]
        parts = []
        for index, span in enumerate(self.spans[:most]):
            part = gathered[span] @ decoded(self.matrices[index]).T
            if self.biases is not None:
                part += self.biases[index].cpu().double()
            if self.case.gate is not None:
                alternating = self.case.gate.alternating
                halves = (part[:, ::2], part[:, 1::2]) if alternating else part.chunk(2, 1)
                part = ACTIVATIONS[self.case.gate.activation](*halves)
            parts.append(part)
        return torch.cat(parts)


def pack_apart(case: Case, count: int) -> list[PackedTensor]:
    """Matrices in buffers that lie apart, in no order, between bytes of all ones."""
    chosen = get_format(case.format).in_order(ROWS)
    layout = chosen.layout((case.num_rows, case.num_columns), dtype_name(case.dtype))
    matrices = []
    original: torch.Tensor | None = None
    for place in torch.randperm(count).tolist():
        arena = torch.full((layout.nbytes + 128 * (place + 1),), 0xFF, dtype=torch.uint8, device=case.device)
        begin = -arena.data_ptr() % 64 + 64
        buffer = arena[begin : begin + layout.nbytes]
        if case.copies and original is not None:
            buffer.copy_(original)
            matrices.append(PackedTensor.bind(layout, buffer))
        elif case.format in FORMATS:
            # By the host, which packs what calibrated formats have.
            weight = torch.randn(case.num_rows, case.num_columns).to(case.dtype)
            packed = torch.empty(layout.nbytes, dtype=torch.uint8)
            pack_into(weight, layout, packed)
            matrices.append(PackedTensor.bind(layout, buffer.copy_(packed)))
        else:
            matrices.append(fill(random_planes(chosen, layout.shape, place), layout, buffer))
        original = buffer
    return matrices


def decoded(matrix: PackedTensor) -> torch.Tensor:
    """[N, K] in float64, by the definition of the formats."""
    on_host = PackedTensor(matrix.layout, tuple(plane.cpu() for plane in matrix.planes))
    if matrix.layout.format == "none":
        return on_host.planes[0].double()
    return defined(get_format(matrix.layout.format), planes_of(on_host))


def relative_error(case: Case, seed: int = 0) -> float:
    product = Product.make(case, seed)
    product.launch().run()
    reference = product.reference()
    return float((product.out.cpu().double() - reference).norm() / reference.norm())
