"""Text files: encodings, YAML front matter, and what is no text at all."""

from __future__ import annotations

import codecs
import re
from typing import Any

from .content import Content, ReadCode, ReadFailure, clean
from .detection import text_type

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_SAMPLE_NBYTES = 1 << 16
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_MAX_FRONT_MATTER = 64 << 10


def read_text(data: bytes, name: str) -> Content:
    """Text, Markdown, source code, CSV and JSON, as they are. Raises ReadFailure for binary data."""
    text, encoding = decode(data)
    text = clean(text)
    kind = text_type(text, name)
    front_matter: dict[str, Any] = {}
    if kind == "markdown":
        front_matter, text = split_front_matter(text)
    notes = () if encoding == "utf-8" else (f"decoded as {encoding}",)
    return Content(kind, (text,), front_matter=front_matter, notes=notes)


def decode(data: bytes) -> tuple[str, str]:
    """(the text, its encoding). Raises ReadFailure where the bytes are no text in any encoding."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace"), encoding
    if b"\0" in data[:_SAMPLE_NBYTES]:
        encoding = _wide(data[:_SAMPLE_NBYTES])
        return data.decode(encoding, "replace"), encoding
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        encoding = _guessed(data[:_SAMPLE_NBYTES])
        text = data.decode(encoding, "replace")
    else:
        encoding = "utf-8"
    sample = text[:_SAMPLE_NBYTES]
    if sum(character < " " and character not in "\t\n\r\f\x1b" for character in sample) > len(sample) * 0.02:
        raise _no_text()
    return text, encoding


def _wide(sample: bytes) -> str:
    """UTF-16 without a mark: of mostly Latin text, every other byte is 0."""
    even, odd = sample[::2].count(0) * 2 / len(sample), sample[1::2].count(0) * 2 / len(sample)
    if odd > 0.3 and even < 0.05:
        return "utf-16-le"
    if even > 0.3 and odd < 0.05:
        return "utf-16-be"
    raise _no_text()


def _guessed(sample: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(sample).best()
    if best is None:
        raise _no_text()
    # Of encodings that give the same text, the one that most files have.
    try:
        return "cp1252" if sample.decode("cp1252") == str(best) else best.encoding
    except UnicodeDecodeError:
        return best.encoding


def _no_text() -> ReadFailure:
    return ReadFailure(ReadCode.UNSUPPORTED, "it is binary data of a type that no reader takes; give one with --reader")


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """(the YAML front matter of Markdown, the text behind it); what is no YAML object stays in the text."""
    found = _FRONT_MATTER.match(text)
    if found is None or len(found[1]) > _MAX_FRONT_MATTER or re.search(r"[&*]\w", found[1]):
        # Anchors and aliases could grow without end, and nobody needs them in front matter.
        return {}, text
    import yaml

    try:
        values = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}, text
    if not isinstance(values, dict):
        return {}, text
    return {str(key): _plain(value) for key, value in values.items()}, text[found.end() :]


def _plain(value: Any) -> Any:
    """What JSON can hold: dates become text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | bool) else str(value)
