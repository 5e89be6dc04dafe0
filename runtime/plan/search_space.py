"""The ways to run one job that its settings leave open, and the longest sequence that fits. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from ...quant.kernels.gpu import Gpu, dotted
from ..kv.spec import KVSpec
from ..settings.errors import DoesNotFit, SettingError
from ..shape.model_shape import ModelShape
from ..shape.shards import FORMATS
from .cache_size import CacheSize, choose_block, largest
from .candidate import Candidate, CostCache, WeightFootprint
from .placement import DeviceRoom
from .plan import Settings, Workload

GIB = 1 << 30
MIB = 1 << 20
# What `auto` takes for the cache where memory is short: no measurable loss, half the bytes (docs/quality.md).
SMALL_KV = "int8"
# Tokens of a pass that are tried; fewer make passes that memory allows where it is shortest, more pay nowhere.
LEAST_TOKENS, MOST_TOKENS = 64, 8192
# More sequences than this were never useful: they take Python longer than weights take to arrive.
MOST_SEQUENCES = 4096
# Sequences differ from their mean; blocks for so many more of them, and no pass waits for one.
SPARE_BLOCKS = 1.1


class SearchSpace:
    """Makes drafts of one job, in the formats and limits that its settings leave open."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        job: Workload,
        device: DeviceRoom | None = None,
        model: CostCache | None = None,
    ) -> None:
        for name, value in (("tokens-per-pass", settings.tokens_per_pass), ("max-sequences", settings.max_sequences)):
            if value is not None and value < 1:
                raise SettingError(f"--{name} must be at least 1, not {value}")
        self.shape = shape
        self.settings = settings
        self.job = job
        self.device = device
        self.dtype = choose_dtype(settings.dtype, shape.dtype, None if device is None else device.gpu)
        self.quants = _quants(settings)
        self.most_live = min(settings.max_sequences or MOST_SEQUENCES, job.sequences)
        self._block = choose_block(job.mean_live)
        self.model = model or CostCache(shape)
        self._specs: dict[str, tuple[KVSpec, ...]] = {}

    def packed(self, quant: str) -> WeightFootprint:
        return self.model.packed(quant, self.dtype, self.settings.deterministic, self.device)

    def draft(self, quant: str, longest: int | None = None, tokens: int = 0, live: int = 1, kv: str = "") -> Candidate:
        """Of the job's longest rows, one after the other in the smallest passes, where nothing else is said."""
        longest = max(1, self.job.longest if longest is None else longest)
        kv = kv or (SMALL_KV if self.settings.kv == "auto" else self.settings.kv)
        if kv not in self._specs:
            self._specs[kv] = tuple(KVSpec(group, kv, self._block) for group in self.shape.kv_groups)
        return Candidate(self.packed(quant), CacheSize(self._specs[kv], longest, tokens or self.tokens()[0]), live)

    def tokens(self) -> list[int]:
        """Tokens per pass to try: what the user says, else powers of two up to what the job can fill."""
        if self.settings.tokens_per_pass is not None:
            return [self.settings.tokens_per_pass]
        useful = self.most_live * (1 + self.job.mean_prompt)
        sizes = [LEAST_TOKENS]
        while sizes[-1] < min(useful, MOST_TOKENS):
            sizes.append(2 * sizes[-1])
        return sizes

    def lives(self, tokens: int) -> Iterator[int]:
        """Sequences together to try: steps of a half and a third, and such that rounds of the job are equal."""
        most = min(self.most_live, tokens)
        steps = {step << power for power in range(13) for step in (2, 3)} | {1}
        equal = {-(-self.job.sequences // rounds) for rounds in range(1, 9)}
        yield from sorted({live for live in steps | equal | {most} if live <= most})

    def cached(self, live: int, longest: int) -> int:
        """Sequences at their longest for which blocks make room, so that `live` of mean length run together."""
        mean = min(longest, self.job.mean_prompt + self.job.mean_generated)
        return max(1, min(live, -(-int(SPARE_BLOCKS * live * mean) // longest)))

    def longest(self, budget: int) -> int:
        """The longest sequence that fits in the smallest format: the job's, where it does. Raises DoesNotFit."""
        quant, least = self.smallest_quant, self.job.least
        if (draft := self.draft(quant, least)).smallest > budget:
            raise self._does_not_fit(draft, budget)
        more = largest(
            self.job.longest - least + 1, lambda more: self.draft(quant, least - 1 + more).smallest <= budget
        )
        return least - 1 + more

    @property
    def smallest_quant(self) -> str:
        return min(self.quants, key=lambda quant: (self.packed(quant).streaming_nbytes, self.packed(quant).nbytes))

    def _does_not_fit(self, draft: Candidate, budget: int) -> DoesNotFit:
        tier = "host" if self.device is None else "device"
        less = "Shorter prompts or a smaller --tokens-per-pass need"
        if draft.packed.quant != "nf4":
            less = "Shorter prompts, a smaller --tokens-per-pass or --quant nf4 need"
        return DoesNotFit(
            f"{budget / MIB:,.0f} MiB of {tier} memory is too little for this model and job in {draft.packed.quant}: "
            f"the smallest that works is {self._option(draft.smallest)}, of which {draft.fixed / MIB:,.0f} "
            f"are for the process and what a pass computes with{self._beyond(draft)}. "
            f"{less} less{'' if self.device is None else '; --gpu-mem 0 computes on the processor'}."
        )

    @property
    def smallest(self) -> int:
        """The least budget of the tier that computes in which every row of the job fits."""
        return self.draft(self.smallest_quant).smallest

    @property
    def for_every_row(self) -> str:
        """That budget as a person would type it."""
        return self._option(self.smallest)

    def _option(self, nbytes: int) -> str:
        return f"{'--ram' if self.device is None else '--gpu-mem'} {-(-nbytes // MIB)}MiB"

    def _beyond(self, shortest: Candidate) -> str:
        """What `shortest`, of the job's shortest rows, leaves out."""
        # As they are told, in whole MiB.
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
