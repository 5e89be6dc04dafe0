"""`check`: an engine's logits, and what its layers return, beside those of transformers for the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant.matmul.selftest import ANY_KERNEL
from ...quant.tensor import TORCH_DTYPES
from ..engine import sequence
from ..engine.sequence import Batch
from ..jobs.lifecycle import OpenModel
from ..loading.prepare import precision
from ..model.experts_seam import PackedExperts
from ..model.fused.layer import FusedLayer
from ..model.runner import ModelRunner
from ..plan.placement import Workload
from ..sampling.params import SequenceSampling
from ..settings.errors import SettingError
from ..settings.settings import Budgets, Settings
from ..settings.stages import stage
from ..shape.shards import ModelShards
from ..source.model_source import ModelSource, open_source
from .parts import MOST_ROUNDINGS, Part, PartErrors
from .reference import FormatWeights, LocalErrors, Reference, compute_reference, hidden_of

SCHEMA = "moedge.check/3"
MAX_TOKENS = 8
PROMPTS = (
    "The harbour was quiet when the last ferry came in, and",
    "def mean(values: list[float]) -> float:\n    return",
    "1, 2, 4, 8, 16,",
    "今日は天気が",
)
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
# What a layer, or the output head, may always differ from the reference's for the same input, by dtype: 4 units of
# roundoff, and in float32, where it depends on the order of sums, what wrong numbers exceed tenfold. Where one unit in
# the input of the reference's own layer changes its output by more than that, MOST_ROUNDINGS times that change: right
# engines were seen to differ by up to 4.7 times.
ALWAYS_MOST = {"fp32": 1e-4, "fp16": 2.0**-9, "bf16": 2.0**-6}
# Of a layer's tokens, the most for which a router may choose other experts than the reference's for the same input.
MOST_REROUTED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """How far an engine's numbers are from the reference's.

    From end to end: `max_abs` is the greatest difference of two logits, `max_relative` that divided by the greatest
    logit, `kl` the greatest KL divergence of a next token's distribution, in nats; `layers` are the relative L2
    differences of the hidden states after each decoder layer.

    From the same input, which decides: `local` has for each decoder layer the greatest relative L2 difference of a
    token's hidden states, of those tokens whose router chose the same experts, and `rerouted` the share of the others:
    of the prompts' tokens or of the generated ones, which other kernels compute, the greater. `rounding` says by how
    much the reference's layer itself changes with its input rounded in the dtype. `head` is the greatest relative
    difference of logits. `parts_at` is the first layer that is over its bound, or None.

    `reference` is "transformers" or "layers", and `why` says why not the former. `lossless` says that the engine's
    weights mean exactly what the checkpoint's do; if they do not, `loss` has the relative errors of packing, by group.
    """

    model: str
    against: str
    reference: str
    why: str
    quant: str
    dtype: str
    prompts: int
    tokens: int
    max_abs: float
    max_relative: float
    kl: float
    greedy_same: int
    greedy_total: int
    layers: tuple[float, ...]
    local: tuple[float, ...]
    rounding: tuple[float, ...]
    rerouted: tuple[float, ...]
    head: float
    parts: tuple[Part, ...]
    compute: str
    kv: str
    loss: dict[str, float] = field(default_factory=dict)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The most of each layer's `local`."""
        return tuple(max(ALWAYS_MOST[self.dtype], MOST_ROUNDINGS * each) for each in self.rounding)

    @property
    def parts_at(self) -> int | None:
        """The first layer that returns something else than the reference's for the same input, if any does."""
        pairs = enumerate(zip(self.local, self.bounds, self.rerouted, strict=True))
        return next((at for at, (error, most, share) in pairs if not (error <= most and share <= MOST_REROUTED)), None)

    @property
    def wrong_part(self) -> Part | None:
        """The first part of a layer that is over its bound, if any is."""
        wrong = [part for part in self.parts if not part.within]
        return min(wrong, key=lambda part: len(self.layers) if part.layer is None else part.layer, default=None)

    @property
    def within(self) -> bool:
        """Whether the numbers are as near as the formats and the dtype let expect."""
        if not all(map(isfinite, (self.max_abs, self.kl, self.head, *self.layers, *self.local, *self.rounding))):
            return False
        return self.wrong_part is None and self.parts_at is None and self.head <= ALWAYS_MOST[self.dtype]

    @property
    def difference(self) -> str:
        """What is wrong first, by how much, and what was wanted; "" where all is within bounds."""
        part, at = self.wrong_part, self.parts_at
        if part is not None and (at is None or part.layer is None or part.layer <= at):
            return f"{part}"
        if at is not None and self.rerouted[at] > MOST_REROUTED:
            share = f"for {self.rerouted[at]:.0%} of its tokens, wanted at most {MOST_REROUTED:.0%}"
            return f"layer {at} is the first to part, from the same input: its router chooses other experts {share}"
        if at is not None:
            much = f"by {self.local[at]:.1e}, wanted {self.bounds[at]:.1e}"
            return f"layer {at} is the first to part, from the same input: its output differs {much}"
        if self.within:
            return ""
        much = f"by {self.head:.1e}, wanted {ALWAYS_MOST[self.dtype]:.0e}"
        return f"all layers agree, but the output head, or the norm before it, differs {much}"

    def as_dict(self) -> dict[str, Any]:
        """The document of `moedge check --json`."""
        layers = [each if isfinite(each) else None for each in self.bounds]
        bound = {"local": layers, "head": ALWAYS_MOST[self.dtype], "rerouted": MOST_REROUTED}
        # JSON has no NaN.
        found = {name: value if _is_number(value) else None for name, value in asdict(self).items()}
        for name in ("layers", "local", "rounding"):
            found[name] = [value if isfinite(value) else None for value in getattr(self, name)]
        found["parts"] = [
            {name: value if _is_number(value) else None for name, value in part._asdict().items()}
            for part in self.parts
        ]
        head = {"schema": SCHEMA, "version": version("moedge")}
        return {**head, **found, "parts_at": self.parts_at, "bound": bound, "within": self.within}


