"""Chooses precision, cache, passes and placement for a model, a job and a budget. Closed form, torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ...quant.kernels.gpu import interpreted
from ..attention.choice import AttentionNeeds, choose_attention
from ..errors import DoesNotFit, SettingError
from ..shape.layouts import FORMATS
from ..shape.model_shape import ModelShape
from .cache_size import choose_block
from .device_plan import DevicePlan, DeviceRoom, plan_staging
from .draft import Draft, Formats
from .job import JobShape
from .pass_size import LEAST_TOKENS, choose_tokens, power_of_two
from .placement import Placement
from .search import largest

GIB = 1 << 30
MIB = 1 << 20
# What `auto` takes for the cache where memory is short: no measurable loss, half the bytes (docs/quality.md).
SMALL_KV = "int8"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; "auto" and None are decided by `make_plan`, everything else is a fixed point.

    `compute` "int8" rounds activations, too, and multiplies as integers; that takes weights in int8.
    """

    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    tokens_per_pass: int | None = None
    max_sequences: int = 128
    deterministic: bool = False
    compute: str = "auto"
    attention: str = "auto"


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run: no field is left to be decided later.

    `placement` and the sizes are of the tier that computes: host memory, or the device's where there is a `device`.
    `budget_nbytes` is host memory's in any case.

    `kv_blocks` is by layer group: room for `kv_sequences` at their longest. `kv_tokens` is the longest sequence that
    is ever started. `parked_blocks`, by group too, hold preempted sequences in host memory; where there are none,
    preempted sequences are computed again. On a machine without a device there are none, because the cache is in host
    memory itself, and blocks do more good there. `free_nbytes` of the budget are of no use to this job.

    `grouped_experts`: those that arrive together are computed in two launches, by kernels of the device.
    """

    dtype: str
    quant: str
    kv: str
    attention: str
    kv_block: int
    kv_blocks: tuple[int, ...]
    kv_sequences: int
    kv_tokens: int
    parked_blocks: tuple[int, ...]
    tokens_per_pass: int
    max_sequences: int
    deterministic: bool
    placement: Placement
    budget_nbytes: int
    weights_nbytes: int
    held_nbytes: int
    kv_nbytes: int
    scratch_nbytes: int
    compute: str = "auto"
    free_nbytes: int = 0
    grouped_experts: bool = False
    device: DevicePlan | None = None

    @property
    def streams(self) -> bool:
        """Whether some weights stay on disk and are read in every pass."""
        if self.device is not None:
            return self.device.disk_nbytes > 0
        return self.placement.dense_ring + self.placement.expert_ring > 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    shape: ModelShape, settings: Settings, host_budget: int, job: JobShape, device: DeviceRoom | None = None
) -> Plan:
    """The plan within `host_budget` bytes, and a device's, where there is one.

    Raises DoesNotFit, naming the smallest budget that works. Where the job's longest rows do not fit, the cache is as
    large as it can be; `kv_tokens` says which rows fail.
    """
    if device is not None and settings.compute == "int8":
        raise SettingError("--compute int8 multiplies on the processor; give --gpu-mem 0 with it")
    drafting = _Drafting(shape, settings, job, device)
    budget = host_budget if device is None else device.budget_nbytes
    # The least lossy that is held whole; where none is, the smallest, since streaming costs by the byte.
    quants = drafting.quants
    quant = next((quant for quant in quants if drafting.draft(quant).smallest_whole <= budget), quants[-1])
    longest = drafting.longest(quant, budget)
    tokens = settings.tokens_per_pass or choose_tokens(
        shape, job, settings.max_sequences, budget, lambda tokens: drafting.draft(quant, longest, tokens)
    )
    draft = drafting.draft(quant, longest, tokens)
    native = drafting.draft(quant, longest, tokens, draft.formats.dtype)
    # Nothing is gained by fewer bits where all weights and all sequences have room without them.
    if settings.kv == "auto" and native.everything <= budget:
        draft = native
    plan = _finish(draft, shape, settings, budget)
    if device is None:
        return plan
    staged = plan_staging(shape, draft.shards, plan.placement, device, host_budget, plan.dtype)
    # Where every sequence has room at its longest, none is preempted.
    waits = plan.kv_sequences < draft.most_live and staged.disk_nbytes == 0
    parked = draft.cache.parked(plan.kv_blocks, staged.free_nbytes if waits else 0)
    free = staged.free_nbytes - draft.cache.nbytes_of(parked)
    return replace(plan, budget_nbytes=host_budget, device=staged, parked_blocks=parked, free_nbytes=free)


def budget_range(
    shape: ModelShape, settings: Settings, job: JobShape, device: DeviceRoom | None = None
) -> tuple[int, int]:
    """The smallest budget of the tier that computes with which every row works, and that which holds all weights."""
    drafting = _Drafting(shape, settings, job, device)
    draft = drafting.draft(drafting.quants[-1])
    return draft.smallest, draft.smallest_whole


class _Drafting:
    """Makes drafts of one job, in the formats and limits that its settings leave open."""

    def __init__(self, shape: ModelShape, settings: Settings, job: JobShape, device: DeviceRoom | None = None) -> None:
        if settings.max_sequences < 1 or (settings.tokens_per_pass is not None and settings.tokens_per_pass < 1):
            raise SettingError("--tokens-per-pass and --max-sequences must be at least 1")
        self._shape = shape
        self._settings = settings
        self._job = job
        self._device = device
        self._most_live = min(settings.max_sequences, job.sequences)
        self.quants = _quants(settings)

    def draft(self, quant: str, longest: int | None = None, tokens: int | None = None, kv: str = "") -> Draft:
        """Of the job's longest rows in the smallest passes, where nothing else is said."""
        tokens = tokens or self._settings.tokens_per_pass or power_of_two(max(LEAST_TOKENS, self._most_live))
        longest = max(1, self._job.longest if longest is None else longest)
        formats, deterministic = self._formats(quant, kv), self._settings.deterministic
        return Draft(self._shape, formats, deterministic, tokens, self._most_live, longest, self._device)

    def longest(self, quant: str, budget: int) -> int:
        """The longest sequence that fits: the job's, where it does. Raises DoesNotFit."""
        least = self._job.least
        if (draft := self.draft(quant, least)).smallest > budget:
            raise _does_not_fit(draft, budget, self._device is not None)
        return (
            least
            - 1
            + largest(
                self._job.longest - least + 1, lambda more: self.draft(quant, least - 1 + more).smallest <= budget
            )
        )

    def _formats(self, quant: str, kv: str) -> Formats:
        dtype = self._shape.dtype if self._settings.dtype == "auto" else self._settings.dtype
        kv = kv or (SMALL_KV if self._settings.kv == "auto" else self._settings.kv)
        return Formats(dtype, quant, kv, choose_block(self._job.mean_live))


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


