"""Runs of tiny models whose sequences lie partly in host memory, and bugs of the way there and back."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moedge.moe.streaming_mode import Mode
from moedge.offload.stream.stream import ShardStream
from moedge.runtime.attention import cohorts as attention
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv import host
from moedge.runtime.kv.cohorts import CohortSizes
from moedge.runtime.kv.host import HostBlocks, HostKV, TokenSlots
from moedge.runtime.kv.pool import BlockMemory, LayerWindow
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Plan
from support.device import tiny_engine
from support.stream import seeded_bugs

BLOCK = 4
# Odd lengths, of which some begin alike.
LENGTHS, ALIKE, NEW_TOKENS = (10, 21, 7, 13, 18, 11), 9, 7


@dataclass(frozen=True)
class Hosted:
    """What a run gave: its tokens, and what moved, in bytes, sequences and tokens."""

    tokens: list[list[int]]
    passes: int
    read: int
    written: int
    expected_read: int
    expected_written: int
    moved: int
    preemptions: int
    prefix_hits: int
    parked: int
    attended: int
    expected_attended: int


def many(tiny: tiny_engine.Case, kv: str = "fp32") -> tiny_engine.Case:
    """Six sequences of a tiny model, at once."""
    settings = replace(tiny.settings, kv=kv, max_sequences=len(LENGTHS))
    return replace(tiny, settings=settings, lengths=LENGTHS, new_tokens=NEW_TOKENS)


def hosted(
    tiny: tiny_engine.Case, plan: Plan, on_device: float, cohorts: int = 0, each: float = 0, here: bool = False
) -> Plan:
    """The plan with blocks for `on_device` sequences at their longest, and for `each` in every one of `cohorts`, to
    which the CPU attends if `here`."""
    specs = [KVSpec(group, plan.kv, BLOCK) for group in tiny.source.shape.kv_groups]

    def blocks(sequences: float) -> tuple[int, ...]:
        return tuple(round(sequences * spec.blocks_for(tiny.job.longest)) for spec in specs)

    # More than queries of all heads of any tiny model take.
    row_nbytes = 4096 if here else 0
    sizes = CohortSizes.of(specs, cohorts, round(cohorts * each), blocks(each), plan.tokens_per_pass, row_nbytes)
    return replace(
        plan,
        kv_block=BLOCK,
        kv_blocks=blocks(on_device),
        kv_nbytes=sum(count * spec.block_nbytes for count, spec in zip(blocks(on_device), specs, strict=True)),
        kv_sequences=max(1, round(on_device)),
        max_sequences=len(LENGTHS),
        host_kv=sizes if cohorts else None,
        parked_blocks=(0,) * len(specs),
        states_nbytes=plan.states_nbytes * len(LENGTHS),
    )


def run(
    tiny: tiny_engine.Case,
    plan: Plan,
    device: Any = None,
    alike: int = 0,
    loaded_now: Callable[[Any], None] = lambda _: None,
) -> Hosted:
    """All sequences to their end; the first `alike` tokens of all prompts are the same."""
    prompts = tiny.prompts
    prompts = [prompts[0][:alike] + prompt[alike:] for prompt in prompts]
    store = tiny.store if plan.streams else None
    with closing(load_engine(tiny.source, plan, store, device, Mode.ALL)) as loaded:
        loaded_now(loaded)
        sequences = [Sequence(ids, tiny.params(index, 0.0)) for index, ids in enumerate(prompts)]
        for sequence in sequences:
            loaded.engine.add(sequence)
        read = written = attended = 0
        specs = [pool.spec for pool in loaded.engine.scheduler.cache.pools]
        forward = loaded.model.forward

        def counting(batch: Any) -> Any:
            nonlocal read, written, attended
            there = [chunk for chunk in batch.chunks if chunk.sequence.table.cohort]
            if there and plan.host_kv is not None:
                here = [chunk for chunk in there if plan.host_kv.rows_nbytes and chunk.decodes]
                begun = [chunk for chunk in there if plan.host_kv.rows_nbytes and chunk not in here and not chunk.past]
                crossing = {chunk.sequence.table.cohort for chunk in there if chunk not in here + begun}
                read += len(crossing) * plan.host_kv.cohort_nbytes
                attended += sum(chunk.count for chunk in here) * sum(len(spec.group.layers) for spec in specs)
                tokens = sum(chunk.count for chunk in there)
                written += sum(len(spec.group.layers) * spec.blocks_for(tokens) * spec.record_nbytes for spec in specs)
            return forward(batch)

        loaded.engine.model = type("Counting", (), {"forward": staticmethod(counting)})()
        loaded.start_counting()
        list(loaded.engine.run())
        counts, kv = loaded.engine.scheduler.counts, loaded.host_kv
        return Hosted(
            [sequence.output_ids for sequence in sequences],
            loaded.engine.metrics.passes,
            kv.nbytes_read if kv else 0,
            kv.nbytes_written if kv else 0,
            read,
            written,
            getattr(loaded.engine.scheduler.cache, "num_moved", 0),
            counts.preemptions,
            counts.prefix_hit_tokens,
            counts.parked,
            kv.num_attended if kv else 0,
            attended,
        )


Patch = pytest.MonkeyPatch


def _late_write_back(patch: Patch) -> None:
    """A pass reads cohorts before the last one's tokens are written."""
    begin = HostKV.begin

    def early(self: Any, *asked: Any) -> None:
        patch.setattr(HostKV, "settle", lambda self: None)
        begin(self, *asked)
        patch.setattr(HostKV, "settle", settle)

    settle = HostKV.settle
    patch.setattr(HostKV, "begin", early)


