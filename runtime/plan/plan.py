"""What a job runs with: the user's settings, and the plan that leaves nothing open. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .placement import DevicePlan, Placement


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for; "auto" and None are decided by `make_plan`, everything else is a fixed point.

    `compute` "int8" rounds activations, too, and multiplies as integers; that takes weights in int8.
    """

    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    tokens_per_pass: int | None = None
    max_sequences: int | None = None
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
    `stores_by_kernel`: a kernel of it writes keys and values into the cache. `lacks` says why torch computes what a
    family of the device's kernels (`attention`, `cache`, `experts`) should; `notes` what else a person should know.
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
    fixed_nbytes: int
    weights_nbytes: int
    held_nbytes: int
    kv_nbytes: int
    scratch_nbytes: int
    compute: str = "auto"
    free_nbytes: int = 0
    grouped_experts: bool = False
    stores_by_kernel: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    device: DevicePlan | None = None

    @property
    def streams(self) -> bool:
        """Whether some weights stay on disk and are read in every pass."""
        if self.device is not None:
            return self.device.disk_nbytes > 0
        return self.placement.dense_ring + self.placement.expert_ring > 0

    @property
    def used_nbytes(self) -> int:
        """Of the tier that computes; `fixed_nbytes` are the process or the driver, and small parameters."""
        rings = self.placement.dense_ring + self.placement.expert_ring
        return self.fixed_nbytes + self.scratch_nbytes + self.kv_nbytes + self.held_nbytes + rings

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Workload:
    """`sequences` of at most `longest` tokens, prompt included.

    `shortest` is the least that any of them needs. `prompt_tokens` and `generated_tokens`, the latter at most, are sums
    over all of them. None is not known.
    """

    sequences: int
    longest: int
    shortest: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None

    @property
    def least(self) -> int:
        """Tokens that the cache must hold for the job to make sense."""
        return self.longest if self.shortest is None else self.shortest

    @property
    def mean_prompt(self) -> float:
        return self.longest / 2 if self.prompt_tokens is None else self.prompt_tokens / self.sequences

    @property
    def mean_generated(self) -> float:
        """Most tokens to generate, of the mean sequence."""
        if self.generated_tokens is None:
            return max(1.0, self.longest - self.mean_prompt)
        return max(1.0, self.generated_tokens / self.sequences)

    @property
    def mean_live(self) -> float:
        """Tokens that a sequence holds in the mean over its life, if answers end halfway."""
        return self.mean_prompt + self.mean_generated / 4
