"""Short records whose fields a model is to find, and what counts as an answer."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "maxLength": 40},
        "amount": {"type": "integer"},
    },
    "required": ["name", "city", "amount"],
    "additionalProperties": False,
}
_NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Farid", "Grace", "Hugo", "Irene", "James", "Kenji", "Laura")
_CITIES = ("Paris", "London", "Tokyo", "Madrid", "Oslo", "Cairo", "Lima", "Delhi", "Boston", "Rome", "Vienna", "Prague")
_SENTENCES = (
    "{name} from {city} paid {amount} dollars for the repair.", "In {city}, {name} sold {amount} books last year.",
    "The invoice over {amount} euros went to {name} in {city}.", "{name} lives in {city} and owes us {amount} dollars.",
)  # fmt: skip
_TYPES = {"name": str, "city": str, "amount": int}


@dataclass(frozen=True, slots=True)
class Record:
    sentence: str
    fields: dict[str, Any]

    @property
    def question(self) -> str:
        return (
            'Find the name, the city and the amount. Answer only with JSON such as {"name": "Peter", "city": "Berlin", '
            f'"amount": 12}}.\n\nText: {self.sentence}'
        )


def make(count: int) -> list[Record]:
    """The same records each time."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        fields = {"name": draw.choice(_NAMES), "city": draw.choice(_CITIES), "amount": draw.randrange(2, 990)}
        found.append(Record(draw.choice(_SENTENCES).format_map(fields), fields))
    return found


def read(text: str) -> dict[str, Any] | None:
    """An answer that the schema allows, in a code block or not; None for another."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except ValueError:
        return None
    valid = isinstance(value, dict) and {name: type(each) for name, each in value.items()} == _TYPES
    return value if valid else None


def same(found: dict[str, Any] | None, wanted: dict[str, Any] | None) -> int:
    """How many fields are equal."""
    return sum(found[name] == value for name, value in wanted.items()) if found and wanted else 0
