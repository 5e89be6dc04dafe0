"""Every way to stream experts gives the tokens of a run that holds all; its counters tell which way it was.

A few combinations are tests; all of them are tests/matrix/expert_modes.py.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

from moedge.moe import expert_cache
from moedge.moe.streaming_mode import Mode

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "olmoe", "llama4_text")
TIERS = ("disk-host", "host-device", "disk-host-device")
PROGRAMS = (0.0, 0.1, 0.5, 1.0)


@dataclass(frozen=True)
class Way:
    tiers: str
    share: float
    mode: Mode | None
    restless: bool

    def run(self, tiny: Any, fakes: Any) -> Any:
        """What it gave and moved; on a fake device where the tiers have one."""
        with restless() if self.restless else nullcontext():
            return self._run(tiny, fakes)

    def _run(self, tiny: Any, fakes: Any) -> Any:
        if self.tiers == "disk-host":
            return tiny.run(tiny.held(None, self.share), stream=self.mode)
        with fakes.FakeDevice(seed=int(10 * self.share)) as fake:
            plan = tiny.held(fake.device, self.share, on_disk=self.tiers == "disk-host-device")
            return tiny.run(plan, fake.device, stream=self.mode)


def restless() -> Any:
    """Within it every expert that arrives takes a slot, as long as one is left in the pass."""
    return patch.multiple(expert_cache, _MARGIN=-2.0, _SWAP_FRACTION=1.0)


def ways() -> Iterator[Way]:
    for tiers, share, mode, moves in product(TIERS, PROGRAMS, (None, *Mode), (False, True)):
        yield Way(tiers, share, mode, moves)


def faults(way: Way, ran: Any, wanted: list[list[int]]) -> Iterator[str]:
    """What of a run is not as it should be."""
    found = ran.experts
    if ran.tokens != wanted:
        yield "other tokens than with all experts held"
    if way.share == 1.0:
        if found.fetched:
            yield f"{found.fetched} experts moved though all are held"
        return
    if not found.fetched:
        yield "no expert moved though some are not held"
    if way.mode is not None and found.modes.keys() != {str(way.mode)}:
        yield f"ran in {found.modes}"
    if way.mode is Mode.WANTED and found.unwanted:
        yield f"{found.unwanted} experts were read that no token asked for"
    if way.mode is Mode.ALL and not found.unwanted:
        yield "nothing was read but what tokens asked for"
    if way.share == 0.0 and (found.hit_rate or found.swaps):
        yield "hits without a slot"
    if way.share >= 0.1 and way.restless and not found.swaps and way.tiers == "disk-host":
        yield "no slot changed its expert"