def _lane(bug: type) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        patch.setattr(host, "CudaLane", bug)

    plant.__doc__ = bug.__doc__
    return plant


def _read_before_it_arrived(patch: Patch) -> None:
    """The window is bound to what was there before."""
    bind = LayerWindow.bind
    patch.setattr(LayerWindow, "bind", lambda self, memory: None if hasattr(self, "memory") else bind(self, memory))


def _released_before_attention(patch: Patch) -> None:
    """A slot is given back before attention reads it: the next layer arrives in it."""
    window = HostKV.window

    def early(self: Any, cohort: int, at: Any) -> Any:
        used = self._stream.lane.mark_used()
        done = self._stream.done
        self._stream.done = lambda arrival: done(arrival, used=used)
        return window(self, cohort, at)

    patch.setattr(HostKV, "window", early)


def _table_of_another_cohort(patch: Patch) -> None:
    """Tokens are written into the blocks of the next cohort."""
    slots = attention.CohortAttention._slots_of

    def other(self: Any, parts: Any, group: int) -> TokenSlots:
        found = slots(self, parts, group)
        return found._replace(cohorts=(found.cohorts + 1) % self._host._sizes.count)

    patch.setattr(attention.CohortAttention, "_slots_of", other)


def _another_cohort_arrives(patch: Patch) -> None:
    """Cohorts are asked for in another order than they are attended to."""
    begin = HostKV.begin
    patch.setattr(HostKV, "begin", lambda self, cohorts, layers: begin(self, list(cohorts)[::-1], layers))


