"""Chooses precision, cache and placement for a model, a job and a budget. Closed form, torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import DoesNotFit, SettingError
from ..kv.spec import BLOCK_TOKENS, KVSpec
from ..shape.layouts import FORMATS, resident_nbytes, workspace_nbytes
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards, model_shards
from .activations import pass_nbytes
from .placement import Placement, everything, minimum, place

GIB = 1 << 30
MIB = 1 << 20
# torch, transformers and bitsandbytes imported, threads started, before any model.
PROCESS_NBYTES = 480 * MIB
# What allocators keep beside what is asked of them: a share of the activations, and a constant.
SLACK_SHARE = 0.25
SLACK_NBYTES = 48 * MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; "auto" is decided by `make_plan`, everything else is a fixed point."""

    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    tokens_per_pass: int = 1024
    max_sequences: int = 128
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class JobShape:
    """What is to be generated: `sequences` of at most `longest` tokens, prompt included."""

    sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run: no field is left to be decided later. Sizes in bytes of host memory."""

    dtype: str
    quant: str
    kv: str
    kv_block: int
    kv_blocks: int
    tokens_per_pass: int
    max_sequences: int
    deterministic: bool
    placement: Placement
    budget_nbytes: int
    weights_nbytes: int
    held_nbytes: int
    kv_nbytes: int
    scratch_nbytes: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds; a sequence that could grow longer is never started."""
        return self.kv_blocks * self.kv_block

    @property
    def streams(self) -> bool:
        """Whether some weights stay on disk and are read in every pass."""
        return self.placement.dense_ring + self.placement.expert_ring > 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(shape: ModelShape, settings: Settings, budget: int, job: JobShape) -> Plan:
    """The plan within `budget` bytes of host memory. Raises DoesNotFit, naming the smallest budget that works."""
    drafts = _drafts(shape, settings, job)
    # The least lossy that is held whole; where none is, the smallest, since streaming costs by the byte.
    draft = next((draft for draft in drafts if draft.smallest_whole <= budget), drafts[-1])
    if draft.smallest > budget:
        raise DoesNotFit(
            f"{_gib(budget)} of host memory is too little for this model and job in {draft.quant}: "
            f"the smallest that works is --ram {_mib(draft.smallest)}, of which {_gib(draft.fixed)} is for the process "
            "and what a pass computes with. Shorter prompts, a smaller --tokens-per-pass or --quant nf4 need less."
        )
    return draft.plan(budget)


def budget_range(shape: ModelShape, settings: Settings, job: JobShape) -> tuple[int, int]:
    """The smallest budget that works, and the smallest that holds all weights."""
    drafts = _drafts(shape, settings, job)
    return drafts[-1].smallest, drafts[-1].smallest_whole


def _drafts(shape: ModelShape, settings: Settings, job: JobShape) -> list[_Draft]:
    if min(settings.tokens_per_pass, settings.max_sequences) < 1:
        raise SettingError("--tokens-per-pass and --max-sequences must be at least 1")
    dtype = shape.dtype if settings.dtype == "auto" else settings.dtype
    wanted = FORMATS if settings.quant == "auto" else (settings.quant,)
    return [_Draft(shape, settings, job, dtype, quant) for quant in wanted]


class _Draft:
    """The sizes of one weight format, from which feasibility and the plan follow."""

    def __init__(self, shape: ModelShape, settings: Settings, job: JobShape, dtype: str, quant: str) -> None:
        self.quant = quant
        self._dtype = dtype
        self._settings = settings
        self._shards: ModelShards = model_shards(shape, quant, dtype)
        kv = dtype if settings.kv == "auto" else settings.kv
        self._specs = [KVSpec(group, kv) for group in shape.kv_groups]
        self._block_nbytes = sum(spec.block_nbytes for spec in self._specs)
        self._blocks_each = self._specs[0].blocks_for(max(job.longest, 1))
        self._live = max(1, min(settings.max_sequences, settings.tokens_per_pass, job.sequences))
        computing = pass_nbytes(shape, dtype, settings.tokens_per_pass, self._live, max(job.longest, 1))
        self._scratch = workspace_nbytes(shape, quant, dtype, settings.deterministic)
        self._scratch += int(computing * (1 + SLACK_SHARE)) + SLACK_NBYTES
        self.fixed = PROCESS_NBYTES + resident_nbytes(shape, dtype) + self._scratch

    @property
    def smallest(self) -> int:
        """The least budget: one sequence, everything streamed that can be."""
        whole = everything(self._shards).nbytes(self._shards)
        return self.fixed + self._kv(1) + min(whole, minimum(self._shards).nbytes(self._shards))

    @property
    def smallest_whole(self) -> int:
        """The least budget that holds all weights, and one sequence."""
        return self.fixed + self._kv(1) + self._shards.nbytes

    def plan(self, budget: int) -> Plan:
        room = budget - self.fixed
        least = min(self._shards.nbytes, minimum(self._shards).nbytes(self._shards))
        if self.smallest_whole <= budget:
            least = self._shards.nbytes
        live = min(self._live, (room - least) // self._kv(1))
        placement = place(self._shards, room - self._kv(live))
        assert placement is not None
        return Plan(
            dtype=self._dtype,
            quant=self.quant,
            kv=self._specs[0].format,
            kv_block=BLOCK_TOKENS,
            kv_blocks=live * self._blocks_each,
            tokens_per_pass=self._settings.tokens_per_pass,
            max_sequences=self._settings.max_sequences,
            deterministic=self._settings.deterministic,
            placement=placement,
            budget_nbytes=budget,
            weights_nbytes=self._shards.nbytes,
            held_nbytes=placement.held_nbytes(self._shards),
            kv_nbytes=self._kv(live),
            scratch_nbytes=self._scratch,
        )

    def _kv(self, sequences: int) -> int:
        return sequences * self._blocks_each * self._block_nbytes


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)}MiB"
