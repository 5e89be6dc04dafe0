"""What the energy of a planned job costs, beside the price of hosted tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .runtime.settings.errors import BadArgument


@dataclass(frozen=True, slots=True)
class EnergyPrice:
    """What a machine takes in `watts`, the `price` of a kWh, and of a million `hosted` tokens, prompt and generated."""

    watts: float
    price: float | None
    hosted: tuple[float, float] | None

    def of(self, job: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
        """Of the job and the prediction of a plan's document: loading counts, and so do all tokens of the job."""
        kwh = self.watts * (predicted["loading_s"] + predicted["seconds"]) / 3.6e6
        cost = None if self.price is None else self.price * kwh
        hosted = None
        if self.hosted is not None:
            hosted = (self.hosted[0] * job["prompt_tokens"] + self.hosted[1] * job["generated_tokens"]) / 1e6
        found = {"kwh": kwh, "cost": cost, "hosted": hosted}
        thousands = job["sequences"] / 1000
        each = {f"{name}_per_1000_rows": value and value / thousands for name, value in found.items()}
        return {"watts": self.watts, "price": self.price, "hosted_prices": self.hosted, **found, **each}


def energy_of(watts: float | None, price: str | None, hosted: str | None) -> EnergyPrice | None:
    """Of the options of `moedge plan`; None without `watts`.

    Raises BadArgument for what is no price, and for prices without `watts`.
    """
    if watts is None:
        if lonely := [name for name, value in (("--price", price), ("--hosted", hosted)) if value is not None]:
            raise BadArgument(f"{lonely[0]} needs --watts: what the machine takes while it computes")
        return None
    each = _prices("--price", price.removesuffix("/kWh"), 1, "0.30/kWh") if price is not None else [None]
    tokens = _prices("--hosted", hosted, 2, "0.10,0.40 of a million tokens") if hosted is not None else None
    return EnergyPrice(watts, each[0], None if tokens is None else (tokens[0], tokens[1]))


def _prices(name: str, text: str, count: int, wanted: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or not all(0 <= price < float("inf") for price in found):
        raise BadArgument(f"{name} {text} is no price; wanted {wanted}")
    return found
