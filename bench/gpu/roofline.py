"""A pass against what binds it: the link, the device's memory, or its arithmetic, all measured in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import rates

from moedge.offload.machine.link import measure_link
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.placement import Plan
from moedge.runtime.shape.model_shape import ModelShape


@dataclass(frozen=True)
class Rates:
    """bytes/s over the link, bytes/s read and written within the device, FLOP/s of bfloat16 products of many rows."""

    link: float
    memory: float
    compute: float


def measure_rates() -> Rates | None:
    """None where there is no link to measure."""
    link = measure_link(256 << 20)
    if link is None or link.pinned_bytes_s is None:
        return None
    compute = max(rates.products()["flop_s"]["none"].values())
    return Rates(link.pinned_bytes_s, rates.device_copy()["bytes_s"], compute)


def bounds(shape: ModelShape, plan: Plan, rates: Rates, live: int, tokens: int, streamed: int) -> dict[str, float]:
    """Least seconds of a pass in which `live` sequences of `tokens` tokens decode, by what would bind it.

    `streamed` bytes cross the link; the device's memory takes each of them in and gives it out, reads what is held, and
    all keys and values.
    """
    kv = live * tokens * sum(KVSpec(group, plan.kv, plan.kv_block).token_nbytes for group in shape.kv_groups)
    return {
        "link": streamed / rates.link,
        "memory": (2 * streamed + plan.held_nbytes + kv) / rates.memory,
        "compute": 2 * shape.active_parameters * live / rates.compute,
    }


def against_roofline(
    shape: ModelShape, plan: Plan, rates: Rates | None, live: int, tokens: int, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Which bound is the highest, and how far above it the measured pass lies."""
    if rates is None:
        return {}
    found = bounds(shape, plan, rates, live, tokens, measured["link_nbytes"])
    binding = max(found, key=found.__getitem__)
    return {"bounds_s": found, "bound_by": binding, "pass_over_bound": measured["pass_s"] / found[binding]}
