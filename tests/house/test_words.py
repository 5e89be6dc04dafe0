"""Names and prose use the words of docs/glossary.md: words that were retired do not come back."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("quant", "offload", "moe", "runtime", "cli", "api")
PAGES = (*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md")

# No part of a name, be it of a module, class, function, parameter or attribute: what to say instead.
RETIRED_IN_NAMES = {
    "alike": "correlation, common, identical",
    "binds": "bottleneck",
    "chances": "probabilities",
    "coming": "pending, fetch_queue",
    "conced": "fall_back, fallback",
    "concession": "fallback",
    "crew": "worker_pool, workers",
    "gap": "latency, idle",
    "hungry": "has_capacity",
    "outlook": "request, what_if",
    "place": "slot, extent, offset, torch_device, position, path, rank",
    "places": "slots, extents, offsets, positions, paths, ranks",
    "placed": "slotted, positioned, or the noun that it is",
    "room": "budget, free_nbytes, headroom",
    "saw": "observe",
    "seen": "observed, stats",
    "standing": "configured, status",
    "stands": "is",
    "tolerant": "safe",
    "told": "predicted, reported",
    "wish": "options",
}

# In docstrings, comments, messages and pages. "In place" and "takes place" are the only places that are left.
RETIRED_IN_PROSE = {
    r"\balike\b": "the same, both",
    r"\bconced\w*|\bconcession\w*": "fall back, fallback",
    r"\bcrew\b": "worker pool",
    r"\bhungry\b": "has free capacity",
    r"\boutlook\b": "request, what-if",
    r"(?<!in )(?<!takes )(?<!take )\bplaces?\b": "slot, extent, position, path, where",
    r"\brooms?\b(?! temperature)": "budget, memory, free bytes, space",
    r"\bsaw\b": "observed, read",
    r"\btold\b": "given, predicted, reported",
    r"\bg(?:o|oes|oing|one) on with\b": "resume, continue",
    r"\bso many\b|\bso much\b": "N, that number of",
    r"\bstands? (?:in|for|at|beside|there)\b": "is in, is listed in, means",
}

_PARTS = re.compile(r"[a-z]+|[A-Z][a-z]*|[A-Z]+(?![a-z])")


def names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file defines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def retired_names(source: str) -> list[tuple[int, str]]:
    found = []
    for line, name in names(source):
        parts = [part.lower() for part in _PARTS.findall(name)]
        if any(part in RETIRED_IN_NAMES or part.startswith("conced") for part in parts):
            found.append((line, name))
    return sorted(set(found))


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a file's comments and strings, f-strings without what is in their braces."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            yield token.start[0], re.sub(r"\{[^{}]*\}", "", token.string)


def retired_prose(texts: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    return [
        (line + text[: match.start()].count("\n"), match[0])
        for line, text in texts
        for pattern in RETIRED_IN_PROSE
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def page_prose(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a Markdown page without its code."""
    fenced = False
    for line, text in enumerate(page.splitlines(), 1):
        fenced ^= text.lstrip().startswith("```")
        if not fenced:
            yield line, re.sub(r"`[^`]*`", "", text)


def folders() -> list[str]:
    return sorted({str(path.parent.relative_to(ROOT)) for floor in CODE for path in (ROOT / floor).rglob("*.py")})


@pytest.mark.parametrize("folder", folders())
def test_no_retired_word_names_anything_or_stands_in_prose(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).glob("*.py")):
        source = path.read_text()
        for line, word in [*retired_names(source), *retired_prose(prose(source))]:
            found.append(f"{path.relative_to(ROOT)}:{line}: {word}")
        found += [f"{path.relative_to(ROOT)}: the file's name"] * any(
            p in RETIRED_IN_NAMES for p in path.stem.split("_")
        )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_retired_word_stands_on_a_page(page: Path) -> None:
    found = [f"{page.name}:{line}: {word}" for line, word in retired_prose(page_prose(page.read_text()))]
    assert not found, "\n".join(found)


def test_retired_words_are_noticed() -> None:
    source = (
        'def place_for(room):\n    """Says why the crew saw it."""\n    self.was_told = f"so many {room}"  # in place\n'
    )
    assert [name for _, name in retired_names(source)] == ["place_for", "room", "was_told"]
    assert {word for _, word in retired_prose(prose(source))} == {"crew", "saw", "so many"}
    assert not retired_names("def replaces(placement, headroom): ...")
    assert [word for _, word in retired_prose(page_prose("a place\n```\na place\n```\n`place` in place\n"))] == [
        "place"
    ]
