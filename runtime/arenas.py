"""What a loaded engine has allocated once and for all, by arena: bytes that a plan's accounting must equal."""

from __future__ import annotations

from .load import LoadedEngine
from .plan.plan import Plan


def planned_arenas(plan: Plan, block_nbytes: tuple[int, ...]) -> dict[str, int]:
    """Bytes by arena as the plan accounts for them; a block of each layer group takes `block_nbytes`."""
    return {
        "held weights": plan.held_nbytes,
        "rings": plan.placement.dense_ring + plan.placement.expert_ring,
        "KV cache": plan.kv_nbytes,
        "staged weights": 0 if plan.device is None else plan.device.staged_nbytes,
        "parked": sum(count * nbytes for count, nbytes in zip(plan.parked_blocks, block_nbytes, strict=True)),
    }


def allocated_arenas(loaded: LoadedEngine) -> dict[str, int]:
    """Bytes by arena as they were allocated."""
    cache, streamed = loaded.engine.scheduler.cache, loaded.streamed
    parked = [slot.numel() for group in loaded.parking.slots for slot in group]
    return {
        "held weights": streamed.memory.held_nbytes,
        "rings": streamed.ring_nbytes,
        "KV cache": sum(pool.nbytes for pool in cache.pools),
        "staged weights": streamed.memory.slab.nbytes,
        "parked": sum(parked),
    }
