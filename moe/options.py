"""How experts are streamed and held, where a person says so. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .key import ExpertKey
from .modes import Mode
from .policy import HoldPolicy, Lru, Popular


class Hold(StrEnum):
    POPULAR = "popular"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """`stream` is the mode of every layer and pass, chosen for each by its cost where it is None."""

    stream: Mode | None = None
    hold: Hold = Hold.POPULAR

    def policy(
        self,
        held: Iterable[ExpertKey],
        nbytes: Mapping[int, int],
        chances: Mapping[int, npt.NDArray[np.float64]],
    ) -> HoldPolicy:
        return Lru(held, nbytes) if self.hold is Hold.LRU else Popular(held, nbytes, chances)


DEFAULTS = ExpertOptions()
