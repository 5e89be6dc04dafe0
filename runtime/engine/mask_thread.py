"""The masks of a pass, computed while the model computes the pass. Knows no model and no sampler's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ..sampling.adjust import TokenMasks
from ..sampling.grammar import GrammarState
from .sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor


class PendingMasks:
    """Masks that are being made; without any masked row they are there at once."""

    def __init__(self, future: Future[TokenMasks] | None) -> None:
        self._future = future

    def result(self) -> TokenMasks | None:
        """Waits for what is missing; call it when the logits are there."""
        return self._future.result() if self._future is not None else None


class MaskThread:
    """One thread that hands grammars to llguidance, which computes outside of Python's lock."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._bits = torch.empty(0, dtype=torch.int32)

    def begin(self, sequences: Items[Sequence]) -> PendingMasks:
        """Starts on the masks of those sequences, one per row of the pass, that follow a grammar."""
        masked = [
            (row, sequence.grammar, sequence.begin_id)
            for row, sequence in enumerate(sequences)
            if sequence.grammar is not None and sequence.masked
        ]
        if not masked:
            return PendingMasks(None)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        rows, states, allowed = zip(*masked, strict=True)
        return PendingMasks(self._thread.submit(self._compute, list(rows), states, allowed))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, rows: list[int], states: Items[GrammarState], allowed: Items[int | None]) -> TokenMasks:
        """`allowed` has for each of `rows` the token that may be taken whatever its grammar says."""
        if self._executor is None:
            from llguidance import LLExecutor

            # The model computes at the same time: on a small machine one thread is enough to keep up with it.
            self._executor = LLExecutor(max(1, (os.cpu_count() or 1) // 4))
        bits = self._rows(len(rows), states[0].mask_words)
        work = [(state.matcher, index) for index, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(work, bits.data_ptr(), bits.shape[1] * bits.itemsize, len(rows))
        for index, state in enumerate(states):
            state.check()
            if state.error:
                # Nothing is allowed, so that the sampler has no token to give and the sequence ends with the error.
                bits[index] = 0
        each_bit = bits.view(torch.uint8)
        for index, token_id in enumerate(allowed):
            if token_id is not None and not states[index].error:
                each_bit[index, token_id // 8] |= 1 << token_id % 8
        return TokenMasks(rows, each_bit)

    def _rows(self, num_rows: int, num_words: int) -> torch.Tensor:
        if self._bits.numel() < num_rows * num_words:
            self._bits = torch.empty(num_rows * num_words, dtype=torch.int32)
        return self._bits[: num_rows * num_words].view(num_rows, num_words)
