"""`check`: an engine's logits, and what its layers return, beside those of transformers for the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.model import OpenModel
from ..engine import sequence
from ..engine.batch import Batch
from ..loading.prepare import precision
from ..model.runner import ModelRunner
from ..plan.placement import Workload
from ..sampling.params import SamplingParams
from ..settings.budgets import Budgets
from ..settings.errors import SettingError
from ..settings.settings import Settings
from ..settings.stages import stage
from ..shape.shards import ModelShards
from ..source.model_source import ModelSource, open_source
from .reference import Passed, Reference, compute_reference, hidden_of

SCHEMA = "moedge.check/1"
MAX_TOKENS = 8
PROMPTS = (
    "The harbour was quiet when the last ferry came in, and",
    "def mean(values: list[float]) -> float:\n    return",
    "1, 2, 4, 8, 16,",
    "今日は天気が",
)
# The greatest relative difference of logits in float32; of other dtypes the greatest KL divergence, in nats. Sums in
# another order differ by up to 2e-5 even in models of two layers (which processor computes decides by how much), wrong
# numbers by more than 1e-3.
MOST_RELATIVE, MOST_KL = 1e-4, 1e-3
# By dtype, the relative difference of a layer's output from which on both are said to part: 8 units of roundoff, and
# in float32 what sums in another order give.
PARTING = {"fp32": 1e-5, "fp16": 2.0**-8, "bf16": 2.0**-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """How far an engine's numbers are from the reference's.

    `max_abs` is the greatest difference of two logits, `max_relative` that divided by the greatest logit, `kl` the
    greatest KL divergence of a next token's distribution, in nats. `layers` are the relative L2 differences of the
    hidden states after each decoder layer; `parts_at` is the first that is over the bound of the dtype, or None.
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
    parts_at: int | None
    lossless: bool
    loss: dict[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> tuple[str, float] | None:
        """The quantity that decides, and its most; None where weights were packed with a loss."""
        if not self.lossless:
            return None
        return ("max_relative", MOST_RELATIVE) if self.dtype == "fp32" else ("kl", MOST_KL)

    @property
    def within(self) -> bool:
        """Whether the numbers are as near as the weight format and the dtype let expect."""
        finite = all(map(isfinite, (self.max_abs, self.kl, *self.layers)))
        return finite and (self.bound is None or getattr(self, self.bound[0]) <= self.bound[1])

    def as_dict(self) -> dict[str, Any]:
        """The document of `moedge check --json`."""
        bound = self.bound and {"of": self.bound[0], "most": self.bound[1]}
        # JSON has no NaN.
        found = {name: value if _is_number(value) else None for name, value in asdict(self).items()}
        found["layers"] = [value if isfinite(value) else None for value in self.layers]
        head = {"schema": SCHEMA, "version": version("moedge")}
        return {**head, **found, "bound": bound, "within": self.within}


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
) -> CheckReport:
    """Computes a few prompts with moedge's engine on the CPU, and again with transformers alone, in float32.

    `model` is a checkpoint, or prepared weights whose checkpoint is `against`. `prompts` are texts, without a chat
    template; built in ones where there are none. The engine generates 8 tokens for each, and transformers computes the
    same tokens. `quant` "auto" is the most precise format that the files let expect: their own codes where those are
    kept.

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
        settings = Settings(quant=quant, dtype=dtype, kv=_cache_dtype(engine.source, dtype))
        traced = _trace(engine, encoded, settings, chosen)
        # Its memory is the reference's now; the small files of a GGUF file stay.
        engine.close_engines()
        reference = compute_reference(other, traced.token_ids, traced.rows, chosen.host_nbytes())
    return _report(str(model), str(against or model), traced, reference)


def _cache_dtype(source: ModelSource, dtype: str) -> str:
    """Keys and values as they are computed: their format is not what is checked."""
    return dtype if dtype != "auto" else str(source.dtype or source.shape.dtype)


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
    [S, G] of T; hidden [L, S, T, D] after each layer."""

    token_ids: Tensor
    computed: Tensor
    rows: Tensor
    positions: Tensor
    logits: Tensor
    generated: Tensor
    hidden: Tensor
    quant: str
    dtype: str
    lossless: bool
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
        self.computed = torch.zeros(hidden.shape[1:3], dtype=torch.bool)
        for index, layer in enumerate(runner.layers):
            layer.register_forward_hook(lambda module, _, out, index=index: self._keep(index, out))

    def forward(self, batch: Batch) -> Tensor:
        self._batch = batch
        logits = self._runner.forward(batch)
        for each, row in zip(batch.sampling, logits, strict=False):
            self._logits[self._index[each], len(each.output_ids)] = row.cpu()
        return logits

    def _keep(self, layer: int, out: Any) -> None:
        assert self._batch is not None
        states = hidden_of(out)[0]
        for chunk in self._batch.chunks:
            index, where = self._index[chunk.sequence], slice(chunk.past, chunk.past + chunk.count)
            self._hidden[layer, index, where] = states[chunk.begin : chunk.end].float().cpu()
            self.computed[index, where] = True


