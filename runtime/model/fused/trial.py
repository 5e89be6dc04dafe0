"""Fuses the decoder layers of a loaded model where a trial at load agrees with the seams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....quant.matmul.matmul import ParallelMatmul
from ....quant.native.library import available
from ...attention.protocol import AttentionCall
from ...engine.batch import Batch, pack
from ...engine.sequence import Sequence as TokenSequence
from ...kv.cache import KVCache
from ...plan.candidate import TRIAL_ROWS
from ...sampling.params import SamplingParams
from .layer import Buffers, FusedLayer
from .stack import FusedStack
from .structure import LayerParts, close, parts_of

# Tokens stored before, and tokens of the pass, of the sequences of a trial.
_PASTS = ((0, 4), (100, 1), (611, 6), (5, 5))


@dataclass
class Probe:
    """Replaces attention in a trial: any function of queries, keys and values shows what they were."""

    calls: list[AttentionCall]
    given: list[Tensor]

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self.calls.append(call)
        self.given += (q.clone(), k.clone(), v.clone())
        group = q.shape[1] // k.shape[1]
        return q + (k + v).repeat_interleave(group, 1)


@dataclass
class Record:
    """A call of a layer by the seams: its arguments, its result, and the experts [T, A] that its router chose."""

    hidden: Tensor
    named: dict[str, Any]
    out: Any = None
    ids: Tensor | None = None


def fuse(
    runner: Any, layers: Sequence[nn.Module], vocab: int, compute: ParallelMatmul, nbytes: int, most_rows: int
) -> list[FusedLayer]:
    """Replaces `forward` of the decoder layers that the library's steps compute, and returns what replaces them.

    `runner` is the model's ModelRunner, whose weights are all held in memory; `nbytes` may be taken for buffers of at
    most `most_rows` rows.
    """
    if not available() or compute.deterministic or compute.device.type != "cpu":
        return []
    if runner.states is not None or any(pool.spec.group.is_latent for pool in runner.attention.cache.pools):
        return []
    with torch.inference_mode():
        found = {index: parts for index, layer in enumerate(layers) if (parts := parts_of(layer))}
        of_row = sum({Buffers.key(parts): Buffers.nbytes(parts) for parts in found.values()}.values())
        rows = min(max(most_rows, TRIAL_ROWS), nbytes // of_row) if found else 0
        if rows < TRIAL_ROWS:
            return []
        probe = Probe([], [])
        records = _records(runner, [layers[index] for index in found], list(found.values()), probe, vocab)
        shared: dict[tuple[object, ...], Buffers] = {}
        fused = []
        for (index, parts), record in zip(found.items(), records, strict=True):
            key = Buffers.key(parts)
            if key not in shared:
                shared[key] = Buffers(parts, rows)
            call = next(call for call in probe.calls if call.layer == index)
            layer = FusedLayer(parts, shared[key], compute, layers[index].forward, call)
            at = 3 * probe.calls.index(call)
            if call.latent is None and _agrees(layer, record, probe.given[at : at + 3]):
                layers[index].forward = layer.forward
                fused.append(layer)
    return fused


assert sum(count for _, count in _PASTS) == TRIAL_ROWS, "what the planner leaves memory for"


def _batch(vocab: int) -> Batch:
    chosen = []
    for index, (past, count) in enumerate(_PASTS):
        ids = [(7 * index + 13 * position) % vocab for position in range(past + count)]
        sequence = TokenSequence(ids, SamplingParams(1))
        sequence.table.num_tokens = past
        chosen.append((sequence, count))
    return pack(chosen)


def _records(
    runner: Any, layers: Sequence[nn.Module], parts: Sequence[LayerParts], probe: Probe, vocab: int
) -> list[Record]:
    """What the layers compute by the seams in a pass of few tokens."""
    before, records = runner.attention, [Record(torch.empty(0), {}) for _ in layers]
    runner.attention = probe
    try:
        with _recording(layers, parts, records):
            runner.forward(_batch(vocab))
    finally:
        runner.attention = before
    return records


@contextmanager
def _recording(layers: Sequence[nn.Module], parts: Sequence[LayerParts], records: Sequence[Record]) -> Iterator[None]:
    hooks = []
    for layer, part, record in zip(layers, parts, records, strict=True):
        hooks += [
            layer.register_forward_pre_hook(_remember_arguments(record), with_kwargs=True),
            layer.register_forward_hook(_remember_result(record)),
            part.experts.register_forward_pre_hook(_remember_choice(record)),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _remember_arguments(record: Record) -> Callable[..., None]:
    def remember(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        record.hidden, record.named = (args[0] if args else named["hidden_states"]), named

    return remember


def _remember_result(record: Record) -> Callable[..., None]:
    def remember(module: nn.Module, args: Any, out: Any) -> None:
        record.out = out

    return remember


def _remember_choice(record: Record) -> Callable[..., None]:
    def remember(module: nn.Module, args: tuple[Any, ...]) -> None:
        record.ids = args[1].clone()

    return remember


def _agrees(layer: FusedLayer, record: Record, qkv: Sequence[Tensor]) -> bool:
    """Whether the layer gives what the seams gave, for rows for which it chose the same experts: most of them."""
    if not isinstance(record.out, Tensor) or record.ids is None or "position_embeddings" not in record.named:
        return False
    probe = Probe([], [])
    named = {name: value for name, value in record.named.items() if name != "hidden_states"}
    named["packed"] = replace(named["packed"], attention=probe)
    out = layer.forward(record.hidden, **named)
    if layer.taken == 0 or not all(map(close, probe.given, qkv)):
        return False
    mine = layer.routed.ids[: record.ids.shape[0]].sort(-1).values
    same = (mine == record.ids.sort(-1).values).all(-1)
    added, meant = (x[0, same].double() - record.hidden[0, same].double() for x in (out, record.out))
    return bool(same.float().mean() >= 0.5) and close(added, meant)


# Tokens of the prompts of a trial of a stack; each of them is in blocks of its own.
_LENGTHS = (5, 1, 18)


def stack_of(
    runner: Any, layers: Sequence[FusedLayer], count: int, vocab: int, compute: ParallelMatmul
) -> FusedStack | None:
    """All layers together, where all `count` were fused and a trial gives the bits that they give one by one."""
    if not layers or len(layers) != count:
        return None
    with torch.inference_mode():
        stack = FusedStack.of(layers, compute, runner.attention)
        sequences = None if stack is None else _stored_sequences(runner.attention.cache, vocab)
        if stack is None or sequences is None:
            return None
        runner.forward(pack([(each, each.num_tokens) for each in sequences]))
        for each in sequences:
            each.table.num_tokens = each.num_tokens
            each.output_ids.append(1)
        batch = pack([(each, 1) for each in sequences])
        meant = runner.forward(batch)
        runner.use(stack)
        same = stack.begin(batch) and torch.equal(runner.forward(batch), meant)
        if not same:
            runner.use(None)
            return None
        runner.direct = True
        runner.direct = _computes(runner, batch, meant)
        return stack


def _computes(runner: Any, batch: Batch, meant: Tensor) -> bool:
    """Whether the runner gives these logits; a model whose modules are other ones raises."""
    try:
        return torch.equal(runner.forward(batch), meant)
    except (AttributeError, TypeError):
        return False


def _stored_sequences(cache: KVCache, vocab: int) -> list[TokenSequence] | None:
    """Sequences whose blocks are free ones of an empty cache; None where it has too few."""
    sequences, taken = [], 0
    for length in _LENGTHS:
        blocks = -(-(length + 1) // cache.block)
        sequence = TokenSequence([(31 * length + 7 * each) % vocab for each in range(length)], SamplingParams(2))
        sequence.table.blocks = [list(range(taken, taken + blocks)) for _ in cache.pools]
        sequences.append(sequence)
        taken += blocks
    return sequences if all(taken <= len(pool.memory) for pool in cache.pools) else None
