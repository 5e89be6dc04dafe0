"""Tries a tokenizer.json in a limited process before this one reads it.

The library that reads such files believes them: a file of kilobytes may ask for gigabytes.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ...offload.checkpoint.header import load_object
from ..settings.errors import TokenizerError
from .confinement import clean_environment, shut_in

# Vocabularies of 262,144 tokens with their merges take 33 MB.
MAX_NBYTES = 64 << 20
_MEMORY_NBYTES = 2 << 30
_SECONDS = 60
_COMMAND = (sys.executable, "-P", "-m", "moedge.runtime.text.tokenizer_trial")

_NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Sequence", "Strip", "StripAccents",
}  # fmt: skip
_PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
    "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_POST_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}
_MAX_PARTS = 32
_MAX_INSERTED_NBYTES, _MAX_GROWTH = 16, 8
_MAX_AROUND = 64
_MAX_ADDED = 1 << 16
_TRIED = "The quick (brown) fox_jumps over 13 lazy dogs\n\u00e9\u4e16\U0001f600\u0627 " * 8


@lru_cache(maxsize=16)
def try_tokenizer(data: bytes) -> None:
    """Raises TokenizerError for a tokenizer.json that is refused, or that takes more than the limits."""
    try:
        done = subprocess.run(
            _COMMAND, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment(),
            timeout=4 * _SECONDS, check=False,
        )  # fmt: skip
        found = done.stdout.decode(errors="replace")[:500]
    except subprocess.TimeoutExpired:
        found = ""
    if found != "sound":
        took = f"reading it takes more than {_MEMORY_NBYTES >> 20:,} MiB or {_SECONDS} s"
        raise TokenizerError(
            f"tokenizer.json is refused: {found or took}; check that its files are complete, or use another"
        )


def check_parts(content: Mapping[str, Any]) -> None:
    """Raises ValueError, which says what was found, for a part that is not known, or that makes much of a text."""
    growth = 1.0
    for part in _parts(content.get("normalizer"), _NORMALIZERS, "normalizers"):
        growth *= _growth(part)
    if growth > _MAX_GROWTH:
        raise ValueError(f"its normalizers make a text {growth:g} times as long, at most {_MAX_GROWTH} are accepted")
    for _ in _parts(content.get("pre_tokenizer"), _PRE_TOKENIZERS, "pretokenizers"):
        pass
    around = sum(_around(part) for part in _parts(content.get("post_processor"), _POST_PROCESSORS, "processors"))
    if around > _MAX_AROUND:
        raise ValueError(f"it puts {around:,} tokens around a text, at most {_MAX_AROUND} are accepted")
    if (added := len(content.get("added_tokens") or ())) > _MAX_ADDED:
        raise ValueError(f"it adds {added:,} tokens to its vocabulary, at most {_MAX_ADDED:,} are accepted")


def _parts(part: Any, known: set[str], inside: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """A part, and those that it is a sequence of, which are under the name `inside`."""
    if part is None:
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in known or depth > 4:
        raise ValueError(f"a part is {kind!a:.60}, {depth} levels deep; wanted one of {', '.join(sorted(known))}")
    if kind != "Sequence":
        yield part
        return
    parts = part.get(inside)
    if not isinstance(parts, list) or len(parts) > _MAX_PARTS:
        raise ValueError(f"a sequence of {inside} is not a list of at most {_MAX_PARTS}")
    for each in parts:
        yield from _parts(each, known, inside, depth + 1)


def _growth(part: Mapping[str, Any]) -> float:
    inserted = part.get("prepend") if part["type"] == "Prepend" else part.get("content", "")
    if part["type"] not in ("Prepend", "Replace"):
        return 1.0
    nbytes = len(inserted.encode("utf-8", "replace")) if isinstance(inserted, str) else 1 << 62
    if nbytes > _MAX_INSERTED_NBYTES:
        raise ValueError(f"a {part['type']} inserts {nbytes:,} bytes, at most {_MAX_INSERTED_NBYTES} are accepted")
    pattern = part.get("pattern")
    if part["type"] == "Prepend" or not isinstance(pattern, dict):
        return 1.0
    replaced = str(pattern.get("String") or " ")
    return max(1.0, nbytes / len(replaced.encode("utf-8", "replace")))


def _around(part: Mapping[str, Any]) -> int:
    """The tokens that a post-processor puts around one text."""
    if part["type"] != "TemplateProcessing":
        return 2
    tokens, count, texts = part.get("special_tokens") or {}, 0, 0
    for piece in part.get("single") or ():
        name = (piece.get("SpecialToken") or {}).get("id") if isinstance(piece, dict) else None
        found = tokens.get(name) if isinstance(tokens, dict) else None
        texts += name is None
        count += len(found.get("ids") or ()) if isinstance(found, dict) else 0
    if texts > 1:
        raise ValueError("it repeats the text")
    return count


def main() -> None:
    data = sys.stdin.buffer.read(MAX_NBYTES + 1)
    from tokenizers import Tokenizer

    shut_in(_MEMORY_NBYTES, 16)
    import signal

    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        check_parts(load_object(data))
        text = data.decode()
        for affixes in (False, True):
            Tokenizer.from_str(text).encode(_TRIED, add_special_tokens=affixes)
        said = "sound"
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        said = f"{error}"[:500] or "it cannot be read"
    except MemoryError:
        said = ""
    except BaseException as error:
        # The parser raises bare exceptions. What this process may not read, the other refuses in its own words.
        said = "sound" if type(error) is Exception else f"{error}"[:500]
    sys.stdout.write(said)


if __name__ == "__main__":
    main()