def _is_number(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def check(
    model: str | Path,
    prompts: Sequence[str] = (),
    *,
    against: str | Path | None = None,
    quant: str = "auto",
    dtype: str = "auto",
    budgets: Budgets | None = None,
    compute: str = "auto",
    kv: str = "auto",
    deterministic: bool = False,
) -> CheckReport:
    """Computes a few prompts with moedge's engine on the CPU, and again with transformers alone, in float32.

    Transformers computes every layer from what its own layer before returned, and from what the engine's did.

    `model` is a checkpoint, or prepared weights whose checkpoint is `against`. `prompts` are texts, without a chat
    template; built in ones where there are none. The engine generates 8 tokens for each, and transformers computes the
    same tokens. The other settings are those of a job; `quant` "auto" is the most precise format that the files let
    expect: their own codes where those are kept, and `kv` "auto" is the dtype. Kernels are used that a job would
    refuse.

    Both are within the host memory of `budgets`, one after the other. Raises SettingError, DoesNotFit, and what reading
    a checkpoint raises.
    """
    chosen = budgets or Budgets(gpu_mem="0")
    with ExitStack() as opened:
        engine = opened.enter_context(OpenModel(str(model)))
        other = engine.source
        if engine.source.store is not None:
            if against is None:
                raise SettingError(
                    f"{model} has no weights but packed ones; give their checkpoint: --against CHECKPOINT"
                )
            other = opened.enter_context(open_source(str(against), tokenizer=False))
            _refuse_others(engine.source, other)
        elif against is not None:
            raise SettingError("--against is for prepared weights; a checkpoint is compared with itself")
        else:
            quant, dtype = precision(engine.source, quant, dtype)
        encoded = _encode(engine, prompts or PROMPTS)
        native = dtype if dtype != "auto" else engine.source.recipe.get("dtype", engine.source.shape.dtype)
        settings = Settings(quant=quant, dtype=dtype, kv=native, compute=compute, deterministic=deterministic)
        traced = _trace(engine, encoded, settings, chosen)
        # Its memory is the reference's now; the small files of a GGUF file stay.
        engine.close_engines()
        if kv not in ("auto", native):
            # The reference has keys and values as they are computed: attention over codes is compared by itself.
            over = _trace(engine, encoded, replace(settings, kv=kv), chosen)
            traced = traced._replace(parts=over.parts, kv=over.kv)
            engine.close_engines()
        tries: list[LocalErrors] = []

        def local() -> LocalErrors:
            tries.append(LocalErrors(traced.hidden, traced.chosen, ROUNDOFF[traced.dtype]))
            return tries[-1]

        formats = FormatWeights(traced.shards, traced.compute == "int8")
        reference = compute_reference(other, traced.token_ids, traced.rows, chosen.host_nbytes(), local, formats)
    return _report(str(model), str(against or model), traced, reference, tries[-1])


def _refuse_others(source: ModelSource, other: ModelSource) -> None:
    if other.store is not None:
        raise SettingError(f"{other.name} is prepared, too; --against takes the checkpoint that they were made from")
    first, second = ((each.shape.model_type, each.shape.hidden, len(each.shape.layers)) for each in (source, other))
    if first != second:
        raise SettingError(
            f"{source.name} was made from another model than {other.name}: {first[0]}, {first[1]} wide, {first[2]} "
            f"layers and {second[0]}, {second[1]} wide, {second[2]} layers"
        )


def _encode(engine: OpenModel, prompts: Iterable[str]) -> list[list[int]]:
    encoded, most = [engine.tokenizer.encode(prompt) for prompt in prompts], engine.source.shape.context - MAX_TOKENS
    for text, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) <= most:
            raise SettingError(f"a prompt has {len(ids):,} tokens, wanted 1 to {most:,}: {text[:40]!r}")
    return encoded


