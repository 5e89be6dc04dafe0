"""What parts of an engine's layers return beside the definition of their formats, for the same input.

The definition is torch's, in float32: weights as their codes and scales say, activations rounded to int8 where the job
rounds them, and attention over the codes of the cache. So a part differs by the rounding of the job's dtype alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...moe.expert import ExpertGroups, ResidentExpert
from ...quant.kv.codec import KeyTransform
from ...quant.matmul.selftest import BOUNDS, definition, errors, rounded
from ...quant.tensor import PackedTensor, dtype_name
from ..attention.blocks import BlockAttention
from ..attention.latent import LatentAttention
from ..attention.protocol import AttentionBackend, AttentionCall
from ..attention.selftest import ROUNDINGS
from ..attention.torch_backend import TorchAttention
from ..engine.sequence import Batch
from ..kv.cache import KVCache
from ..model.experts_seam import PackedExperts
from ..model.runner import ModelRunner
from ..model.weights_seam import PackedLinear

# What rounding to the dtype may change, as a multiple of what a random change of one unit of roundoff does.
MOST_ROUNDINGS = 8
# Products after one another in experts, with what is rounded between them.
_EXPERT_ROUNDINGS = 3
# Random changes of the queries of a pass.
_CHANGES = 4
# Rows of a pass that a part's product is compared for, and passes of different sizes in which it is.
_ROWS, _SIZES = 8, 2


class Part(NamedTuple):
    """A part of a layer, by its path in it, and the greatest relative L2 error of a row; `bound` is what its format and
    the dtype allow. `layer` is None for the output head."""

    layer: int | None
    name: str
    error: float
    bound: float

    @property
    def within(self) -> bool:
        # An error may be NaN.
        return self.error <= self.bound

    def __str__(self) -> str:
        where = "the output head" if self.layer is None else f"layer {self.layer}, {self.name}"
        return f"{where}: differs by {self.error:.1e} from the definition of its format, wanted {self.bound:.1e}"


class PartErrors:
    """Compares the parts of a model as its passes compute them; `parts` has the worst of each, in their order."""

    def __init__(self, runner: ModelRunner, dtype: torch.dtype) -> None:
        self._found: dict[tuple[int | None, str], Part] = {}
        self._sizes: dict[tuple[int | None, str], set[int]] = {}
        self._bound, self.roundoff = BOUNDS[dtype_name(dtype)], torch.finfo(dtype).eps / 2
        assert runner.attention is not None
        runner.attention = _WatchedAttention(self, runner.attention)
        for index, layer in enumerate(runner.layers):
            for name, module in layer.named_modules():
                if isinstance(module, PackedLinear):
                    module.register_forward_hook(partial(self._compare_linear, index, name))
                elif isinstance(module, PackedExperts):
                    module.source = _WatchedExperts(module)
                    module.register_forward_hook(partial(self._compare_experts, index, name.removesuffix(".packed")))
        runner.head.register_forward_hook(partial(self._compare_linear, None, ""))

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._found.values())

    def add(
        self, layer: int | None, name: str, found: Tensor, wanted: Tensor, roundings: int = 1, least_bound: float = 0.0
    ) -> None:
        """Compares rows of a part, whose bound is `least_bound` or more; a NaN among errors is the worst."""
        error = float(errors(found, wanted).max())
        before = self._found.get((layer, name))
        if before is None or not error <= before.error:
            self._found[layer, name] = Part(layer, name, error, max(roundings * self._bound, least_bound))

    def _is_new(self, layer: int | None, name: str, rows: int) -> bool:
        """Whether the part is compared in a pass of so many rows, which takes longer than the pass."""
        sizes = self._sizes.setdefault((layer, name), set())
        new = rows not in sizes and len(sizes) < _SIZES
        sizes.add(rows)
        return new

    def _compare_linear(self, layer: int | None, name: str, linear: Any, given: Any, out: Tensor) -> None:
        rows = given[0].reshape(-1, given[0].shape[-1])
        if len(rows) and self._is_new(layer, name, len(rows)):
            chosen = torch.linspace(0, len(rows) - 1, min(_ROWS, len(rows))).long()
            wanted = _product(rows, chosen, linear.packed, linear.bias, linear.compute)
            self.add(layer, name, out.reshape(len(rows), -1)[chosen], wanted)

    def _compare_experts(self, layer: int, name: str, module: Any, given: Any, out: Tensor) -> None:
        tokens, sums = module.source.sums(given[2])
        if self._is_new(layer, name, len(given[0])):
            self.add(layer, name, out[tokens], sums, _EXPERT_ROUNDINGS)


def _product(x: Tensor, chosen: Tensor, packed: PackedTensor, bias: Tensor | None, compute: Any) -> Tensor:
    """The product of the rows `chosen` of x by the definition, float32."""
    wanted = rounded(x[chosen], compute.rounded_columns(x, packed)) @ definition(packed).t()
    return wanted if bias is None else wanted + bias.float()


class _WatchedExperts:
    """Passes on the experts of a source, and computes some tokens by the definition while their weights are there."""

    def __init__(self, module: PackedExperts) -> None:
        self._source, self._module = module.source, module
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._ids = self._missing = torch.empty(0)
        self._tokens = torch.empty(0, dtype=torch.long)
        module.register_forward_pre_hook(self._begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def _begin(self, module: nn.Module, given: Any) -> None:
        self._outputs, self._ids = {}, given[1]
        self._missing = given[0].new_full(given[0].shape[1:], torch.nan, dtype=torch.float32)
        self._tokens = torch.linspace(0, len(given[0]) - 1, min(_ROWS, len(given[0]))).long()

    def fetch(self, groups: ExpertGroups, hidden: Tensor, rows: Tensor) -> Iterator[list[ResidentExpert]]:
        for residents in self._source.fetch(groups, hidden, rows):
            for one in residents:
                self._compute(one, groups, hidden)
            yield residents

    def _compute(self, one: ResidentExpert, groups: ExpertGroups, hidden: Tensor) -> None:
        token_ids = groups.token_ids[groups.rows(one.expert_id)]
        chosen = torch.isin(token_ids, self._tokens).nonzero().flatten()
        if not len(chosen):
            return
        body, compute, rows = self._module.body, self._module.compute, hidden[token_ids]
        up, up_bias, down, down_bias = one.weights.operands
        inner = body.activate(_product(rows, chosen, up, up_bias, compute)).to(hidden.dtype)
        # As many rows as the kernel has decide whether they are rounded.
        whole = inner.new_zeros(len(rows), inner.shape[1])
        whole[chosen] = inner
        out = _product(whole, chosen, down, down_bias, compute)
        out = out if body.norm is None else body.norm(out.to(hidden.dtype)).float()
        for token, row in zip(token_ids[chosen].tolist(), out, strict=True):
            self._outputs[token, one.expert_id] = row

    def sums(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Some tokens [n] and the sums of their experts [n, D], by `weights` [T, A]; NaN where one is missing."""
        sums = [
            sum(
                self._outputs.get((token, expert_id), self._missing) * weight
                for expert_id, weight in zip(self._ids[token].tolist(), weights[token].tolist(), strict=True)
            )
            for token in self._tokens.tolist()
        ]
        return self._tokens, torch.stack(sums)


