"""Steps of decoder layers that all threads of a pool run in one call of the library (native/steps.cpp).

A step's arguments are a structure of native/library.py. Activations are bfloat16. T rows, D hidden size, E experts of
which each row chooses A. Rows are set by `Steps.run`, counters by `Steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array, Structure, addressof, byref, c_int64, memset, sizeof
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..kernels.operands import Gate
from ..native.library import (
    CONSTANTS,
    ENUMS,
    NativeAttentionStep,
    NativeChoice,
    NativeCombination,
    NativeExpert,
    NativeGating,
    NativeGrouping,
    NativeHeadRows,
    NativeHeads,
    NativeJob,
    NativeMixture,
    NativeNorm,
    NativeProduct,
    NativeRouter,
    NativeRun,
    NativeStep,
    function,
)
from ..scratch import row_nbytes
from .tiled import ACTIVATIONS, MOST_ROWS, ExpertMatrices, OnThreads, native_expert, native_mixture

_COUNTERS = CONSTANTS["step_counters"]
# What computes a structure of arguments.
_KINDS: Mapping[type[Structure], str] = MappingProxyType(
    {
        NativeProduct: "multiply",
        NativeMixture: "experts",
        NativeNorm: "norm",
        NativeHeads: "heads",
        NativeGating: "gate",
        NativeRouter: "router",
        NativeChoice: "choose",
        NativeGrouping: "group",
        NativeCombination: "combine",
        NativeAttentionStep: "attend",
    }
)


class Step(NamedTuple):
    """The arguments of a step; the next one begins at once unless it `waits`. `kind`, if not the arguments' own.

    `keeps` is memory that the arguments have addresses of, and that nothing else keeps.
    """

    arguments: Structure
    waits: bool = True
    kind: str = ""
    keeps: tuple[object, ...] = ()


class NormWeight(NamedTuple):
    """The weight [D] of an RMSNorm; with `plus_one`, 1 + weight multiplies."""

    weight: Tensor
    eps: float
    plus_one: bool


class Steps:
    """Steps that are run one after the other, on the threads of a pool."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)
        # In front the counter of threads, in a cache line of its own.
        self._counters = (c_int64 * (_COUNTERS * (len(steps) + 1)))()
        address, kinds = addressof(self._counters), ENUMS["kind"]
        self._native = (NativeStep * len(steps))()
        for index, (step, native) in enumerate(zip(steps, self._native, strict=True), 1):
            if isinstance(step.arguments, NativeProduct | NativeMixture):
                step.arguments.counters = address + 8 * _COUNTERS * index
            native.kind, native.waits = kinds[step.kind or _KINDS[type(step.arguments)]], step.waits
            native.arguments = addressof(step.arguments)
        self._run = NativeRun(len(steps), addressof(self._native), address, address + 8 * _COUNTERS)
        self._sized = [step.arguments for step in steps if hasattr(step.arguments, "rows")]
        self._rows = -1

    def run(self, num_rows: int, on_threads: OnThreads) -> None:
        """Computes `num_rows` rows, at most as many as all tensors have."""
        if num_rows != self._rows:
            self._rows = num_rows
            for arguments in self._sized:
                arguments.rows = num_rows
        memset(self._counters, 0, sizeof(self._counters))
        kernel, steps = function("moedge_steps", POINTER(NativeRun)), byref(self._run)
        on_threads(lambda: kernel(steps))


def norm(x: Tensor, added: Tensor | None, total: Tensor, weight: NormWeight, out: Tensor) -> NativeNorm:
    """total = x + added, where that is not None, and out = RMSNorm of it (of x): all [T, D]."""
    return NativeNorm(
        x=x.data_ptr(),
        added=None if added is None else added.data_ptr(),
        weight=weight.weight.data_ptr(),
        total=total.data_ptr(),
        out=out.data_ptr(),
        columns=x.shape[1],
        eps=weight.eps,
        plus_one=weight.plus_one,
    )


class HeadRows(NamedTuple):
    """Queries or keys [T, heads, dim], and the RMSNorm of their heads where they have one."""

    x: Tensor
    norm: NormWeight | None

    @property
    def native(self) -> NativeHeadRows:
        """As the kernel takes them."""
        rows = NativeHeadRows(x=self.x.data_ptr(), heads=self.x.shape[1])
        if self.norm is not None:
            rows.weight, rows.eps, rows.plus_one = self.norm.weight.data_ptr(), self.norm.eps, self.norm.plus_one
        return rows