def _last_token_stale(patch: Patch) -> None:
    """The last token of a pass is not written."""
    write = HostKV.write

    def short(self: Any, at: Any, slots: TokenSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        write(self, at, TokenSlots(*(each[:-1] for each in slots)), k[:-1], v[:-1])

    patch.setattr(HostKV, "write", short)


def _buffer_reused(patch: Patch) -> None:
    """A buffer is written to again while its tokens are on their way."""
    write = HostKV.write

    def again(self: Any, *args: Any) -> None:
        write(self, *args)
        self._buffers.appendleft(self._written[-1].buffer)

    patch.setattr(HostKV, "write", again)


def _not_waited_for(patch: Patch) -> None:
    """Tokens are taken from their buffer before they have arrived there."""
    write = HostKV.write
    patch.setattr(host, "STAGINGS", 1)

    def unwaited(self: Any, *args: Any) -> None:
        write(self, *args)
        self._written[-1] = replace(self._written[-1], event=type("Event", (), {"synchronize": lambda self: None})())

    patch.setattr(HostKV, "write", unwaited)


def _layer_of_another(patch: Patch) -> None:
    """Tokens are written into the next layer."""
    plane = HostKV._plane

    def other(self: Any, at: Any, which: Any) -> torch.Tensor:
        layers = len(self._specs[at.group].group.layers)
        return plane(self, replace(at, index=(at.index + 1) % layers), which)

    patch.setattr(HostKV, "_plane", other)


def _rows_of_the_pass(patch: Patch) -> None:
    """The chunks of a cohort keep their rows of the whole pass: the tokens of others are stored for them."""

    def unmoved(cohort: int, here: bool, crosses: bool, batch: Any, chunks: Any) -> Any:
        first = chunks[0].begin
        count = chunks[-1].end - first
        moved = tuple(replace(each, begin=(each.begin - first + 1) % max(1, count - each.count + 1)) for each in chunks)
        return attention._Part(cohort, slice(first, chunks[-1].end), replace(batch, chunks=moved), here, crosses)

    patch.setattr(attention, "_part", unmoved)


def _moved_before_it_settled(patch: Patch) -> None:
    """Whole blocks are copied before the last tokens are in them."""
    patch.setattr(HostBlocks, "get", BlockMemory.get)
    patch.setattr(HostBlocks, "put", lambda self, block_id, content: BlockMemory.put(self, block_id, content.cpu()))


def _moved_without_waiting(patch: Patch) -> None:
    """Blocks that come from the device are taken before they are there."""
    patch.setattr(HostBlocks, "put", BlockMemory.put)


def _wrong_transform(patch: Patch) -> None:
    """New keys are stored as those of the group's first layer."""
    write = HostKV.write

    def first(self: Any, at: Any, *args: Any) -> None:
        store = self._store
        self._store = lambda pool, layer, *rest: store(pool, (layer + 1) % len(pool.spec.group.layers), *rest)
        write(self, at, *args)
        self._store = store

    patch.setattr(HostKV, "write", first)


def _stream_not_emptied(patch: Patch) -> None:
    """What a failed pass had asked for arrives in the next one."""
    patch.setattr(ShardStream, "drop", lambda self: None)


def _attended_before_it_settled(patch: Patch) -> None:
    """The CPU attends before the pass's own tokens are stored."""
    attend = HostKV.attend_here

    def early(self: Any, *args: Any) -> torch.Tensor:
        patch.setattr(HostKV, "settle", lambda self: None)
        found = attend(self, *args)
        patch.setattr(HostKV, "settle", settle)
        return found

    settle = HostKV.settle
    patch.setattr(HostKV, "attend_here", early)


def _queries_not_waited_for(patch: Patch) -> None:
    """The CPU reads queries before they have come down."""
    attend = HostKV.attend_here

    def early(self: Any, *args: Any) -> torch.Tensor:
        event = self._device.cuda.Event
        self._device.cuda.Event = type("Event", (), {"record": lambda _: None, "synchronize": lambda _: None})
        found = attend(self, *args)
        self._device.cuda.Event = event
        return found

    patch.setattr(HostKV, "attend_here", early)


def _queries_of_another(patch: Patch) -> None:
    """The CPU's rows of a pass are one off."""
    attend = HostKV.attend_here
    patch.setattr(HostKV, "attend_here", lambda self, q, rows, run: attend(self, q, rows.roll(1), run))


def _results_of_another(patch: Patch) -> None:
    """A cohort gets the results of the rows before its own."""
    attend = HostKV.attend_here
    patch.setattr(HostKV, "attend_here", lambda self, q, rows, run: attend(self, q, rows, run).roll(1, 0))


def _cohort_of_another(patch: Patch) -> None:
    """The CPU attends to the next cohort's blocks."""
    bind = HostKV.bind_here
    patch.setattr(HostKV, "bind_here", lambda self, cohort, at: bind(self, cohort % self._sizes.count + 1, at))


def _past_not_brought(patch: Patch) -> None:
    """The rest of a prompt attends to a window in which its beginning is not."""
    part_of = attention.CohortAttention._part_of
    patch.setattr(attention.CohortAttention, "_part_of", lambda self, chunk: (*part_of(self, chunk)[:2], False))


# By name: the bug, and what a run must do for it to show.
BUGS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "late write-back": (_late_write_back, ""),
    "cohort read before its copy": (_lane(seeded_bugs.NoReadyWait), ""),
    "copy into a slot that is read": (_lane(seeded_bugs.NoUsedWait), ""),
    "ready too early": (_lane(seeded_bugs.EarlyReady), ""),
    "window not bound": (_read_before_it_arrived, ""),
    "slot released before attention": (_released_before_attention, ""),
    "table of another cohort": (_table_of_another_cohort, ""),
    "cohorts in another order": (_another_cohort_arrives, ""),
    "last token stale": (_last_token_stale, ""),
    "buffer reused": (_buffer_reused, ""),
    "down copy not waited for": (_not_waited_for, ""),
    "layer of another": (_layer_of_another, ""),
    "rows of another cohort": (_rows_of_the_pass, ""),
    "moved before it settled": (_moved_before_it_settled, "moves"),
    "moved without waiting": (_moved_without_waiting, "moves"),
    "keys of another layer": (_wrong_transform, "offsets"),
    "stream not emptied": (_stream_not_emptied, "fails"),
    "attended before it settled": (_attended_before_it_settled, "here"),
    "queries not waited for": (_queries_not_waited_for, "here"),
    "queries of another row": (_queries_of_another, "here"),
    "results of another row": (_results_of_another, "here"),
    "blocks of another cohort": (_cohort_of_another, "here"),
    "past not brought": (_past_not_brought, "here"),
}
