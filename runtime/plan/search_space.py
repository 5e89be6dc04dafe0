"""What is asked of the planner, the candidates that the settings leave open, and the longest sequence that fits.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...offload.machine.hardware import Hardware
from ...offload.machine.profile import Machine
from ...quant.kernels.gpu import Gpu, dotted
from ..kv.spec import KVSpec
from ..settings.budgets import MIB, MemoryBudget
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import FORMATS
from .candidate import CacheSize, Candidate, WeightFootprint, choose_block, largest
from .cost_model import CostModel
from .placement import Workload

# What `auto` takes for the cache where memory is short: no measurable loss, half the bytes (docs/quality.md).
SMALL_KV = "int8"
# Tokens of a pass that are tried; fewer make passes that memory allows where it is shortest, more pay nowhere.
LEAST_TOKENS, MOST_TOKENS = 64, 8192
# More sequences than this were never useful: they take Python longer than weights take to arrive.
MOST_SEQUENCES = 4096
# Sequences differ from their mean: this many times the blocks of mean sequences, and no pass waits for one.
SPARE_BLOCKS = 1.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """What is asked: a model on a machine (`costs`), a workload, a memory budget, and settings.

    `hardware` is the machine's, None where it is not known; `profile` is what was measured of it. Requests made
    from each other share `costs`.
    """

    costs: CostModel
    workload: Workload
    budget: MemoryBudget
    settings: Settings = field(default_factory=Settings)
    hardware: Hardware | None = None
    profile: Machine | None = None

    @property
    def shape(self) -> ModelShape:
        return self.costs.shape

    def with_budget(self, tier: str, nbytes: int) -> PlanRequest:
        """The same with another budget of "host" or "device" memory."""
        return replace(self, budget=self.budget.with_tier(tier, nbytes))

    def with_settings(self, **changes: object) -> PlanRequest:
        return replace(self, settings=replace(self.settings, **changes))  # type: ignore[arg-type]


class SearchSpace:
    """Makes the candidates of one request, in the formats and limits that its settings leave open.

    Raises SettingError for settings that contradict each other or make no sense.
    """

    def __init__(self, request: PlanRequest) -> None:
        shape, settings, workload = request.shape, request.settings, request.workload
        for name, value in (("tokens-per-pass", settings.tokens_per_pass), ("max-sequences", settings.max_sequences)):
            if value is not None and value < 1:
                raise SettingError(f"--{name} must be at least 1, not {value}")
        self.request = request
        device = request.budget.device
        self.dtype = choose_dtype(settings.dtype, shape.dtype, None if device is None else device.gpu)
        self.quants = _quants(settings)
        self.most_live = min(settings.max_sequences or MOST_SEQUENCES, workload.sequences)
        self._block = choose_block(workload.mean_live)
        self._specs: dict[str, tuple[KVSpec, ...]] = {}

    def weights(self, quant: str) -> WeightFootprint:
        """The model's weights in a format."""
        request = self.request
        return request.costs.weights(quant, self.dtype, request.settings.deterministic, request.budget.device)

    def candidate(
        self, quant: str, longest: int | None = None, tokens: int = 0, live: int = 1, kv: str = ""
    ) -> Candidate:
        """By default one for the job's longest rows, one after the other in the smallest passes."""
        settings = self.request.settings
        longest = max(1, self.request.workload.longest if longest is None else longest)
        kv = kv or (SMALL_KV if settings.kv == "auto" else settings.kv)
        if kv not in self._specs:
            self._specs[kv] = tuple(KVSpec(group, kv, self._block) for group in self.request.shape.kv_groups)
        return Candidate(self.weights(quant), CacheSize(self._specs[kv], longest, tokens or self.tokens()[0]), live)

    def tokens(self) -> list[int]:
        """Tokens per pass to try: what the user says, else powers of two up to what the job can fill."""
        if self.request.settings.tokens_per_pass is not None:
            return [self.request.settings.tokens_per_pass]
        useful = self.most_live * (1 + self.request.workload.mean_prompt)
        sizes = [LEAST_TOKENS]
        while sizes[-1] < min(useful, MOST_TOKENS):
            sizes.append(2 * sizes[-1])
        return sizes

    def sequences(self, tokens: int) -> Iterator[int]:
        """Numbers of live sequences to try: steps of a half and a third, and those that make the job's rounds equal."""
        most = min(self.most_live, tokens)
        steps = {step << power for power in range(13) for step in (2, 3)} | {1}
        equal = {-(-self.request.workload.sequences // rounds) for rounds in range(1, 9)}
        yield from sorted({live for live in steps | equal | {most} if live <= most})

    def cached(self, live: int, longest: int) -> int:
        """Sequences at their longest whose blocks let `live` sequences of mean length run together."""
        mean = min(longest, self.request.workload.mean_prompt + self.request.workload.mean_generated)
        return max(1, min(live, -(-int(SPARE_BLOCKS * live * mean) // longest)))

    def longest(self) -> int:
        """The longest sequence that fits in the smallest format: the job's, where it fits. Raises DoesNotFit."""
        quant, least, budget = self.smallest_quant, self.request.workload.least, self.request.budget.computing_nbytes
        if (candidate := self.candidate(quant, least)).smallest > budget:
            raise self._does_not_fit(candidate, budget)
        more = largest(
            self.request.workload.longest - least + 1,
            lambda more: self.candidate(quant, least - 1 + more).smallest <= budget,
        )
        return least - 1 + more

    @property
    def smallest_quant(self) -> str:
        """The weight format of the smallest candidate."""
        return min(self.quants, key=lambda quant: (self.weights(quant).streaming_nbytes, self.weights(quant).nbytes))

    @property
    def smallest(self) -> int:
        """The least budget of the tier that computes in which every row of the job fits."""
        return self.candidate(self.smallest_quant).smallest

    @property
    def for_every_row(self) -> str:
        """That budget as a person would type it."""
        return self._option(self.smallest)

    def _does_not_fit(self, candidate: Candidate, budget: int) -> DoesNotFit:
        on_device = self.request.budget.device is not None
        tier, cpu = ("device", "; --gpu-mem 0 computes on the CPU") if on_device else ("host", "")
        smaller = "Shorter prompts or a smaller --tokens-per-pass need"
        if candidate.weights.quant != "nf4":
            smaller = "Shorter prompts, a smaller --tokens-per-pass or --quant nf4 need"
        return DoesNotFit(
            f"{budget / MIB:,.0f} MiB of {tier} memory is too little for this model and job in "
            f"{candidate.weights.quant}: the smallest that works is {self._option(candidate.smallest)}, of which "
            f"{candidate.fixed / MIB:,.0f} MiB are for the process and what a pass computes with"
            f"{self._beyond(candidate)}. {smaller} less{cpu}."
        )

    def _option(self, nbytes: int) -> str:
        return f"{'--ram' if self.request.budget.device is None else '--gpu-mem'} {-(-nbytes // MIB)}MiB"

    def _beyond(self, shortest: Candidate) -> str:
        """What `shortest`, the candidate for the job's shortest rows, leaves out."""
        # Compared as they are printed, in whole MiB.
        if self.for_every_row == self._option(shortest.smallest):
            return ""
        return f", and fits only the shortest rows; every row takes {self.for_every_row}"


def choose_dtype(wanted: str, checkpoint: str, gpu: Gpu | None) -> str:
    """What is computed in. `auto` is the checkpoint's dtype, but float16 for bfloat16 on a GPU that is slow at it."""
    if wanted != "auto":
        return wanted
    return "fp16" if checkpoint == "bf16" and gpu is not None and not gpu.computes_bf16 else checkpoint


def dtype_notes(wanted: str, checkpoint: str, gpu: Gpu | None) -> tuple[str, ...]:
    """What a person should know of the arithmetic on a GPU without tensor cores for bfloat16."""
    if gpu is None or gpu.computes_bf16:
        return ()
    why = f"compute capability {dotted(gpu.capability)} has no tensor cores for bfloat16"
    if wanted == "bf16":
        return (f"{why}: --dtype bf16 is several times slower than fp16 there; --dtype auto takes fp16",)
    if wanted == "auto" and checkpoint == "bf16":
        return (f"arithmetic is fp16: {why}",)
    return ()


def _quants(settings: Settings) -> tuple[str, ...]:
    """The weight formats that the settings leave open, from exact to smallest."""
    if settings.compute == "auto":
        return FORMATS if settings.quant == "auto" else (settings.quant,)
    if settings.quant not in ("auto", settings.compute):
        raise SettingError(
            f"--compute {settings.compute} multiplies weights in {settings.compute}, and --quant {settings.quant} was "
            "asked for; leave one of the two away"
        )
    return (settings.compute,)