class _WatchedAttention:
    """Compares an attention backend with torch's own in float32, over the same cache.

    Where queries and keys are long, a rounded query changes the result by more than a fixed bound: it may differ by
    several times what torch's changes by if queries change at random by at most a unit of roundoff, the most of a few
    times: where two keys are nearly as like a query, few changes show by how much.
    """

    def __init__(self, parts: PartErrors, backend: AttentionBackend) -> None:
        self._parts, self._backend = parts, backend
        inner: Any = backend
        kind = type(backend) if isinstance(backend, LatentAttention | BlockAttention) else TorchAttention
        self._definition = kind(inner.cache, torch.float32, tiled=False)
        self._random = torch.Generator().manual_seed(0)

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = self._backend.attend(call, q, k, v, batch)
        noise = self._parts.roundoff * (2 * torch.rand((_CHANGES, *q.shape), generator=self._random) - 1)
        rows, whole = slice(batch.num_tokens), in_float32(call)
        with rotated_whole(self._definition.cache):
            wanted, *changed = (
                self._definition.attend(whole, queries, k.float(), v.float(), batch)[rows]
                for queries in (q.float(), *(q.float() * (1 + noise)))
            )
        change = max(float(errors(each, wanted).max()) for each in changed)
        self._parts.add(call.layer, "attention", out[rows], wanted, ROUNDINGS, MOST_ROUNDINGS * change)
        return out


@contextmanager
def rotated_whole(cache: KVCache) -> Iterator[None]:
    """While entered, one product rotates all keys or queries, where deterministic jobs rotate a tile at a time."""
    before = [pool.key_transform for pool in cache.pools]
    for pool, transform in zip(cache.pools, before, strict=True):
        pool.key_transform = None if transform is None else KeyTransform(transform.offsets)
    yield
    for pool, transform in zip(cache.pools, before, strict=True):
        pool.key_transform = transform


def in_float32(call: AttentionCall) -> AttentionCall:
    """The call with matrices of latents in float32."""
    if call.latent is None:
        return call
    return replace(call, latent=replace(call.latent, matrix=call.latent.matrix.float()))
