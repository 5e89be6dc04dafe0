"""The one JSON that all parts merge into (schema moedge.gpu/1), and its table."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SCHEMA = "moedge.gpu/1"


class Report:
    """Steps by part; each is saved as soon as it is done, and not run again where the file has it.

    A part that has run for `part_seconds` begins no further step: what is left is for the next call. Steps without
    the text `only` in their name are passed over.
    """

    def __init__(
        self, path: Path, again: bool, machine: dict[str, Any], only: str = "", part_seconds: float = 480
    ) -> None:
        self.path = path
        self._only = only
        self.num_left = 0
        self._part_seconds = part_seconds
        self._begun: dict[str, float] = {}
        self.content: dict[str, Any] = {"schema": SCHEMA, "machine": machine, "parts": {}}
        if path.exists() and not again:
            found = json.loads(path.read_text())
            if (found.get("schema"), found.get("machine")) != (SCHEMA, machine):
                raise SystemExit(f"{path} is of another machine or layout; give another --out, or --again")
            self.content = found

    def step(self, part: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        if self._only not in name:
            return
        steps = self.content["parts"].setdefault(part, {})
        if name not in steps or not steps[name]["ok"]:
            if time.perf_counter() - self._begun.setdefault(part, time.perf_counter()) > self._part_seconds:
                self.num_left += 1
                print(f"| {part} | {name} | left for the next call |")
                return
            begun = time.perf_counter()
            try:
                steps[name] = {"ok": True, **run()}
            except Exception as error:
                steps[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            steps[name]["seconds"] = round(time.perf_counter() - begun, 2)
            self._save()
        print(_line(part, name, steps[name]), flush=True)

    def steps(self, part: str) -> list[tuple[str, dict[str, Any]]]:
        """Those of a part that have run, and passed."""
        return [(name, step) for name, step in self.content["parts"].get(part, {}).items() if step["ok"]]

    @property
    def ok(self) -> bool:
        return all(step["ok"] for steps in self.content["parts"].values() for step in steps.values())

    def _save(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(draft, self.path)


def machine(fake: bool) -> dict[str, Any]:
    """What the numbers belong to; `fake` says that no GPU was there and nothing of them is a speed."""
    names = ("torch", "transformers", "bitsandbytes", "triton")
    facts: dict[str, Any] = {"fake": fake, "cpu": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    facts |= {name: _version(name) for name in names}
    if not fake:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "nbytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _line(part: str, name: str, step: dict[str, Any]) -> str:
    if not step["ok"]:
        return f"| {part} | {name} | FAILED {step['error'][:160]} |"
    values = ", ".join(
        f"{key} {_short(value)}" for key, value in step.items() if key not in {"ok", "seconds", "output"}
    )
    return f"| {part} | {name} | {values} | {step['seconds']} s |"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value) if not isinstance(value, dict) else " ".join(f"{k}: {_short(v)}" for k, v in value.items())
