"""Errors of a packed matrix that later columns make good: what GPTQ does, for any format whose groups are of rows.

Inputs of a matrix are correlated, so that an output's error is less than the sum of its weights' errors where they
cancel each other. With second moments H of the inputs, columns are packed from the first to the last, some at a time,
and all columns behind them move by what makes the expected square of the outputs' error smallest: Frantar et al.,
GPTQ, ICLR 2023, arXiv:2210.17323; by blocks, Tseng et al., QuIP#, ICML 2024, arXiv:2402.04396. Formats and kernels
know nothing of it: the result is another matrix of the same shape, which is packed as any is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .formats.format import Layout, get_format, row_chunks
from .formats.tiles import BLOCK_ROWS
from .tensor import LIBRARY_CHUNK, ForEach, in_turn, is_finite, one_thread, pack_into

# Columns that are packed together: whole groups of every format that an importance can be given to.
BLOCK = 64
# Part of the mean moment that each column has beside its own, so that no column moves by much for the sake of what a
# text is silent about. From 0.03 to 1 the loss is the same within its noise (bench/results/quality.md).
DAMPING = 0.1


def feedback_nbytes(columns: int) -> int:
    """Bytes while the feedback of a matrix with as many columns is made, beside its moments."""
    return 4 * 8 * columns**2


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """How a matrix [N, K] takes errors back. `importance`, float32 [K], is how much squares of errors in a column count
    after the columns behind its block have moved; the error of a block of columns [N, BLOCK] moves those behind it by
    its product with the block's rows of `carried`, float32 [K, K], 0 elsewhere."""

    importance: Tensor
    carried: Tensor

    @classmethod
    def of(cls, moments: Tensor) -> Self:
        """From the mean products of inputs [K, K], symmetric; those of inputs that are all 0 count alike."""
        size = len(moments)
        mean = float(moments.diagonal().mean())
        damped = moments.double() + torch.eye(size, dtype=torch.float64) * (DAMPING * mean if mean else 1)
        # Of the inverse's factor U, the rows of a block say what is left to the columns behind it.
        factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
        importance, carried = torch.empty(size), torch.zeros(size, size)
        for begin in range(0, size, BLOCK):
            end = min(begin + BLOCK, size)
            inverse = torch.linalg.inv(factor[begin:end, begin:end])
            importance[begin:end] = inverse.square().sum(1)
            carried[begin:end, end:] = inverse @ factor[begin:end, end:]
        return cls(importance, carried)

    def moved(self, weight: Tensor, layout: Layout, for_each: ForEach = in_turn) -> Tensor:
        """The matrix to pack for `weight` [N, K], finite or not: packed in `layout` with this importance, it has the
        codes from whose errors its columns were moved.

        `for_each` may share slices of rows among threads; bits do not depend on their number.
        """
        moved = weight.clone()

        def move(rows: slice) -> None:
            with one_thread():
                self._move(moved[rows], layout)

        for_each(row_chunks(layout.shape, BLOCK_ROWS, LIBRARY_CHUNK), move)
        return moved

    def _move(self, rows: Tensor, layout: Layout) -> None:
        if not is_finite(rows):
            # Packing says what is wrong with them.
            return
        wanted = rows.float()
        form = get_format(layout.format).in_order(layout.order)
        for begin in range(0, wanted.shape[1], BLOCK):
            end = min(begin + BLOCK, wanted.shape[1])
            part = form.layout((len(rows), end - begin), layout.dtype)
            rows[:, begin:end] = wanted[:, begin:end]
            buffer = torch.empty(part.nbytes, dtype=torch.uint8)
            packed = pack_into(rows[:, begin:end], part, buffer, importance=self.importance[begin:end])
            # Rounded to the weights' dtype, as the library widens them: a hundredth of a format's error.
            error = wanted[:, begin:end] - packed.dequantize()
            wanted[:, end:].addmm_(error, self.carried[begin:end, end:], alpha=-1)
