"""What fits where: the bytes of every tier by what they are for, as a plan accounts for them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..shape.shards import model_shards, resident_nbytes
from .placement import LOADING_NBYTES
from .plan import Plan
from .what_if import PlanRequest


@dataclass(frozen=True, slots=True)
class TierUse:
    """`parts` are bytes by what they are for, the largest kinds of them first named; `budget` is None where none is."""

    tier: str
    budget: int | None
    parts: Mapping[str, int]

    @property
    def used(self) -> int:
        return sum(self.parts.values())


def used_by_tier(question: PlanRequest, plan: Plan) -> list[TierUse]:
    """The tier that computes first."""
    whole = plan.weights_nbytes - plan.held_nbytes
    computing = {
        "process and small parameters": plan.fixed_nbytes,
        "what a pass computes with": plan.scratch_nbytes,
        "KV cache": plan.kv_nbytes,
        "weights": plan.held_nbytes,
        "weights in flight": plan.placement.dense_ring + plan.placement.expert_ring,
    }
    if plan.device is None:
        store = plan.weights_nbytes + resident_nbytes(question.shape, plan.dtype)
        disk = {"store of weights": store if whole else 0}
        return [TierUse("host", plan.budget_nbytes, computing), TierUse("disk", question.disk, disk)]
    assert question.room is not None
    computing["driver and small parameters"] = computing.pop("process and small parameters")
    staging = plan.device.staging
    host = {
        "process and small parameters": question.room.process_nbytes + resident_nbytes(question.shape, plan.dtype),
        "loading": LOADING_NBYTES,
        "weights": plan.device.staged_nbytes,
        "weights in flight": staging.dense_ring + staging.expert_ring,
    }
    shards = model_shards(question.shape, plan.quant, plan.dtype)
    store = shards.nbytes + resident_nbytes(question.shape, plan.dtype)
    return [
        TierUse("device", plan.device.budget_nbytes, computing),
        TierUse("host", plan.budget_nbytes, host),
        TierUse("disk", question.disk, {"store of weights": store if plan.device.disk_nbytes else 0}),
    ]
