"""Ceilings: sizes as people write them. Torch-free."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from fractions import Fraction

from .errors import ExitCode, MoedgeError

GIB = 1 << 30
FORMS = "7GiB, 7G, 7GB, 500MiB, 80%, auto, auto-1GiB or 0"
_UNITS = {"b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
# Bounded lengths: a size of a million digits is refused here, not multiplied.
_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)\s*"
_SIZE = re.compile(_NUMBER + r"([a-z]+)")
_PERCENT = re.compile(_NUMBER + "%")


class BadSize(MoedgeError, ValueError):
    """A size is not written in a known form, or leaves nothing."""

    exit_code = ExitCode.USAGE


def auto_host(available: int) -> int:
    """What RAM gives by itself: 2 GiB, or a tenth of what is available where that is more, stays for others."""
    return max(0, available - max(2 * GIB, available // 10))


def auto_device(available: int) -> int:
    """What a device gives by itself: half a GiB of what is free stays for its desktop."""
    return max(0, available - GIB // 2)


def parse_size(text: str, total: int, available: int, auto: Callable[[int], int] = auto_host) -> int:
    """Bytes that `text` means for a tier of `total` bytes of which `available` are free.

    G and GiB are 2^30, GB is 10^9; a percentage is of `total`; `auto` is `auto(available)`. Fractions are rounded
    down. The result may exceed what the tier has: it is a ceiling, not a promise.
    """
    wanted = text.strip().lower()
    if wanted == "0":
        return 0
    if wanted.startswith("auto"):
        return _auto(text, wanted.removeprefix("auto").strip(), auto(available))
    if match := _PERCENT.fullmatch(wanted):
        if Fraction(match[1]) > 100:
            raise BadSize(f"{text!r} is more than all of it; wanted at most 100%")
        return int(Fraction(match[1]) * total / 100)
    return _absolute(text, wanted)


def _auto(text: str, rest: str, granted: int) -> int:
    if not rest:
        return granted
    if not rest.startswith("-"):
        raise _unknown(text)
    less = _absolute(text, rest[1:].strip())
    if less > granted:
        raise BadSize(f"{text!r} leaves nothing: auto is {gib(granted)} here")
    return granted - less


def _absolute(text: str, wanted: str) -> int:
    match = _SIZE.fullmatch(wanted)
    if match is None or match[2] not in _UNITS:
        raise _unknown(text)
    return int(Fraction(match[1]) * _UNITS[match[2]])


def _unknown(text: str) -> BadSize:
    return BadSize(f"{text[:40]!r} is not a size; wanted {FORMS}; nearest: {nearest_form(text)}")


def nearest_form(text: str) -> str:
    """The accepted form that `text` probably meant."""
    wanted = text.strip().lower().replace("percent", "%")
    match = re.search(r"(\d{1,15}(?:[.,]\d{1,9})?)\s*([kmgt%]?)", wanted)
    if match is None:
        return "auto"
    number, unit = match[1].replace(",", "."), (match[2] or "g").upper()
    if difflib.get_close_matches(re.split(r"[^a-z]", wanted)[0], ["auto"]):
        return f"auto-{number}{unit.replace('%', 'G')}iB"
    if unit == "%":
        return f"{number}%" if Fraction(number) <= 100 else "100%"
    return f"{number}{unit}iB"


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 100 else f"{nbytes / 1024:.1f} KiB"