class _Traced(NamedTuple):
    """What an engine computed: token_ids [S, T], padded at their end; which of them it computed, [S, T]; the `rows` of
    T whose logits are wanted of any sequence; logits [S, G, V] and tokens [S, G] of each generated one, at `positions`
    [S, G] of T; hidden [L, S, T, D] after each layer, and the experts that it chose, [S, T, K], or None."""

    token_ids: Tensor
    computed: Tensor
    rows: Tensor
    positions: Tensor
    logits: Tensor
    generated: Tensor
    hidden: Tensor
    chosen: list[Tensor | None]
    quant: str
    dtype: str
    compute: str
    kv: str
    parts: tuple[Part, ...]
    shards: ModelShards
    loss: dict[str, float]


class _Recorder:
    """Stands between an engine and its model, and keeps what comes out of the layers, and the logits."""

    def __init__(
        self, runner: ModelRunner, sequences: Sequence[sequence.Sequence], hidden: Tensor, logits: Tensor
    ) -> None:
        self._runner = runner
        self._index = {each: index for index, each in enumerate(sequences)}
        self._hidden = hidden
        self._logits = logits
        self._batch: Batch | None = None
        self._routed: tuple[Tensor, Tensor] | None = None
        self.computed = torch.zeros(hidden.shape[1:3], dtype=torch.bool)
        self.chosen: list[Tensor | None] = [None] * len(hidden)
        for index, layer in enumerate(runner.layers):
            layer.register_forward_hook(lambda module, _, out, index=index: self._keep(index, module, out))
            for module in layer.modules():
                if isinstance(module, PackedExperts):
                    module.register_forward_pre_hook(self._route)

    def forward(self, batch: Batch) -> Tensor:
        self._batch = batch
        logits = self._runner.forward(batch)
        for each, row in zip(batch.sampling, logits, strict=False):
            self._logits[self._index[each], len(each.output_ids)] = row.cpu()
        return logits

    def _route(self, module: Any, given: Any) -> None:
        self._routed = given[1], given[2]

    def _keep(self, layer: int, module: Any, out: Any) -> None:
        assert self._batch is not None
        states = hidden_of(out)[0]
        chosen = self._chosen(module, states)
        for chunk in self._batch.chunks:
            index, where = self._index[chunk.sequence], slice(chunk.past, chunk.past + chunk.count)
            self._hidden[layer, index, where] = states[chunk.begin : chunk.end].float().cpu()
            self.computed[index, where] = True
            if chosen is not None:
                kept = self.chosen[layer]
                if kept is None:
                    kept = self.chosen[layer] = torch.full((*self.computed.shape, chosen.shape[1]), -1)
                kept[index, where] = chosen[chunk.begin : chunk.end].cpu()

    def _chosen(self, module: Any, states: Tensor) -> Tensor | None:
        """The experts [T, K] that a layer chose in this pass, -1 for one with weight zero; None in a dense layer."""
        routed, self._routed = self._routed, None
        if routed is not None:
            ids, weights = (each.reshape(len(states), -1) for each in routed)
            return ids.masked_fill(weights == 0, -1)
        fused = getattr(module.forward, "__self__", None)
        chosen = fused.chosen if isinstance(fused, FusedLayer) else None
        return None if chosen is None else chosen[: len(states)]


