"""Fuses the decoder layers of a loaded model where a self-test at load agrees with the seams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....moe.expert import ExpertBody, ExpertGroups, ResidentExpert
from ....quant.matmul.matmul import Matmul, ParallelMatmul
from ....quant.matmul.selftest import ANY_KERNEL, BOUNDS, errors
from ....quant.matmul.tiled import MOST_ROWS
from ....quant.native.library import available
from ....quant.tensor import dtype_name
from ...attention.protocol import AttentionCall
from ...engine.sequence import Batch, pack
from ...engine.sequence import Sequence as TokenSequence
from ...kv.cache import KVCache
from ...plan.candidate import SELFTEST_ROWS
from ...sampling.params import SequenceSampling
from ..runner import ModelRunner
from .decoder import FusedDecoder, FusedExecutor
from .layer import Buffers, FusedLayer, LayerParts, Mixture, parts_of

# Tokens stored before, and tokens of the pass, of the sequences of a self-test.
_PASTS = ((0, 4), (100, 1), (611, 6), (5, 5))
# Of a row's units of roundoff: a layer rounds after each norm and product, and the seams round in other places.
_BOUND = 3 * BOUNDS[dtype_name(torch.bfloat16)]


@dataclass
class StubAttention:
    """Replaces attention in a self-test: any function of queries, keys and values shows what they were."""

    calls: list[AttentionCall]
    captured: list[Tensor]

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self.calls.append(call)
        self.captured += (q.clone(), k.clone(), v.clone())
        group = q.shape[1] // k.shape[1]
        return q + (k + v).repeat_interleave(group, 1)


class StubExperts(ExpertBody):
    """Replaces experts that stream in a self-test, so that none is read: each multiplies by a number of its own."""

    def forward_by_kernel(
        self,
        hidden: Tensor,
        rows: Tensor,
        groups: ExpertGroups,
        residents: list[ResidentExpert],
        compute: Matmul,
    ) -> bool:
        for one in residents:
            mine = groups.rows(one.expert_id)
            rows[mine] = hidden[groups.token_ids[mine]] * ((one.expert_id + 1) / len(groups.counts))
        return True


@dataclass
class StubSource:
    """Replaces the source of such experts, which have no weights."""

    num_experts: int
    weights: Any = None

    def foresee(self, hidden: Tensor, per_token: int) -> tuple[Tensor, ...]:
        return ()

    def fetch(self, groups: ExpertGroups, hidden: Tensor, rows: Tensor) -> Iterator[list[ResidentExpert]]:
        yield [ResidentExpert(expert, self.weights) for expert in groups.wanted]


@contextmanager
def stub_experts(layers: Iterable[LayerParts]) -> Iterator[None]:
    """While entered, no expert of these layers that streams is read."""
    mixtures = [each.mixture for each in layers if each.mixture is not None and each.mixture.held is None]
    before = [(each.module, each.module.source, each.module.body) for each in mixtures]
    try:
        for module, source, body in before:
            module.source = StubSource(source.num_experts)
            module.body = StubExperts(body.activate)
        yield
    finally:
        for module, source, body in before:
            module.source, module.body = source, body


@dataclass
class LayerCall:
    """A call of a layer by the seams: its arguments, its result, and the experts [T, A] that its router chose."""

    hidden: Tensor
    named: dict[str, Any]
    out: Any = None
    ids: Tensor | None = None

    def watch(self, layer: nn.Module, mixture: Mixture | None) -> list[RemovableHandle]:
        """Hooks a layer whose next call is to be kept."""

        def keep_arguments(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.hidden, self.named = (args[0] if args else named["hidden_states"]), named

        def keep_choice(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.ids = args[1].clone()

        def keep_result(module: nn.Module, args: Any, out: Any) -> None:
            self.out = out

        hooks = [
            layer.register_forward_pre_hook(keep_arguments, with_kwargs=True),
            layer.register_forward_hook(keep_result),
        ]
        return hooks if mixture is None else [*hooks, mixture.module.register_forward_pre_hook(keep_choice)]


def fuse(
    runner: ModelRunner, layers: Sequence[nn.Module], vocab: int, compute: ParallelMatmul, nbytes: int, most_rows: int
) -> list[FusedLayer]:
    """Replaces `forward` of the decoder layers that the library's steps compute, and returns what replaces them.

    All weights of `runner` but experts are held in memory; `nbytes` may be taken for buffers of at most `most_rows`
    rows.
    """
    if not available() or compute.deterministic or compute.device.type != "cpu":
        return []
    if runner.states is not None:
        return []
    with torch.inference_mode():
        found = {index: parts for index, layer in enumerate(layers) if (parts := parts_of(layer))}
        of_row = sum({Buffers.key(parts): Buffers.nbytes(parts) for parts in found.values()}.values())
        rows = min(max(most_rows, SELFTEST_ROWS), nbytes // of_row) if found else 0
        if rows < SELFTEST_ROWS:
            return []
        with stub_experts(found.values()):
            return _fused(runner, layers, found, rows, vocab, compute)


def _fused(
    runner: ModelRunner,
    layers: Sequence[nn.Module],
    found: Mapping[int, LayerParts],
    rows: int,
    vocab: int,
    compute: ParallelMatmul,
) -> list[FusedLayer]:
    """Those of the layers `found`, by their index, that compute the same; their `forward` is replaced."""
    stub = StubAttention([], [])
    calls = _calls_by_seams(runner, [layers[index] for index in found], list(found.values()), stub, vocab)
    shared: dict[tuple[object, ...], Buffers] = {}
    fused: list[FusedLayer] = []
    for (index, parts), expected in zip(found.items(), calls, strict=True):
        key = Buffers.key(parts)
        if key not in shared:
            shared[key] = Buffers(parts, rows)
        call = next(call for call in stub.calls if call.layer == index)
        layer = FusedLayer(parts, shared[key], compute, layers[index].forward, call)
        at = 3 * stub.calls.index(call)
        captured = stub.captured[at : at + 3]
        # Which rows an expert gets depends on no weights: one layer shows it.
        usable = call.latent is None and (
            ANY_KERNEL.get()
            or (_agrees(layer, expected, captured) and (bool(fused) or _takes_many_rows(layer, expected)))
        )
        if usable:
            layers[index].forward = layer.forward
            fused.append(layer)
    return fused


assert sum(count for _, count in _PASTS) == SELFTEST_ROWS, "what the planner leaves memory for"


def _batch(vocab: int) -> Batch:
    chosen = []
    for index, (past, count) in enumerate(_PASTS):
        ids = [(7 * index + 13 * position) % vocab for position in range(past + count)]
        sequence = TokenSequence(ids, SequenceSampling(1))
        sequence.table.num_tokens = past
        chosen.append((sequence, count))
    return pack(chosen)


def _calls_by_seams(
    runner: ModelRunner, layers: Sequence[nn.Module], parts: Sequence[LayerParts], stub: StubAttention, vocab: int
) -> list[LayerCall]:
    """What the layers compute by the seams in a pass of few tokens."""
    before, calls = runner.attention, [LayerCall(torch.empty(0), {}) for _ in layers]
    triples = zip(layers, parts, calls, strict=True)
    hooks = [hook for layer, part, call in triples for hook in call.watch(layer, part.mixture)]
    runner.attention = stub
    try:
        runner.forward(_batch(vocab))
    finally:
        runner.attention = before
        for hook in hooks:
            hook.remove()
    return calls


def _agrees(layer: FusedLayer, expected: LayerCall, qkv: Sequence[Tensor]) -> bool:
    """Whether the layer gives what the seams gave, for rows for which it chose the same experts: most of them."""
    if not isinstance(expected.out, Tensor) or "position_embeddings" not in expected.named:
        return False
    stub = StubAttention([], [])
    named = {name: value for name, value in expected.named.items() if name != "hidden_states"}
    named["packed"] = replace(named["packed"], attention=stub)
    out = layer.forward(expected.hidden, **named)
    if layer.taken == 0 or not all(map(_rows_agree, stub.captured, qkv)):
        return False
    same = torch.ones(out.shape[1], dtype=torch.bool)
    if layer.chosen is not None:
        if expected.ids is None:
            return False
        same = (layer.chosen[: len(same)].sort(-1).values == expected.ids.sort(-1).values).all(-1)
    found, wanted, hidden = (x[0, same].float() for x in (out, expected.out, expected.hidden))
    # Both round their sums of hidden states to bfloat16, twice, which are large beside what some layers add.
    rounded = 2 * torch.finfo(torch.bfloat16).eps * wanted.norm(dim=-1)
    allowed = _BOUND * (wanted - hidden).norm(dim=-1) + rounded
    return bool(same.float().mean() >= 0.5) and bool(((found - wanted).norm(dim=-1) <= allowed).all())


def _takes_many_rows(layer: FusedLayer, expected: LayerCall) -> bool:
    """Whether one token many times, all of whose rows go to the same experts, more than one call takes, has one
    result."""
    many = min(layer.most_rows, MOST_ROWS + 5)
    embeddings = tuple(each[:, :1].repeat(1, many, 1) for each in expected.named["position_embeddings"])
    packed = replace(expected.named["packed"], attention=StubAttention([], []))
    out = layer.forward(expected.hidden[:, :1].repeat(1, many, 1), position_embeddings=embeddings, packed=packed)
    return torch.equal(out, out[:, :1].expand_as(out))


def _rows_agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether no row, nor row of a head, differs by more than what products, norms and their rounding make."""
    return float(errors(found, wanted).max()) <= _BOUND


