"""What the energy of a job costs, planned or run, beside the price of hosted tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .runtime.settings.errors import BadArgument


@dataclass(frozen=True, slots=True)
class EnergyPrice:
    """What a machine takes in `watts`, the `price` of a kWh, and of a million `hosted` tokens, prompt and generated."""

    watts: float
    price: float | None
    hosted: tuple[float, float] | None

    def of(self, seconds: float, rows: int, prompt_tokens: float, generated_tokens: float) -> dict[str, Any]:
        """Of a job that takes `seconds`, loading included; None stands for what has no price."""
        kwh = self.watts * seconds / 3.6e6
        cost = None if self.price is None else self.price * kwh
        hosted = None
        if self.hosted is not None:
            hosted = (self.hosted[0] * prompt_tokens + self.hosted[1] * generated_tokens) / 1e6
        found = {"kwh": kwh, "cost": cost, "hosted": hosted}
        each = {f"{name}_per_1000_rows": value and value / rows * 1000 for name, value in found.items()}
        return {"watts": self.watts, "price": self.price, "hosted_prices": self.hosted, **found, **each}


def energy_lines(energy: Mapping[str, Any]) -> Iterator[str]:
    """What `EnergyPrice.of` says, each with what 1,000 rows take of it."""

    def each(name: str) -> str:
        return f"{energy[f'{name}_per_1000_rows']:,.3g} per 1,000 rows"

    yield f"energy at {energy['watts']:,g} W: {energy['kwh']:,.3g} kWh, {each('kwh')}"
    if energy["cost"] is not None:
        yield f"it costs {energy['cost']:,.2f}, {each('cost')}, at {energy['price']:,g} a kWh"
    if energy["hosted"] is not None:
        prompts, generated = energy["hosted_prices"]
        yield f"hosted at {prompts:,g} and {generated:,g} a million tokens: {energy['hosted']:,.2f}, {each('hosted')}"


def energy_of(options: Mapping[str, Any]) -> EnergyPrice | None:
    """Of the options of those names; None without `watts`.

    Raises BadArgument for what is no price, and for prices without `watts`.
    """
    watts, price, hosted = (options.get(name) for name in ("watts", "price", "hosted"))
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
