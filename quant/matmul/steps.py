"""Steps of decoder layers that all threads of a pool run in one call of the library (native/steps.cpp).

A step's arguments are int64: numbers and addresses of contiguous memory that outlives the calls. Activations are
bfloat16. T rows, D hidden size, E experts of which each row chooses A.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_int64, c_void_p, memset, sizeof
from functools import cache
from typing import NamedTuple

from torch import Tensor

from ..kernels.operands import Gate
from ..native.library import function
from ..scratch import row_nbytes
from ..tensor import PackedTensor
from .tiled import ACTIVATIONS, MOST_ROWS, ExpertMatrices, OnThreads, describe

# Enum of steps.cpp, and for each kind where its arguments have the number of rows.
MULTIPLY, EXPERTS, NORM, HEADS, ROUTER, CHOOSE, GROUP, COMBINE, ATTEND, REDUCE = range(10)
_ROWS = {MULTIPLY: 4, NORM: 7, HEADS: 0, ROUTER: 3, CHOOSE: 3, GROUP: 7, COMBINE: 5}
# Where the arguments of products have the address of their counters.
_COUNTERS_AT = {MULTIPLY: 6, EXPERTS: 10}
# Numbers of a step's counters, and of an expert's two matrices.
_COUNTERS, MATRICES = 32, 18


class Step(NamedTuple):
    """What a step is, and its arguments; the next one begins at once unless it `waits`."""

    kind: int
    arguments: Array[c_int64]
    waits: bool = True


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
        address = addressof(self._counters)
        given = [len(steps), address, address + 8 * _COUNTERS]
        for index, step in enumerate(steps):
            if step.kind in _COUNTERS_AT:
                step.arguments[_COUNTERS_AT[step.kind]] = address + 8 * _COUNTERS * (index + 1)
            given += (step.kind, addressof(step.arguments), step.waits)
        self._given = (c_int64 * len(given))(*given)
        self._address = addressof(self._given)
        self._sized = [(step.arguments, _ROWS[step.kind]) for step in steps if step.kind in _ROWS]
        self._rows = -1

    def run(self, num_rows: int, on_threads: OnThreads) -> None:
        """Computes `num_rows` rows, at most as many as all tensors have."""
        if num_rows != self._rows:
            self._rows = num_rows
            for arguments, at in self._sized:
                arguments[at] = num_rows
        memset(self._counters, 0, sizeof(self._counters))
        kernel, address = _kernel(), self._address
        on_threads(lambda: kernel(address))


def multiply(
    x: Tensor, packed: PackedTensor, bias: Tensor | None, out: Tensor, scratch: Tensor, integer: bool = False
) -> Array[c_int64]:
    """x [T, K] times packed [N, K] transposed plus bias, into `out` [T, N]; see tiled.multiply."""
    rows = (x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0))
    return _numbers(*rows, 0, scratch.data_ptr(), 0, *describe(packed, bias, integer))


def norm(x: Tensor, added: Tensor | None, total: Tensor, weight: NormWeight, out: Tensor) -> Array[c_int64]:
    """total = x + added, where that is not None, and out = RMSNorm of it (of x): all [T, D]."""
    other = 0 if added is None else added.data_ptr()
    addresses = (x.data_ptr(), other, weight.weight.data_ptr(), total.data_ptr(), out.data_ptr())
    return _numbers(*addresses, _bits(weight.eps), weight.plus_one, 0, x.shape[1])


class HeadRows(NamedTuple):
    """Queries or keys [T, heads, dim], and the RMSNorm of their heads where they have one."""

    x: Tensor
    norm: NormWeight | None

    @property
    def numbers(self) -> tuple[int, ...]:
        if self.norm is None:
            return self.x.data_ptr(), self.x.shape[1], 0, 0, 0
        weight, eps, plus_one = self.norm
        return self.x.data_ptr(), self.x.shape[1], weight.data_ptr(), _bits(eps), plus_one


# Where the arguments of HEADS have the addresses of cos and sin, and those of the cache.
COS, SIN, STORES, KEY_CODES, VALUE_CODES, SLOTS = 3, 4, 15, 18, 19, 20


def heads(queries: HeadRows, keys: HeadRows, values: Tensor, rotary: int, block: int) -> Array[c_int64]:
    """Norms and rotary embedding of queries and keys in place; keys and values [T, H, dim] may be stored in a cache.

    The caller sets the addresses COS and SIN, [T, rotary] each; and where STORES is 1 those of the codes and slots.
    """
    dim = values.shape[2]
    cache = (0, keys.x.data_ptr(), values.data_ptr(), 0, 0, 0, values.shape[1], dim, block)
    return _numbers(0, dim, rotary, 0, 0, *queries.numbers, *keys.numbers, *cache)


def router(x: Tensor, weight: Tensor, logits: Tensor) -> Array[c_int64]:
    """logits [T, E] float32 = x [T, D] times weight [E, D] transposed."""
    return _numbers(x.data_ptr(), weight.data_ptr(), logits.data_ptr(), 0, x.shape[1], weight.shape[0])


def choose(logits: Tensor, ids: Tensor, weights: Tensor, normalised: bool) -> Array[c_int64]:
    """ids int64 and weights float32 [T, A] of the largest logits: softmax over all experts, or over those chosen."""
    return _numbers(logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), 0, logits.shape[1], ids.shape[1], normalised)


class Routed(NamedTuple):
    """What routing yields: ids int64 and weights [T, A], counts int64 [E], and by row of the groups [T * A] its token;
    `assignment_rows` [T * A] is the row of each assignment."""

    ids: Tensor
    weights: Tensor
    counts: Tensor
    token_ids: Tensor
    assignment_rows: Tensor


def experts_table(matrices: Sequence[ExpertMatrices], integer: bool = False) -> Array[c_int64]:
    """The matrices and biases of all experts of a layer, as `group` reads them; `integer` as for tiled.multiply."""
    rows = [
        number
        for up, up_bias, down, down_bias in matrices
        for number in describe(up, up_bias, integer) + describe(down, down_bias, integer)
    ]
    return _numbers(*rows)


def mixture(
    hidden: Tensor,
    routed: Routed,
    first: ExpertMatrices,
    table: Array[c_int64],
    gate: Gate,
    rows: Tensor,
    scratch: Tensor,
) -> tuple[Step, Step]:
    """Grouping the rows of `hidden` [T, D] by expert, and experts' outputs into `rows` [T * A, D].

    `first` is any expert; `scratch` is uint8, expert_row_nbytes for each of T * A rows.
    """
    count = len(table) // MATRICES
    # An expert is a job for each MOST_ROWS of its rows.
    given = (c_int64 * (11 + (count + rows.shape[0] // MOST_ROWS) * (3 + MATRICES)))()
    jobs = addressof(given) + 8 * 11
    given[:10] = [
        hidden.data_ptr(), hidden.stride(0), routed.token_ids.data_ptr(), rows.data_ptr(), rows.stride(0),
        scratch.data_ptr(), ACTIVATIONS[gate.activation], gate.alternating, 0, jobs,
    ]  # fmt: skip
    addresses = (routed.counts.data_ptr(), routed.token_ids.data_ptr(), routed.assignment_rows.data_ptr())
    grouping = _numbers(
        routed.ids.data_ptr(), addressof(table), *addresses, addressof(given), jobs,
        0, routed.ids.shape[1], count, expert_row_nbytes(first),
    )  # fmt: skip
    return Step(GROUP, grouping), Step(EXPERTS, given)


def expert_row_nbytes(matrices: ExpertMatrices) -> int:
    """The scratch that one row of an expert takes."""
    up, _, down, _ = matrices
    return row_nbytes(up.shape[1]) + row_nbytes(down.shape[1])


# Where the arguments of COMBINE have the address of its result, and those of NORM that of its input.
COMBINED, NORMED = 4, 0


def combine(rows: Tensor, residual: Tensor, routed: Routed) -> Array[c_int64]:
    """residual [T, D] plus the weighed outputs of each row's experts; the caller sets the address COMBINED."""
    addresses = (rows.data_ptr(), residual.data_ptr(), routed.assignment_rows.data_ptr(), routed.weights.data_ptr())
    return _numbers(*addresses, 0, 0, routed.ids.shape[1], residual.shape[1])


def _numbers(*numbers: int) -> Array[c_int64]:
    return (c_int64 * len(numbers))(*numbers)


def _bits(number: float) -> int:
    """The bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


@cache
def _kernel() -> Callable[[int], None]:
    return function("moedge_steps", [c_void_p])
