"""The states of one pass: which rows continue which state, and how a layer's function is called on them.

A pass is one row of tokens of many sequences. Projections compute all of it at once; only what mixes tokens, the
convolution and the scan, is called by sequence, and once for all sequences that add one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch

from ....offload.machine.hardware import num_workers
from ....quant.kernels.upload import upload
from ....quant.matmul.thread_pool import WorkerPool
from ...engine.sequence import Batch, TokenChunk
from ...kv.allocator import NO_SLOT
from ...kv.spec import CPU_STEP_NBYTES, GATHERED_NBYTES, SCAN_CHUNK, SCANNED_TOKENS, SHARED_STEP_NBYTES, STEP_NBYTES
from ...kv.states import LayerStates, Slots, StatePool

# Tokens [1, t, ...] of one sequence and its state [1, ...], or None at its beginning, to outputs [1, t, ...] and the
# state after them. It must not change the state that it gets, which others may begin with too.
Scan = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
# One token [n, 1, ...] of n sequences and their states [n, ...] to outputs [n, 1, ...] and the new states, which best
# are the ones that it got, changed in place. Threads call it for several sequences each.
Step = Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# What a step gets instead of tokens [n, 1, ...], [n, ...]: it is computed for all sequences in one call.
Prepare = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `begin` to `end` of a pass that continue the state in `source`, NO_SLOT at the beginning of a sequence.

    The state after them goes into `targets`: the sequence's slot, and a snapshot's where a prefix ends here.
    """

    begin: int
    end: int
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Entries `begin` to `end` of a `_Turn`, and the slots of their states."""

    begin: int
    end: int
    slots: Slots


@dataclass(slots=True)
class _Turn:
    """One token each of some sequences, in the order of their slots: `rows` of the pass, int64 on the device.

    `order` are the numbers of its entries in the order of rows.
    """

    rows: torch.Tensor
    order: torch.Tensor
    slots: list[int]
    _parts: dict[tuple[int, bool], list[_Part]] = field(default_factory=dict)

    def parts(self, together: int, gathered: bool) -> list[_Part]:
        """The turn in calls of up to `together` sequences; their slots follow one another, or are `gathered`."""
        key = (together, gathered)
        if key not in self._parts:
            ends = [0, *(i for i, (a, b) in enumerate(pairwise(self.slots), 1) if b != a + 1 and not gathered)]
            bounds = [each for a, b in pairwise([*ends, len(self.slots)]) for each in range(a, b, together)]
            self._parts[key] = [self._part(a, b) for a, b in pairwise([*bounds, len(self.slots)])]
        return self._parts[key]

    def _part(self, begin: int, end: int) -> _Part:
        slots = self.slots[begin:end]
        if slots[-1] - slots[0] == len(slots) - 1:
            return _Part(begin, end, slice(slots[0], slots[-1] + 1))
        return _Part(begin, end, upload(torch.tensor(slots), self.rows.device))


class PassStates:
    """Set `pool` before the first pass, and call `begin` before each.

    `tiled` is for runs whose bits must not depend on how prompts are cut: a scan gets SCAN_CHUNK tokens that begin at a
    multiple of it, and generated tokens are always computed one by one, also those that a preempted sequence computes
    again. So they are where a family is `stepwise`: its scan and its step do not compute the same.

    `num_scans` and `num_steps` count calls of pieces and of single tokens, of every layer's function;
    `num_stepped` the tokens of the latter.
    """

    pool: StatePool
    # Of the running pass.
    batch: Batch

    def __init__(self) -> None:
        self.tiled = self.stepwise = False
        self.num_scans = self.num_steps = self.num_stepped = 0
        self._workers: WorkerPool | None = None
        self._pieces: list[_Piece] = []
        self._begun: list[tuple[int, int]] = []
        self._turns: list[_Turn] = []

    def begin(self, batch: Batch, device: torch.device) -> None:
        """The layers that are called now compute this pass."""
        self.batch = batch
        most = SCAN_CHUNK if self.tiled else SCANNED_TOKENS
        self._pieces = [piece for chunk in batch.chunks for piece in _cut(chunk, self._scanned(chunk), most)]
        # Sequences that step from the end of a prefix on: the step changes their own state.
        tables = (chunk.sequence.table for chunk in batch.chunks if not self._scanned(chunk))
        self._begun = [(table.origin, table.state) for table in tables if table.origin != NO_SLOT]
        stepped = [
            [(chunk.sequence.table.state, row) for row in range(chunk.begin + self._scanned(chunk), chunk.end)]
            for chunk in batch.chunks
        ]
        # The first token that each sequence steps over, then the second: a call has one token of a sequence.
        turns = (sorted(each for each in turn if each is not None) for turn in zip_longest(*stepped))
        self._turns = [_turn_of(turn, device) for turn in turns]

    def _scanned(self, chunk: TokenChunk) -> int:
        """How many tokens of a chunk are scanned: its prompt, and a run of others where a scan gives the same."""
        prompt = min(chunk.count, max(0, len(chunk.sequence.prompt_ids) - chunk.past))
        assert not (self.tiled and prompt and chunk.past % SCAN_CHUNK), "a prompt was cut inside a tile"
        return prompt if self.tiled or self.stepwise or chunk.count - prompt == 1 else chunk.count

    def _together(self, states: LayerStates, count: int, shared: bool, device: torch.device) -> int:
        """Sequences whose next tokens one call computes, where `count` have one and threads may share the calls."""
        if self.tiled:
            return 1
        most = (CPU_STEP_NBYTES if device.type == "cpu" else STEP_NBYTES) // states.slot_nbytes
        return max(1, min(most, -(-count // num_workers()) if shared else most))

    def run(
        self,
        states: LayerStates,
        inputs: Sequence[torch.Tensor],
        scan: Scan,
        step: Step,
        prepare: Prepare = lambda rows: rows,
    ) -> torch.Tensor:
        """Outputs [1, T, ...] of a layer's function for `inputs` [1, T, ...]; zeros for rows behind the pass's tokens.

        `states` are the layer's, which it replaces by those after the pass.
        """
        out: torch.Tensor | None = None
        length = inputs[0].shape[1]
        for piece in self._pieces:
            rows = [each[:, piece.begin : piece.end] for each in inputs]
            before = None if piece.source == NO_SLOT else states[piece.source : piece.source + 1]
            result, after = scan(rows, before)
            for slot in piece.targets:
                states[slot] = after[0]
            out = _like(out, result, length)
            out[:, piece.begin : piece.end] = result
            self.num_scans += 1
        for source, target in self._begun:
            states[target] = states[source]
        for turn in self._turns:
            rows = [each[0].index_select(0, turn.rows).unsqueeze(1) for each in inputs]
            if self.tiled:
                # An exponential at the end of a vector may have other bits than one inside.
                result = self._step(turn, states, rows, lambda row, state: step(prepare(row), state))
            else:
                result = self._step(turn, states, prepare(rows), step)
            if len(turn.slots) == length:
                # The whole pass: reading it in the order of rows is faster than writing it there.
                return result.index_select(0, turn.order).transpose(0, 1)
            out = _like(out, result, length)
            out[0].index_copy_(0, turn.rows, result.squeeze(1))
        assert out is not None, "a pass has tokens"
        return out

    def _step(self, turn: _Turn, states: LayerStates, rows: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        """Outputs [n, 1, ...] of one token of each sequence of the turn, of which `rows` has what the step gets."""
        device, count = turn.rows.device, len(turn.slots)
        shared = device.type == "cpu" and count * states.slot_nbytes >= SHARED_STEP_NBYTES
        gathered = device.type != "cpu" or states.slot_nbytes < GATHERED_NBYTES
        parts = turn.parts(self._together(states, count, shared, device), gathered)
        results: list[torch.Tensor] = [turn.rows] * len(parts)

        def compute(index: int, worker: int) -> None:
            part = parts[index]
            before = states[part.slots]
            results[index], after = step([row[part.begin : part.end] for row in rows], before)
            if not states.holds(after):
                states[part.slots] = after

        if shared and len(parts) > 1:
            # A thread takes one part after the other, with torch on that thread alone.
            self._pool_of_threads().run(range(len(parts)), compute, deterministic=True)
        else:
            for index in range(len(parts)):
                compute(index, 0)
        self.num_steps += len(parts)
        self.num_stepped += count
        return results[0] if len(results) == 1 else torch.cat(results)

    def _pool_of_threads(self) -> WorkerPool:
        if self._workers is None:
            self._workers = WorkerPool(num_workers())
        return self._workers


def _like(out: torch.Tensor | None, result: torch.Tensor, length: int) -> torch.Tensor:
    return result.new_zeros(1, length, *result.shape[2:]) if out is None else out


def _turn_of(run: list[tuple[int, int]], device: torch.device) -> _Turn:
    """`run` has (slot, row of the pass)."""
    rows = torch.tensor([row for _, row in run])
    return _Turn(upload(rows, device), upload(rows.argsort(), device), [slot for slot, _ in run])


def _cut(chunk: TokenChunk, count: int, most: int) -> Iterator[_Piece]:
    """The first `count` rows of a chunk in pieces of up to `most`, which also end where a snapshot is taken."""
    table = chunk.sequence.table
    kept = {position - chunk.past: slot for position, slot in table.snapshots}
    ends = sorted({0, count, *kept})
    bounds = [begin for first, last in pairwise(ends) for begin in range(first, last, most)]
    source = table.origin if table.origin != NO_SLOT else (table.state if chunk.past else NO_SLOT)
    for begin, end in pairwise([*bounds, count]):
        targets = (table.state, kept[end]) if end in kept else (table.state,)
        yield _Piece(chunk.begin + begin, chunk.begin + end, source, targets)
        source = table.state
