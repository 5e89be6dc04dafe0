"""What a plan is worth: the same job with other sequences, budgets and formats, and what would help. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..settings.errors import DoesNotFit, SettingError
from ..shape.model_shape import ModelShape
from ..shape.shards import FORMATS
from .candidate import CostCache
from .placement import DeviceRoom
from .plan import Settings, Workload
from .planner import Choice, Speed, choose
from .search_space import SearchSpace

GIB = 1 << 30
# Budgets are shown in these shares of what is granted, and a way up is worth showing from this gain on.
SHARES = (0.5, 0.75, 1.0, 1.5, 2.0)
WORTH_SHOWING = 1.05
# Steps that are tried as ways up, by tier, in GiB.
STEPS = (1, 4, 16)
SHORTER = 2


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A job and what it may use; `disk` bounds the store of weights that stream, None is as much as it takes.

    Questions that are made from each other share `model`, and what answers worked out in it.
    """

    model: CostCache
    settings: Settings
    job: Workload
    host: int
    room: DeviceRoom | None
    speed: Speed
    disk: int | None = None

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def answer(self) -> Choice:
        """Raises DoesNotFit."""
        return choose(self.shape, self.settings, self.host, self.job, self.room, self.speed, self.disk, self.model)

    def drafting(self) -> SearchSpace:
        return SearchSpace(self.shape, self.settings, self.job, self.room, self.model)

    def attempt(self) -> Choice | None:
        try:
            return self.answer()
        except (DoesNotFit, SettingError):
            return None

    def with_budget(self, tier: str, nbytes: int) -> PlanRequest:
        if tier == "host" or self.room is None:
            return replace(self, host=nbytes)
        return replace(self, room=replace(self.room, budget_nbytes=nbytes))

    def with_settings(self, **changes: object) -> PlanRequest:
        return replace(self, settings=replace(self.settings, **changes))  # type: ignore[arg-type]

    @property
    def tiers(self) -> dict[str, int]:
        """Budgets of memory, the fastest first."""
        return ({"device": self.room.budget_nbytes} if self.room else {}) | {"host": self.host}


@dataclass(frozen=True, slots=True)
class Point:
    """One variation: what was varied to which number, and what comes of it. `generated_tok_s` is None: does not fit."""

    varied: str
    value: int
    generated_tok_s: float | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change as a person would type it, and what it gives."""

    change: str
    generated_tok_s: float
    gain: float


def by_sequences(question: PlanRequest, choice: Choice) -> list[Point]:
    """From one sequence to twice what the plan runs together, all else as good as it can be."""
    most = min(question.job.sequences, 2 * choice.plan.max_sequences)
    counts = sorted({1 << power for power in range(0, most.bit_length(), 2)} | {choice.plan.max_sequences, most})
    fixed = question.with_settings(quant=choice.plan.quant)
    return [_point("sequences", count, fixed.with_settings(max_sequences=count)) for count in counts]


def by_budget(question: PlanRequest, choice: Choice) -> list[Point]:
    """Each tier's budget from half to double, the others as they are."""
    fixed = question.with_settings(quant=choice.plan.quant)
    return [
        _point(tier, int(share * nbytes), fixed.with_budget(tier, int(share * nbytes)))
        for tier, nbytes in question.tiers.items()
        for share in SHARES
    ]


def suggestions(question: PlanRequest, choice: Choice) -> list[Suggestion]:
    """The cheapest change of each kind that helps: the first step of memory that does, formats from exact on."""
    now = choice.prediction.generated_tok_s
    found = []
    for changes in _changes(question, choice):
        for change, other in changes:
            better = other.attempt()
            if better and better.prediction.generated_tok_s >= WORTH_SHOWING * now:
                rate = better.prediction.generated_tok_s
                found.append(Suggestion(change, rate, rate / now))
                break
    return sorted(found, key=lambda way: -way.gain)


def nearest(question: PlanRequest) -> list[str]:
    """What is needed where a job does not fit: changes that fit, one of each kind."""
    tier = next(iter(question.tiers))
    drafting = question.drafting()
    fitting = []
    if question.with_budget(tier, drafting.smallest).attempt():
        fitting.append(drafting.for_every_row)
    if question.settings.quant not in ("auto", "nf4") and question.with_settings(quant="nf4").attempt():
        fitting.append("--quant nf4")
    shorter = question.job.longest
    while shorter > SHORTER:
        shorter //= SHORTER
        job = replace(question.job, longest=shorter, shortest=None, prompt_tokens=None, generated_tokens=None)
        if replace(question, job=job).attempt():
            fitting.append(f"rows of at most {shorter:,} tokens")
            break
    if question.room and replace(question, room=None).attempt():
        fitting.append("--gpu-mem 0")
    return fitting


_OPTIONS = {"host": "--ram", "device": "--gpu-mem"}


def _changes(question: PlanRequest, choice: Choice) -> Iterator[list[tuple[str, PlanRequest]]]:
    """Kinds of changes, each from its smallest step on."""
    for tier, nbytes in question.tiers.items():
        yield [
            (f"+{step} GiB {_OPTIONS[tier].removeprefix('--')}", question.with_budget(tier, nbytes + step * GIB))
            for step in STEPS
        ]
    if question.settings.compute == "auto":
        lossier = FORMATS[FORMATS.index(choice.plan.quant) + 1 :]
        yield [(f"--quant {quant}", question.with_settings(quant=quant)) for quant in lossier]
    if choice.plan.kv != "int4" and question.settings.kv != "int4":
        yield [(f"--kv {kv}", question.with_settings(kv=kv)) for kv in ("int8", "int4") if kv != choice.plan.kv]
    if question.settings.max_sequences is not None:
        yield [("more sequences", question.with_settings(max_sequences=None))]


def _point(varied: str, value: int, question: PlanRequest) -> Point:
    choice = question.attempt()
    return Point(varied, value, choice.prediction.generated_tok_s if choice else None)
