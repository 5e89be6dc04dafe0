"""What a model's generation_config.json says of sampling: values for settings that nobody has given."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ...offload.checkpoint.checkpoint import find_inside
from ..settings.errors import shown
from .params import LIMITS

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_NBYTES = 4 << 20


def unset_names(temperature: float | None) -> frozenset[str]:
    """The names that a model may set where the caller gives `temperature` alone, or not even that."""
    return frozenset(NAMES) - (set() if temperature is None else {"temperature"})


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """`values` by the name of a sampling parameter; `ignored` says in words which of the file's are not used."""

    values: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def only(self, names: Collection[str]) -> Self:
        """Without the values that somebody else has set."""
        return replace(self, values={name: value for name, value in self.values.items() if name in names})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def model_defaults(folder: Path) -> ModelDefaults:
    """What the model's folder recommends; nothing where there is no file, or one that is no JSON object.

    Sampling is off where `do_sample` is false; where it is true and there is no temperature, that is 1, as in
    transformers.
    """
    data = find_inside(folder, FILE, _MAX_NBYTES)
    if data is None:
        return ModelDefaults()
    try:
        # A broken file is refused where its end tokens are read.
        content = json.loads(data)
    except (ValueError, RecursionError):
        return ModelDefaults()
    return _read(content) if isinstance(content, dict) else ModelDefaults()


def _read(content: Mapping[str, Any]) -> ModelDefaults:
    values: dict[str, Any] = {}
    ignored = []
    for name in NAMES:
        value = content.get(name)
        if value is None:
            continue
        if not _valid(name, value):
            ignored.append(f"{FILE}: {name} {shown(value)} is ignored; wanted a number {LIMITS[name]}")
        else:
            values[name] = max(int(value), 0) if name == "top_k" else float(value)
    sampled = content.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        ignored.append(f"{FILE}: do_sample {shown(sampled)} is ignored; wanted true or false")
    if sampled is False:
        values["temperature"] = 0.0
    elif sampled is True:
        values.setdefault("temperature", 1.0)
    return ModelDefaults(values, tuple(ignored))


def _valid(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "top_k":
        # -1 is off, as 0 is.
        whole = isinstance(value, int) or value.is_integer()
        return whole and (value == -1 or value in LIMITS[name])
    return value in LIMITS[name]
