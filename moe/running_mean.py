"""An exponential moving average."""

from __future__ import annotations


class RunningMean:
    """`value` is None before the first observation unless it is given; `newest` is the weight of each new observation.

    Statistics of many experts at once are arrays that decay in the same way (routing_stats.py).
    """

    __slots__ = ("_newest", "value")

    def __init__(self, newest: float, value: float | None = None) -> None:
        self._newest = newest
        self.value = value

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self._newest * (value - self.value)
