"""OpenDocument text, sheets and slides (.odt, .ods, .odp): what its XML says in words, as Markdown.

The format: OASIS Open Document Format for Office Applications 1.3, part 3.
"""

from collections.abc import Iterator
from typing import Any

from .content import Content, clean, open_office
from .markdown import read_xml, table

_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
_PRESENTATION = "{urn:oasis:names:tc:opendocument:xmlns:presentation:1.0}"
# What is no text of the document: remarks, deleted passages, settings.
_DROPPED = {
    f"{_OFFICE}annotation",
    f"{_TEXT}tracked-changes",
    f"{_OFFICE}forms",
    f"{_TABLE}shapes",
    f"{_TEXT}ruby-text",
}
# A sheet repeats its last cells and rows up to its limits; only repetitions of something are counted.
_MOST_REPEATED = 1000


def read_odt(data: bytes) -> Content:
    """Headings, paragraphs, lists and tables; notes stand where they are referred to. Raises ReadFailure."""
    return Content("odt", ("\n\n".join(_blocks(_body(data, "text"))) + "\n",))


def read_ods(data: bytes) -> Content:
    """A page for each sheet, with values where the file has formulas. Raises ReadFailure."""
    sheets = _body(data, "spreadsheet").iter(f"{_TABLE}table")
    return Content("ods", tuple(_sheet(each) for each in sheets), paged=True)


def read_odp(data: bytes) -> Content:
    """A page for each slide, with its notes. Raises ReadFailure."""
    slides = _body(data, "presentation").iter(f"{_DRAW}page")
    return Content("odp", tuple(_slide(slide, number) for number, slide in enumerate(slides, 1)), paged=True)


def _body(data: bytes, kind: str) -> Any:
    found = read_xml(open_office(data), "content.xml").find(f"{_OFFICE}body/{_OFFICE}{kind}")
    if found is None:
        raise ValueError(f"its content has no {kind}")
    return found


def _blocks(parent: Any, depth: int = 0) -> Iterator[str]:
    """Pieces of Markdown with an empty line between them; items of a list are one piece."""
    for each in parent:
        if each.tag == f"{_TEXT}h":
            level = min(6, max(1, int(each.get(f"{_TEXT}outline-level", "1"))))
            text = _line(each)
            if text:
                yield f"{'#' * level} {text}"
        elif each.tag == f"{_TEXT}p":
            if text := _line(each):
                yield text
        elif each.tag == f"{_TEXT}list":
            if text := "\n".join(_items(each, depth)):
                yield text
        elif each.tag == f"{_TABLE}table":
            if text := table(_rows(each)):
                yield text
        elif isinstance(each.tag, str) and each.tag not in _DROPPED:
            yield from _blocks(each, depth)


def _items(parent: Any, depth: int) -> Iterator[str]:
    for item in parent.iterchildren(f"{_TEXT}list-item", f"{_TEXT}list-header"):
        mark = "- "
        for block in _blocks(item, depth + 1):
            # A list in an item is indented already.
            own = not block.lstrip().startswith("- ")
            yield f"{'  ' * depth}{mark}{block}" if own else block
            mark = "  " if own else mark


def _line(paragraph: Any) -> str:
    return " ".join(clean("".join(_pieces(paragraph))).split(" ")).strip()


def _pieces(node: Any) -> Iterator[str]:
    """The text of a paragraph with its spaces, tabs and breaks, and of frames and notes in it."""
    yield node.text or ""
    for each in node:
        if each.tag == f"{_TEXT}s":
            yield " " * min(_MOST_REPEATED, int(each.get(f"{_TEXT}c", "1")))
        elif each.tag == f"{_TEXT}tab":
            yield "\t"
        elif each.tag == f"{_TEXT}line-break":
            yield "\n"
        elif each.tag == f"{_TEXT}note":
            yield f" ({' '.join(_blocks(each))})"
        elif isinstance(each.tag, str) and each.tag not in _DROPPED:
            yield from _pieces(each)
        yield each.tail or ""


def _rows(parent: Any) -> Iterator[list[str]]:
    for row in parent.iter(f"{_TABLE}table-row"):
        cells = list[str]()
        for cell in row.iterchildren(f"{_TABLE}table-cell", f"{_TABLE}covered-table-cell"):
            cells += [" ".join(_blocks(cell))] * _repeated(cell, "columns")
        while cells and not cells[-1]:
            cells.pop()
        if cells:
            for _ in range(_repeated(row, "rows")):
                yield cells


def _repeated(node: Any, what: str) -> int:
    return min(_MOST_REPEATED, max(1, int(node.get(f"{_TABLE}number-{what}-repeated", "1"))))


def _sheet(sheet: Any) -> str:
    rows = table(_rows(sheet))
    return f"# {clean(sheet.get(f'{_TABLE}name', ''))}\n\n{rows}\n" if rows else ""


def _slide(slide: Any, number: int) -> str:
    notes = slide.find(f"{_PRESENTATION}notes")
    said = "" if notes is None else " ".join(_blocks(notes))
    if notes is not None:
        slide.remove(notes)
    lines = [f"# Slide {number}", *_blocks(slide)]
    return "\n\n".join([*lines, f"Notes: {said}"] if said else lines) + "\n"
