"""Seam 3: linear layers that are bound to shards, layers that wait for their shards, and modules around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from ...quant.matmul.matmul import ParallelMatmul
from ...quant.matmul.steps import NormWeight
from ...quant.scratch import TILE
from ...quant.tensor import PackedTensor


class PackedLinear(nn.Module):
    """Replaces an nn.Linear; usable while `packed` is bound to bytes in memory.

    Its output is zero for padding rows; only the output head, which gets none, is not `per_token`. Rows of x are never
    rounded to int8 where it is `exact`.
    """

    packed: PackedTensor

    def __init__(
        self, bias: nn.Parameter | None, compute: ParallelMatmul, per_token: bool = True, exact: bool = False
    ) -> None:
        super().__init__()
        self.bias = bias
        self.compute = compute
        self.per_token = per_token
        self.exact = exact

    @property
    def weight(self) -> PackedWeight:
        """For modules that multiply with it themselves and add the bias later."""
        return PackedWeight(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.compute.in_floats() if self.exact else nullcontext():
            return self.product(x, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K] -> [..., N], with another bias than its own."""
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        count = self.compute.real_rows(num_rows) if self.per_token else num_rows
        if count == num_rows:
            out = self.compute.linear(rows, self.packed, bias)
        else:
            out = rows.new_empty(num_rows, self.packed.shape[0])
            out[count:].zero_()
            self.compute.linear(rows[:count], self.packed, bias, out=out[:count])
        return out.view(*x.shape[:-1], out.shape[-1])


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The matrix [N, K] of a packed linear, as an operand."""

    linear: PackedLinear

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K, T] -> [..., N, T]."""
        return self.linear.product(x.transpose(-1, -2), None).transpose(-1, -2)


class TiledRows(nn.Module):
    """Runs a row-wise module on TILE of the rows [T, D] at a time, the last ones padded with zeros.

    With a fixed number of rows, the bits of a row's product depend only on that row and its index; products of 32 and
    of 300 rows differ, even in multiples of a tile.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        # MoE blocks read corrections and scales of their router.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        """`others`, such as a router's corrections, are the same for every tile."""
        rows = x.reshape(-1, x.shape[-1])
        outputs = [self._tile(rows[begin : begin + TILE], others) for begin in range(0, len(rows), TILE)]
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    def _tile(self, rows: torch.Tensor, others: tuple[Any, ...]) -> Any:
        tile = rows.new_zeros(TILE, rows.shape[1])
        tile[: len(rows)] = rows
        out = self.inner(tile, *others)
        if isinstance(out, torch.Tensor):
            return out[: len(rows)]
        return tuple(part[: len(rows)] for part in out)


class ArrivingLayers(nn.ModuleList):
    """The decoder layers; iteration yields a layer once its shard has arrived, and frees the shard at the next step.

    transformers' own `for layer in self.layers` drives the stream, so no hook is needed. With `mtp` the last layer is a
    head, which comes by `head` alone.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        arrivals: Callable[[], Iterator[int]],
        mtp: bool = False,
        leave_head: Callable[[], None] = lambda: None,
    ) -> None:
        """`leave_head` lets the head's bytes come no more."""
        super().__init__(layers)
        self._arrivals = arrivals
        self.leave_head = leave_head
        self._passing: Iterator[int] = iter(())
        self.count = len(self) - mtp

    def __iter__(self) -> Iterator[Any]:
        self._passing = self._arrivals()
        for index in islice(self._passing, self.count):
            yield self._modules[str(index)]
        if self.count == len(self):
            deque(self._passing, maxlen=0)

    def head(self) -> Any:
        """The MTP head, usable until the layers of the next pass are requested, however often."""
        # What comes behind it would free it.
        next(self._passing, None)
        self._passing = iter(())
        return self._modules[str(self.count)]

    def __getitem__(self, index: Any) -> Any:
        # transformers slices off layers that a config skips; moedge's configs skip none.
        return self if isinstance(index, slice) else super().__getitem__(index)


