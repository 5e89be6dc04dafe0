"""The result of one check, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """`WARN` costs speed or memory, `FAIL` prevents a run."""

    OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is the command to type or the thing to change; empty if nothing is wrong."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Verdict.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, fix)
