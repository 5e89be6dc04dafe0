"""What the user asked for: a batch job, in words that a journal can keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...moe.streaming_mode import DEFAULTS, ExpertOptions
from ..rows.row import Defaults
from ..settings.budgets import Budgets
from ..settings.settings import Settings
from .stop import Limits


@dataclass(frozen=True, slots=True)
class GoOn:
    """How to go on with a job that was begun: with the rows that failed, after it was cancelled, and which
    differences (by name) are accepted."""

    failed: bool = False
    cancelled: bool = False
    drift: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """`model` is a folder, a store or a hub id; `input` may be "-" for standard input; `plan` is a plan's file."""

    model: str
    input: Path
    output: Path
    settings: Settings = field(default_factory=Settings)
    defaults: Defaults = field(default_factory=Defaults)
    budgets: Budgets = field(default_factory=Budgets)
    limits: Limits = field(default_factory=Limits)
    experts: ExpertOptions = DEFAULTS
    lenient: bool = False
    go_on: GoOn = field(default_factory=GoOn)
    plan: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """What the job is; budgets, limits and the streaming of experts belong to a run of it."""
        return {
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model,
            "input": str(self.input if str(self.input) == "-" else self.input.resolve()),
            "output": str(self.output.resolve()),
            "settings": asdict(self.settings),
            "defaults": asdict(self.defaults),
            "lenient": self.lenient,
        }


def resumed(opened: Mapping[str, Any], piped: Path, budgets: Budgets, limits: Limits, go_on: GoOn) -> BatchRequest:
    """The request that began a job, under the budgets of today; `piped` is where rows of a pipe were kept."""
    request = opened["request"]
    defaults: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in request["defaults"].items()
    }
    return BatchRequest(
        model=request["model"],
        input=piped if request["input"] == "-" else Path(request["input"]),
        output=Path(request["output"]),
        settings=Settings(**request["settings"]),
        defaults=Defaults(**defaults),
        budgets=budgets,
        limits=limits,
        lenient=request["lenient"],
        go_on=replace(go_on, cancelled=True),
    )