# Elements that a norm computes at a time. transformers' norms are five operations with float32 temporaries of all rows:
# 4 MiB here, where the heap keeps such buffers, and less where it returns large buffers to the system
# (offload/memory.py). Measured over 4,096 tokens of 2,048 elements (bench/results/log.md).
PIECE_NUMEL = 1 << 20
SMALL_PIECE_NUMEL = 1 << 17


def norm_in_pieces(model: nn.Module, most: int = PIECE_NUMEL) -> int:
    """Makes every row-wise norm of `model` compute at most `most` elements at once; returns the number of such norms.

    A row's bits stay the same, because it is computed alone. Modules keep their names and parameters.
    """
    norms = [module for module in model.modules() if is_row_wise_norm(module)]
    for norm in norms:
        norm.forward = _in_pieces(norm.forward, most)
    return len(norms)


def is_row_wise_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the last axis, by its name (families have their own classes) and parameters."""
    name = type(module).__name__
    if (
        not name.endswith("Norm")
        or name.startswith(("Batch", "Group", "Instance"))
        or any(True for _ in module.children())
    ):
        return False
    return all(parameter.dim() == 1 for parameter in module.parameters())


def fuse_norms(model: nn.Module) -> int:
    """Makes every plain RMSNorm of `model` one kernel of a device, where transformers' are eight; returns how many.

    Each row is then rounded once, behind its weights, which have the dtype of what is computed.
    """
    # Gated norms take more than rows.
    rows_alone = [module for module in model.modules() if len(signature(module.forward).parameters) == 1]
    norms = [module for module in rows_alone if is_row_wise_norm(module)]
    found = [(norm, same) for norm in norms if (same := as_rms_norm(norm)) and not same.plus_one]
    for norm, same in found:
        norm.forward = _by_one_kernel(norm.forward, same)
    return len(found)


def _by_one_kernel(norm: Callable[..., torch.Tensor], same: NormWeight) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        # With weights of another dtype torch falls back to several kernels, and gives the dtype of both.
        return norm(x) if x.dtype != same.weight.dtype else rms_norm(x, same.weight.shape, same.weight, same.eps)

    return forward


def as_rms_norm(norm: nn.Module) -> NormWeight | None:
    """The weight and the epsilon with which a row-wise norm is an RMSNorm; None where it is another norm."""
    weight: torch.Tensor | None = getattr(norm, "weight", None)
    eps = next(
        (value for name in ("variance_epsilon", "eps") if (value := getattr(norm, name, None)) is not None), None
    )
    if weight is None or eps is None:
        return None
    x = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    expected = norm(x).double()
    plain = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    for plus_one in (False, True):
        if close(plain * (weight.double() + plus_one), expected):
            return NormWeight(weight.detach(), float(eps), plus_one)
    return None


# The relative L2 distance that rounding to bfloat16 may make.
TOLERANCE = 0.02


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether numbers differ by no more than rounding; NaN differs."""
    return bool((actual.double() - expected.double()).norm() <= TOLERANCE * expected.double().norm())


def _in_pieces(norm: Callable[..., torch.Tensor], most: int) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if others or named or x.numel() <= most or not x.is_contiguous():
            return norm(x, *others, **named)
        rows = x.view(-1, x.shape[-1])
        pieces = iter(torch.split(rows, max(1, most // x.shape[-1])))
        first = norm(next(pieces))
        out = first.new_empty(rows.shape)
        begin = len(first)
        out[:begin] = first
        for piece in pieces:
            out[begin : begin + len(piece)] = norm(piece)
            begin += len(piece)
        return out.view(x.shape)

    return forward


class HostEmbedding(nn.Module):
    """Keeps the embedding in host memory and copies to the device only the rows that a pass gathers."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self._device = device

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.inner(token_ids)
        return rows.to(self._device)


def move_resident(model: PreTrainedModel, device: torch.device) -> None:
    """Moves norms, routers, biases and buffers to `device`. The output head is bound later and is not moved."""
    embedding = model.get_input_embeddings()
    staying = {*embedding.modules(), model.get_output_embeddings()}
    for module in model.modules():
        if module in staying:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    model.set_input_embeddings(HostEmbedding(embedding, device))
