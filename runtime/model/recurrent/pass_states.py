"""The states of one pass: which rows continue which state, and how a layer's function is called on them.

A pass is one row of tokens of many sequences. Projections compute all of it at once; only what mixes tokens, the
convolution and the scan, is called by sequence, and once for all sequences that add one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch

from ....quant.kernels.upload import upload
from ...engine.batch import Batch, Chunk
from ...kv.spec import CPU_STEP_NBYTES, SCAN_CHUNK, SCANNED_TOKENS, STEP_NBYTES
from ...kv.states import NO_SLOT, LayerStates, Slots, StatePool

# Tokens [1, t, ...] of one sequence and its state [1, ...], or None at its beginning, to outputs [1, t, ...] and the
# state after them. It must not change the state that it gets, which others may begin with too.
Scan = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
# One token [n, 1, ...] of n sequences and their states [n, ...] to outputs [n, 1, ...] and the new states, which best
# are the ones that it got, changed in place.
Step = Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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
    _parts: dict[int, list[_Part]] = field(default_factory=dict)

    def parts(self, together: int) -> list[_Part]:
        """The turn in calls of up to `together` sequences; slots that follow one another need not be gathered."""
        if together not in self._parts:
            found = []
            for begin in range(0, len(self.slots), together):
                slots = self.slots[begin : begin + together]
                follow = slots[-1] - slots[0] == len(slots) - 1
                chosen = slice(slots[0], slots[-1] + 1) if follow else upload(torch.tensor(slots), self.rows.device)
                found.append(_Part(begin, begin + len(slots), chosen))
            self._parts[together] = found
        return self._parts[together]


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
        self._begun: list[tuple[int, int]] = []
        self._turns: list[_Turn] = []

    def begin(self, batch: Batch, device: torch.device) -> None:
        """The layers that are called now compute this pass."""
        assert self.pool is not None, "set `pool` before the first pass"
        most = SCAN_CHUNK if self.tiled else SCANNED_TOKENS
        self._pieces = [piece for chunk in batch.chunks for piece in _cut(chunk, self._scanned(chunk), most)]
        # Sequences that step from the end of a prefix on: the step changes their own state.
        tables = (chunk.sequence.table for chunk in batch.chunks if not self._scanned(chunk))
        self._begun = [(table.origin, table.state) for table in tables if table.origin != NO_SLOT]
        stepped = [[(chunk.sequence.table.state, row) for row in self._stepped(chunk)] for chunk in batch.chunks]
        # The first token that each sequence steps over, then the second: a call has one token of a sequence.
        turns = (sorted(each for each in turn if each is not None) for turn in zip_longest(*stepped))
        self._turns = [_turn_of(turn, device) for turn in turns]

    def _scanned(self, chunk: Chunk) -> int:
        """How many tokens of a chunk are scanned: its prompt, and a run of others where a scan gives the same."""
        prompt = min(chunk.count, max(0, len(chunk.sequence.prompt_ids) - chunk.past))
        assert not (self.tiled and prompt and chunk.past % SCAN_CHUNK), "a prompt was cut inside a tile"
        return prompt if self.tiled or self.stepwise or chunk.count - prompt == 1 else chunk.count

    def _stepped(self, chunk: Chunk) -> range:
        return range(chunk.begin + self._scanned(chunk), chunk.end)

    def _together(self, states: LayerStates, device: torch.device) -> int:
        """Sequences whose next tokens one call computes."""
        if self.tiled:
            return 1
        nbytes = CPU_STEP_NBYTES if device.type == "cpu" else STEP_NBYTES
        return max(1, nbytes // states.slot_nbytes)

    def run(self, states: LayerStates, inputs: Sequence[torch.Tensor], scan: Scan, step: Step) -> torch.Tensor:
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
            result = self._step(turn, states, inputs, step)
            if len(turn.slots) == length:
                # The whole pass: reading it in the order of rows is faster than writing it there.
                return result.index_select(0, turn.order).transpose(0, 1)
            out = _like(out, result, length)
            out[0].index_copy_(0, turn.rows, result.squeeze(1))
        assert out is not None, "a pass has tokens"
        return out

    def _step(self, turn: _Turn, states: LayerStates, inputs: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        """Outputs [n, 1, ...] of one token of each sequence of the turn."""
        rows = [each[0].index_select(0, turn.rows).unsqueeze(1) for each in inputs]
        results = []
        for part in turn.parts(self._together(states, turn.rows.device)):
            before = states[part.slots]
            result, after = step([row[part.begin : part.end] for row in rows], before)
            if not states.holds(after):
                states[part.slots] = after
            results.append(result)
            self.num_steps += 1
        self.num_stepped += len(turn.slots)
        return results[0] if len(results) == 1 else torch.cat(results)


def _like(out: torch.Tensor | None, result: torch.Tensor, length: int) -> torch.Tensor:
    return result.new_zeros(1, length, *result.shape[2:]) if out is None else out


def _turn_of(run: list[tuple[int, int]], device: torch.device) -> _Turn:
    """`run` has (slot, row of the pass)."""
    rows = torch.tensor([row for _, row in run])
    return _Turn(upload(rows, device), upload(rows.argsort(), device), [slot for slot, _ in run])


def _cut(chunk: Chunk, count: int, most: int) -> Iterator[_Piece]:
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