def heads(queries: HeadRows, keys: HeadRows, values: Tensor, rotary: int, block: int) -> NativeHeads:
    """Norms and rotary embedding of queries and keys in place; keys and values [T, H, dim] may be stored in a cache.

    The caller sets `cos` and `sin`, [T, rotary] each; and to store also `slots` and the codes of keys and values.
    """
    return NativeHeads(
        dim=values.shape[2],
        rotary=rotary,
        queries=queries.native,
        keys=keys.native,
        values=values.data_ptr(),
        block=block,
    )


def gate(first: Tensor, up: Tensor, activation: str) -> NativeGating:
    """first = activation(first) * up, both [T, I]."""
    addresses = (first.data_ptr(), up.data_ptr())
    return NativeGating(*addresses, columns=first.shape[1], activation=ACTIVATIONS[activation])


def router(x: Tensor, weight: Tensor, logits: Tensor) -> NativeRouter:
    """logits [T, E] float32 = x [T, D] times weight [E, D] transposed."""
    addresses = (x.data_ptr(), weight.data_ptr(), logits.data_ptr())
    return NativeRouter(*addresses, columns=x.shape[1], experts=weight.shape[0])


def choose(logits: Tensor, ids: Tensor, weights: Tensor, normalised: bool) -> NativeChoice:
    """ids int64 and weights float32 [T, A] of the largest logits: softmax over all experts, or over those chosen."""
    addresses = (logits.data_ptr(), ids.data_ptr(), weights.data_ptr())
    return NativeChoice(*addresses, experts=logits.shape[1], chosen=ids.shape[1], normalised=normalised)


class Routed(NamedTuple):
    """What routing yields: ids int64 and weights [T, A], counts int64 [E], and by row of the groups [T * A] its token;
    `assignment_rows` [T * A] is the row of each assignment."""

    ids: Tensor
    weights: Tensor
    counts: Tensor
    token_ids: Tensor
    assignment_rows: Tensor


def experts_table(matrices: Sequence[ExpertMatrices]) -> Array[NativeExpert]:
    """The matrices and biases of all experts of a layer, as `mixture` reads them."""
    return (NativeExpert * len(matrices))(*map(native_expert, matrices))


def mixture(
    hidden: Tensor,
    routed: Routed,
    table: Array[NativeExpert],
    gate: Gate,
    rows: Tensor,
    scratch: Tensor,
    integer: bool = False,
) -> tuple[Step, Step]:
    """Grouping the rows of `hidden` [T, D] by expert, and experts' outputs into `rows` [T * A, D].

    `scratch` is uint8, expert_row_nbytes for each of T * A rows; `integer` as for tiled.multiply.
    """
    # An expert is a job for each MOST_ROWS of its rows.
    jobs = (NativeJob * (len(table) + rows.shape[0] // MOST_ROWS))()
    experts = native_mixture(hidden, routed.token_ids, rows, scratch, gate, integer)
    experts.jobs = addressof(jobs)
    grouping = NativeGrouping(
        ids=routed.ids.data_ptr(),
        table=addressof(table),
        counts=routed.counts.data_ptr(),
        token_ids=routed.token_ids.data_ptr(),
        assignment_rows=routed.assignment_rows.data_ptr(),
        mixture=addressof(experts),
        chosen=routed.ids.shape[1],
        experts=len(table),
        row_nbytes=row_nbytes(table[0].up.columns) + row_nbytes(table[0].down.columns),
    )
    return Step(grouping, keeps=(table, jobs)), Step(experts)


def expert_row_nbytes(matrices: ExpertMatrices) -> int:
    """The scratch that one row of an expert takes."""
    up, _, down, _ = matrices
    return row_nbytes(up.shape[1]) + row_nbytes(down.shape[1])


def combine(rows: Tensor, residual: Tensor, routed: Routed) -> NativeCombination:
    """residual [T, D] plus the weighed outputs of each row's experts; the caller sets `out`."""
    return NativeCombination(
        outputs=rows.data_ptr(),
        residual=residual.data_ptr(),
        assignment_rows=routed.assignment_rows.data_ptr(),
        weights=routed.weights.data_ptr(),
        chosen=routed.ids.shape[1],
        columns=residual.shape[1],
    )