def _trace(model: OpenModel, prompts: list[list[int]], settings: Settings, budgets: Budgets) -> _Traced:
    shape, most = model.source.shape, max(map(len, prompts)) + MAX_TOKENS
    loaded = model.load(settings, budgets, Workload(len(prompts), most))
    sequences = [sequence.Sequence(each, SamplingParams(MAX_TOKENS, ignore_eos=True)) for each in prompts]
    hidden = torch.zeros(len(shape.layers), len(prompts), most - 1, shape.hidden)
    logits = torch.zeros(len(prompts), MAX_TOKENS, shape.vocab)
    engine = loaded.engine.engine
    engine.model = recorder = _Recorder(loaded.engine.model, sequences, hidden, logits)
    with stage("computing with moedge"):
        for each in sequences:
            engine.add(each)
        for _ in engine.run():
            pass
    token_ids = torch.zeros(len(prompts), most - 1, dtype=torch.long)
    for row, each in zip(token_ids, sequences, strict=True):
        ids = [*each.prompt_ids, *each.output_ids[:-1]]
        row[: len(ids)] = torch.tensor(ids)
    positions = torch.tensor([range(len(each) - 1, len(each) - 1 + MAX_TOKENS) for each in prompts])
    generated = torch.tensor([list(each.output_ids) for each in sequences])
    plan = loaded.policy.plan
    return _Traced(
        token_ids, recorder.computed, _different(positions), positions, logits, generated, hidden,
        plan.quant, plan.dtype, _lossless(loaded.engine.shards), dict(loaded.engine.loss),
    )  # fmt: skip


def _different(numbers: Tensor) -> Tensor:
    """Each number once, in order."""
    return torch.tensor(sorted(set(numbers.flatten().tolist())))


def _lossless(shards: ModelShards) -> bool:
    layouts = [each for layer in shards.layers for each in (layer.dense, layer.expert) if each is not None]
    matrices = [matrix for layout in (*layouts, *([shards.head] if shards.head else [])) for matrix in layout.matrices]
    return all(matrix.kept or matrix.layout.format == "none" for matrix in matrices)


def _report(model: str, against: str, traced: _Traced, reference: Reference) -> CheckReport:
    wanted = _chosen(reference.passed, traced)
    difference, greatest = (traced.logits - wanted).abs().max(), wanted.abs().max()
    kl = F.kl_div(traced.logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    layers = _differences(traced, reference.passed.hidden)
    most = PARTING[traced.dtype]
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
        layers=layers,
        parts_at=next((index for index, each in enumerate(layers) if not each <= most), None),
        lossless=traced.lossless,
        loss=traced.loss,
    )


def _chosen(passed: Passed, traced: _Traced) -> Tensor:
    """The reference's logits [S, G, V] where the engine generated."""
    where = torch.searchsorted(traced.rows, traced.positions)
    return torch.stack([logits[rows] for logits, rows in zip(passed.logits, where, strict=True)])


def _differences(traced: _Traced, wanted: Tensor) -> tuple[float, ...]:
    """|found - wanted| / |wanted| of each layer, over the tokens that the engine computed."""
    pairs = zip(traced.hidden, wanted, strict=True)
    found = [(one[traced.computed], other[traced.computed]) for one, other in pairs]
    return tuple(float((one - other).norm() / other.norm()) for one, other in found)