# Tokens of the prompts of the self-test of a whole decoder; each of them is in blocks of its own. The last one is in
# the pass that is compared.
_LENGTHS = (5, 18, 11)


def fused_executor(
    runner: ModelRunner, layers: Sequence[FusedLayer], count: int, vocab: int, compute: ParallelMatmul, cache: KVCache
) -> FusedExecutor | None:
    """The executor of all layers together; None where not all `count` were fused, or where a self-test does not give
    the bits that the model's own forward gives with layers one by one."""
    if not layers or len(layers) != count:
        return None
    with torch.inference_mode(), stub_experts(layer.parts for layer in layers):
        decoder = FusedDecoder.of(layers, compute, runner.attention)
        sequences = None if decoder is None else _stored_sequences(cache, vocab)
        if decoder is None or sequences is None:
            return None
        *decoding, prompt = sequences
        runner.forward(pack([(each, each.num_tokens) for each in decoding]))
        for each in decoding:
            each.table.num_tokens = each.num_tokens
            each.output_ids.append(1)
        batch = pack([*((each, 1) for each in decoding), (prompt, prompt.num_tokens)])
        expected = runner.forward(batch)
        try:
            executor = FusedExecutor(runner, decoder, compute)
            same = torch.equal(executor.forward(batch), expected)
        except (AttributeError, TypeError):
            # A model whose modules are other ones.
            return None
        return executor if same and decoder.taken else None


def _stored_sequences(cache: KVCache, vocab: int) -> list[TokenSequence] | None:
    """Sequences whose blocks are free ones of an empty cache; None where it has too few."""
    sequences, taken = [], 0
    for length in _LENGTHS:
        blocks = -(-(length + 1) // cache.block)
        sequence = TokenSequence([(31 * length + 7 * each) % vocab for each in range(length)], SequenceSampling(2))
        sequence.table.blocks = [list(range(taken, taken + blocks)) for _ in cache.pools]
        sequences.append(sequence)
        taken += blocks
    return sequences if all(taken <= len(pool.memory) for pool in cache.pools) else None
