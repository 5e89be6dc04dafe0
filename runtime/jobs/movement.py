"""What moved while a job ran, in its summary's words: bytes, waits, and what became of experts."""

from __future__ import annotations

from ...moe.forecast import ForecastCounts
from ..load import LoadedEngine
from .summary import Experts, Forecast, Moved, Stalls


def moved(loaded: LoadedEngine) -> Moved:
    streamed, tokens = loaded.streamed, loaded.engine.metrics.generated_tokens
    disk = streamed.nbytes_from_disk
    device = streamed.nbytes_to_device if loaded.device else None
    if not tokens:
        return Moved(disk, device)
    return Moved(disk, device, disk / tokens, None if device is None else device / tokens)


def stalls(loaded: LoadedEngine) -> Stalls:
    disk, link = loaded.streamed.seconds_waited
    return Stalls(disk, link if loaded.device else None)


def experts(loaded: LoadedEngine, total: int) -> Experts:
    """`total` experts has the model. What is not streamed has neither hits nor misses."""
    ours = loaded.streamed.experts
    found = Experts(ours.num_held, total, 0, ours.popularity.union, ours.popularity.unions)
    if (supply := ours.supply) is None:
        return found
    counts = supply.counts
    found.fetched, found.unwanted, found.swaps = counts.fetched, counts.unwanted, counts.swaps
    found.hit_rate = counts.hits / counts.wanted if counts.wanted else None
    found.modes = {str(mode): count for mode, count in sorted(counts.turns.items())}
    found.forecast = _forecast(supply.forecast.best, supply.forecast.counts, supply.seconds_each, supply.expert_nbytes)
    return found


def _forecast(best: str | None, counts: ForecastCounts, seconds_each: float, nbytes: int) -> Forecast:
    if not counts.asked:
        return Forecast(best)
    return Forecast(
        best,
        counts.right / counts.asked,
        counts.right / counts.wanted if counts.wanted else None,
        (counts.asked - counts.right) * nbytes,
        counts.saved * seconds_each,
    )
