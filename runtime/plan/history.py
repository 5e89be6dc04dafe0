"""Predicted and measured speeds of this machine's runs: kept, shown, and learned from. Torch-free.

One small file in the user's state folder, newest first, replaced by a rename: killed at any moment, the old one or the
new one is there. A damaged one counts as empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from platformdirs import user_state_path

from ...offload.atomic_file import own_name, write_atomically
from ...offload.machine.hardware import Hardware
from ..shape.model_shape import ModelShape, shape_to_json
from .loading_cost import GENERATING, LOADING
from .placement import Plan

SCHEMA = "moedge.runs/3"
MOST_KEPT = 200
# What a job does beside bare passes (sampling, text, the journal, caches that they empty) is in no profile. First jobs
# took 1.05 to 1.7 times the time of compute alone, the middle one a quarter more (bench/results/log.md).
BESIDE_PASSES = MappingProxyType({"compute": 1.25})


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One finished run. `machine`, `shape` and `formats` say of which kind it was; tok/s are of generated tokens.

    `ratio` is the seconds that generating took over those that are predicted without corrections for the tokens that
    it really had, and `bottleneck` the resource that this prediction waits for. `loading_ratio` is the same for
    loading, 0 where nothing was loaded.
    """

    at: str
    machine: str
    model: str
    shape: str
    formats: str
    bottleneck: str
    ratio: float
    predicted_tok_s: float
    measured_tok_s: float
    predicted_peak_nbytes: int
    measured_peak_nbytes: int
    loading_ratio: float = 0.0


def history_path() -> Path:
    return user_state_path("moedge") / "runs.json"


def last_runs(count: int = 5, path: Path | None = None) -> Sequence[RunRecord]:
    """The newest runs of whatever kind, newest first."""
    return _read(path or history_path())[:count]


def keep(record: RunRecord, path: Path | None = None) -> None:
    """Raises OSError where the state folder cannot be written."""
    path = path or history_path()
    records = [record, *_read(path)][:MOST_KEPT]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "runs": [asdict(each) for each in records]}, indent=1)
    write_atomically(path, text.encode(), own_name(path))


def corrections(records: Sequence[RunRecord], machine: str, shape: str, formats: str) -> dict[str, float]:
    """How many times as long as predicted the newest run of the same model took here, to generate and to load.

    `formats` is a `formats_key`, whose weight format counts for nothing: a correction that knew some formats only would
    make those that never ran look fast. What other models taught does not count. A correction is for what is shown;
    choices are made without it, so that the same command chooses the same whatever ran before.
    """
    kind = machine, shape, _kind(formats)
    same = [each for each in records if (each.machine, each.shape, _kind(each.formats)) == kind]
    loading = [each.loading_ratio for each in same if each.loading_ratio]
    newest = ((GENERATING, [each.ratio for each in same]), (LOADING, loading))
    return {name: ratios[0] for name, ratios in newest if ratios}


def _kind(formats: str) -> str:
    """What a `formats_key` says beside the weight format."""
    return formats.partition(" ")[2]


def machine_key(hardware: Hardware) -> str:
    """The hardware that a speed belongs to; the folder of prepared weights may be on another disk."""
    return _digest(asdict(hardware))


def shape_key(shape: ModelShape) -> str:
    return _digest(shape_to_json(shape))


def formats_key(quant: str, dtype: str, compute: str, deterministic: bool, on_device: bool) -> str:
    """The formats that determine how a model is computed, first those that "auto" chooses by speed."""
    weights = f"{quant}x{compute}" if compute == "int8" else quant
    words = [weights, dtype, "deterministic" if deterministic else "", "device" if on_device else ""]
    return " ".join(word for word in words if word)


def formats_of(plan: Plan) -> str:
    return formats_key(plan.quant, plan.dtype, plan.compute, plan.deterministic, plan.staging is not None)


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> list[RunRecord]:
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != SCHEMA:
            return []
        return [_record(content) for content in document["runs"]][:MOST_KEPT]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _record(content: Mapping[str, Any]) -> RunRecord:
    """Raises ValueError or TypeError for what `keep` did not write."""
    record = RunRecord(**content)
    for field in fields(RunRecord):
        value = getattr(record, field.name)
        if field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r}")
        if field.type != "str" and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{field.name} is {value!r}")
    if not record.ratio:
        raise ValueError("a ratio of 0")
    return record