def _finish(draft: Draft, shape: ModelShape, settings: Settings, budget: int) -> Plan:
    live = draft.live(budget)
    blocks, kv_nbytes = draft.cache.blocks(live), draft.cache.nbytes(live)
    heads = frozenset(group.head_dim for group in shape.kv_groups)
    placement = draft.place(budget, kv_nbytes)
    assert placement is not None
    whole = [
        count * spec.block for count, spec in zip(blocks, draft.cache.specs, strict=True) if spec.group.window is None
    ]
    return Plan(
        dtype=draft.formats.dtype,
        quant=draft.formats.quant,
        kv=draft.formats.kv,
        attention=choose_attention(settings.attention, AttentionNeeds(heads, draft.gpu, interpreted())),
        kv_block=draft.formats.kv_block,
        kv_blocks=blocks,
        kv_sequences=live,
        kv_tokens=min(whole, default=shape.context),
        parked_blocks=(0,) * len(blocks),
        tokens_per_pass=draft.tokens_per_pass,
        max_sequences=settings.max_sequences,
        deterministic=settings.deterministic,
        placement=placement,
        budget_nbytes=budget,
        weights_nbytes=draft.shards.nbytes,
        held_nbytes=placement.held_nbytes(draft.shards),
        kv_nbytes=kv_nbytes,
        scratch_nbytes=draft.scratch,
        compute=settings.compute,
        free_nbytes=budget - draft.fixed - kv_nbytes - placement.nbytes(draft.shards),
        grouped_experts=draft.grouped_experts,
    )


def _does_not_fit(draft: Draft, budget: int, on_device: bool) -> DoesNotFit:
    tier, option = ("device", "--gpu-mem") if on_device else ("host", "--ram")
    return DoesNotFit(
        f"{budget / GIB:.2f} GiB of {tier} memory is too little for this model and job in {draft.formats.quant}: "
        f"the smallest that works is {option} {-(-draft.smallest // MIB)}MiB, of which {draft.fixed / GIB:.2f} GiB is "
        "for the process and what a pass computes with. Shorter prompts, a smaller --tokens-per-pass or --quant nf4 "
        f"need less{'; --gpu-mem 0 computes on the processor' if on_device else ''}."
    )
