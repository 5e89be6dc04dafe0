"""The states of one pass: which rows continue which state, and how a layer's function is called on them.

A pass is one row of tokens of many sequences. Projections compute all of it at once; only what mixes tokens, the
convolution and the scan, is called by sequence, and once for all sequences that add one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ....quant.kernels.upload import upload
from ...engine.batch import Batch, Chunk
from ...kv.spec import SCAN_CHUNK, SCANNED_TOKENS, STEP_NBYTES
from ...kv.states import StatePool

# Tokens [1, t, ...] of one sequence and its state [1, ...], or None at its beginning, to outputs [1, t, ...] and the
# state after them.
Scan = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
# One token [n, 1, ...] of n sequences and their states [n, ...] to outputs [n, 1, ...] and the new states.
Step = Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `begin` to `end` of a pass that continue the state in `slot`; `first` ones begin their sequence."""

    begin: int
    end: int
    slot: int
    first: bool


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One token each of some sequences: their rows and slots, int64 on the device."""

    rows: torch.Tensor
    slots: torch.Tensor


class PassStates:
    """Set `pool` before the first pass, and call `begin` before each.

    `tiled` is for runs whose bits must not depend on how prompts are cut: a scan gets SCAN_CHUNK tokens that begin at a
    multiple of it, and generated tokens are always computed one by one, also those that a preempted sequence computes
    again. So they are where a family is `stepwise`: its scan and its step do not compute the same.

    `num_scans` and `num_steps` count calls of pieces and of single tokens, of every layer's function;
    `num_stepped` the tokens of the latter.
    """

    def __init__(self) -> None:
        self.pool: StatePool | None = None
        self.tiled = self.stepwise = False
        self.num_scans = self.num_steps = self.num_stepped = 0
        self._pieces: list[_Piece] = []
        self._tokens: list[_Tokens] = []

    def begin(self, batch: Batch, device: torch.device) -> None:
        """The layers that are called now compute this pass."""
        assert self.pool is not None, "set `pool` before the first pass"
        most = SCAN_CHUNK if self.tiled else SCANNED_TOKENS
        self._pieces = [piece for chunk in batch.chunks for piece in _cut(chunk, self._scanned(chunk), most)]
        stepped = [[(row, chunk) for row in self._stepped(chunk)] for chunk in batch.chunks]
        together = 1 if self.tiled else max(1, STEP_NBYTES // self.pool.spec.largest_nbytes)
        self._tokens = []
        # The first token that each sequence steps over, then the second: a call has one token of a sequence.
        for turn in zip_longest(*stepped):
            run = [each for each in turn if each is not None]
            parts = (run[begin : begin + together] for begin in range(0, len(run), together))
            self._tokens += [_tokens_of(part, device) for part in parts]

    def _scanned(self, chunk: Chunk) -> int:
        """How many tokens of a chunk are scanned: its prompt, and a run of others where a scan gives the same."""
        prompt = min(chunk.count, max(0, len(chunk.sequence.prompt_ids) - chunk.past))
        assert not (self.tiled and prompt and chunk.past % SCAN_CHUNK), "a prompt was cut inside a tile"
        return prompt if self.tiled or self.stepwise or chunk.count - prompt == 1 else chunk.count

    def _stepped(self, chunk: Chunk) -> range:
        return range(chunk.begin + self._scanned(chunk), chunk.end)

    def run(self, states: torch.Tensor, inputs: Sequence[torch.Tensor], scan: Scan, step: Step) -> torch.Tensor:
        """Outputs [1, T, ...] of a layer's function for `inputs` [1, T, ...]; zeros for rows behind the pass's tokens.

        `states` [slots, ...] are the layer's, which it replaces by those after the pass.
        """
        out: torch.Tensor | None = None
        for piece in self._pieces:
            rows = [each[:, piece.begin : piece.end] for each in inputs]
            before = None if piece.first else states[piece.slot : piece.slot + 1]
            result, after = scan(rows, before)
            states[piece.slot] = after[0]
            out = _like(out, result, inputs[0].shape[1])
            out[:, piece.begin : piece.end] = result
            self.num_scans += 1
        for tokens in self._tokens:
            rows = [each[0].index_select(0, tokens.rows).unsqueeze(1) for each in inputs]
            result, after = step(rows, states.index_select(0, tokens.slots))
            states.index_copy_(0, tokens.slots, after.to(states.dtype))
            out = _like(out, result, inputs[0].shape[1])
            out[0].index_copy_(0, tokens.rows, result.squeeze(1))
            self.num_steps += 1
            self.num_stepped += len(tokens.rows)
        assert out is not None, "a pass has tokens"
        return out


def _like(out: torch.Tensor | None, result: torch.Tensor, length: int) -> torch.Tensor:
    return result.new_zeros(1, length, *result.shape[2:]) if out is None else out


def _tokens_of(run: list[tuple[int, Chunk]], device: torch.device) -> _Tokens:
    rows = torch.tensor([row for row, _ in run])
    slots = torch.tensor([chunk.sequence.table.state for _, chunk in run])
    return _Tokens(upload(rows, device), upload(slots, device))


def _cut(chunk: Chunk, count: int, most: int) -> Iterator[_Piece]:
    for begin in range(0, count, most):
        end = min(begin + most, count)
        first = chunk.past + begin == 0
        yield _Piece(chunk.begin + begin, chunk.begin + end, chunk.sequence.table.state, first)
