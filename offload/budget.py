"""Parses the sizes of budgets as people write them: 7GiB, 80%, auto-1GiB. Torch-free."""

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
# The number of digits is bounded, so that a size of a million digits is refused and not multiplied.
_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)\s*"
_SIZE = re.compile(_NUMBER + r"([a-z]+)")
_PERCENT = re.compile(_NUMBER + "%")


class BadSize(MoedgeError, ValueError):
    """A size is not written in a known form, or `auto` minus the given size is negative."""

    exit_code = ExitCode.USAGE


def auto_host(available: int) -> int:
    """The default host budget: leaves 2 GiB or a tenth of the available memory to others, whichever is more."""
    return max(0, available - max(2 * GIB, available // 10))


def auto_device(available: int) -> int:
    """The default device budget: leaves half a GiB of the free memory to the desktop."""
    return max(0, available - GIB // 2)


def parse_size(text: str, total: int, available: int, auto: Callable[[int], int] = auto_host) -> int:
    """The number of bytes that `text` means for a tier of `total` bytes of which `available` are free.

    G and GiB are 2^30, GB is 10^9; a percentage is of `total`; `auto` is `auto(available)`. Fractions are rounded
    down. The result may exceed what the tier has: it is an upper limit. Raises BadSize.
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
    reserve = _absolute(text, rest[1:].strip())
    if reserve > granted:
        raise BadSize(f"{text!r} leaves nothing: auto is {gib(granted)} here")
    return granted - reserve


def _absolute(text: str, wanted: str) -> int:
    match = _SIZE.fullmatch(wanted)
    if match is None or match[2] not in _UNITS:
        raise _unknown(text)
    return int(Fraction(match[1]) * _UNITS[match[2]])


def _unknown(text: str) -> BadSize:
    return BadSize(f"{text[:40]!r} is not a size; wanted {FORMS}; nearest: {nearest_form(text)}")


def nearest_form(text: str) -> str:
    """The accepted form that the user probably meant by `text`."""
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


def gib(nbytes: float) -> str:
    """Bytes for people: `12.34 GiB`; `1.50 TiB` from 1 TiB, `5 MiB` below 0.1 GiB, `240 KiB` below 1 MiB and `1.5 KiB`
    below 10 KiB, where the tenth is not zero."""
    if nbytes >= 2**40:
        return f"{nbytes / 2**40:.2f} TiB"
    if nbytes >= GIB / 10:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes <= 0 or round(nbytes / 1024) >= 1024:
        return f"{nbytes / 2**20:.0f} MiB"
    return f"{nbytes / 1024:.{1 if nbytes < 10 * 1024 else 0}f}".removesuffix(".0") + " KiB"