def _trace(model: OpenModel, prompts: list[list[int]], settings: Settings, budgets: Budgets) -> _Traced:
    shape, most = model.source.shape, max(map(len, prompts)) + MAX_TOKENS
    before = ANY_KERNEL.set(True)
    try:
        # Experts are compared as a device gets them.
        loaded = model.load(replace(settings, cpu_experts="off"), budgets, Workload(len(prompts), most))
    finally:
        ANY_KERNEL.reset(before)
    sequences = [sequence.Sequence(each, SequenceSampling(MAX_TOKENS, ignore_eos=True)) for each in prompts]
    hidden = torch.zeros(len(shape.layers), len(prompts), most - 1, shape.streams * shape.hidden)
    logits = torch.zeros(len(prompts), MAX_TOKENS, shape.vocab)
    engine, runner = loaded.engine.engine, loaded.engine.model
    # All layers in one call have no parts. Loading compared it with layers one by one, bit for bit.
    runner.use(None)
    for layer in loaded.engine.fused:
        # Prompts go part by part, generated tokens by fused layers.
        layer.most_rows = min(layer.most_rows, len(prompts))
    parts = PartErrors(runner, TORCH_DTYPES[loaded.policy.plan.dtype])
    engine.model = recorder = _Recorder(runner, sequences, hidden, logits)
    with stage("computing with moedge"):
        for each in sequences:
            engine.add(each)
        for _ in engine.run():
            pass
    token_ids = torch.zeros(len(prompts), most - 1, dtype=torch.long)
    generated = torch.zeros(len(prompts), MAX_TOKENS, dtype=torch.long)
    for row, said, each in zip(token_ids, generated, sequences, strict=True):
        ids = [*each.prompt_ids, *each.output_ids[:-1]]
        row[: len(ids)] = torch.tensor(ids)
        # Fewer where logits were not finite.
        said[: len(each.output_ids)] = torch.tensor(list(each.output_ids))
    _fill_shared(token_ids, recorder.computed, hidden, [len(each) + MAX_TOKENS - 1 for each in prompts])
    positions = torch.tensor([range(len(each) - 1, len(each) - 1 + MAX_TOKENS) for each in prompts])
    plan = loaded.policy.plan
    return _Traced(
        token_ids, recorder.computed, torch.unique(positions), positions, logits, generated, hidden, recorder.chosen,
        plan.quant, plan.dtype, plan.compute, plan.kv, parts.parts, loaded.engine.shards, dict(loaded.engine.loss),
    )  # fmt: skip


def _fill_shared(token_ids: Tensor, computed: Tensor, hidden: Tensor, lengths: Sequence[int]) -> None:
    """Copies the hidden states of a beginning that a sequence shares with another one, which computed it."""
    known = computed.clone()
    for index, length in enumerate(lengths):
        missing = (~known[index, :length]).nonzero().flatten()
        if not len(missing):
            continue
        end = int(missing[-1]) + 1
        for other in range(len(lengths)):
            if known[other, :end].all() and torch.equal(token_ids[other, :end], token_ids[index, :end]):
                hidden[:, index, missing] = hidden[:, other, missing]
                known[index, missing] = True
                break


def _report(model: str, against: str, traced: _Traced, reference: Reference, local: LocalErrors) -> CheckReport:
    wanted = _chosen(reference.passed.logits, traced)
    difference, greatest = (traced.logits - wanted).abs().max(), wanted.abs().max()
    kl = F.kl_div(traced.logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert reference.passed.from_engine is not None
    same_input = _chosen(reference.passed.from_engine, traced)
    head = (traced.logits - same_input).abs().amax(-1) / same_input.abs().amax(-1)
    same = [traced.computed & ~each for each in local.rerouted]
    generated = torch.zeros_like(traced.computed).scatter_(1, traced.positions[:, 1:], True)
    ways = [way for way in (traced.computed & generated, traced.computed & ~generated) if way.any()]
    return CheckReport(
        model=model,
        against=against,
        reference=reference.by,
        why=reference.why,
        quant=traced.quant,
        dtype=traced.dtype,
        prompts=len(traced.token_ids),
        tokens=int(traced.computed.sum()),
        max_abs=float(difference),
        max_relative=float(difference / greatest),
        kl=max(0.0, float(kl.max())),
        greedy_same=int((wanted.argmax(-1) == traced.generated).sum()),
        greedy_total=traced.generated.numel(),
        layers=_differences(traced, reference.passed.hidden),
        local=_greatest(local.relative, same),
        rounding=_greatest(local.shaken, [traced.computed] * len(same)),
        rerouted=tuple(max(float(each[way].float().mean()) for way in ways) for each in local.rerouted),
        head=float(head.max()),
        parts=traced.parts,
        compute=traced.compute,
        kv=traced.kv,
        loss=traced.loss,
    )


def _chosen(logits: Tensor, traced: _Traced) -> Tensor:
    """The reference's logits [S, G, V] where the engine generated."""
    where = torch.searchsorted(traced.rows, traced.positions)
    return torch.stack([one[rows] for one, rows in zip(logits, where, strict=True)])


def _greatest(numbers: Sequence[Tensor], which: Sequence[Tensor]) -> tuple[float, ...]:
    """By layer, the greatest of the numbers [S, T] of some tokens; zero where there is none."""
    pairs = zip(numbers, which, strict=True)
    return tuple(float(one[of].max()) if of.any() else 0.0 for one, of in pairs)


def _differences(traced: _Traced, wanted: Tensor) -> tuple[float, ...]:
    """|found - wanted| / |wanted| of each layer, over the tokens that the engine computed."""
    pairs = zip(traced.hidden, wanted, strict=True)
    found = [(one[traced.computed], other[traced.computed]) for one, other in pairs]
    return tuple(float((one - other).norm() / other.norm()) for one, other in found)
