"""The range of every sampling setting. Knows no row: whoever reads rows compares, words the error and converts.

As liberal as vLLM, so that a job file written for it is accepted here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType

_INT63 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """`low` to `high`, both included unless `open_low`; `value in limit` is False for NaN and infinities."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        above = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return above if self.high in (_INT63, sys.float_info.max) else f"{above} and at most {self.high:g}"


LIMITS = MappingProxyType(
    {
        "max_tokens": Limit(1, _INT63),
        "temperature": Limit(0.0, sys.float_info.max),
        "top_k": Limit(0, _INT63),
        "top_p": Limit(0.0, 1.0, open_low=True),
        "min_p": Limit(0.0, 1.0),
        "repetition_penalty": Limit(0.0, sys.float_info.max, open_low=True),
        "presence_penalty": Limit(-2.0, 2.0),
        "frequency_penalty": Limit(-2.0, 2.0),
        "seed": Limit(0, _INT63),
        "logprobs": Limit(0, 20),
    }
)
