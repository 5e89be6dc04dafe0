"""DOCX, PPTX and XLSX as Markdown: slides and sheets are pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

from .content import Content, clean
from .detection import open_office
from .web import html_to_markdown


def read_docx(data: bytes) -> Content:
    """Headings, lists and tables stay; pictures go."""
    import mammoth

    open_office(data)
    converted = mammoth.convert_to_html(BytesIO(data), convert_image=mammoth.images.img_element(lambda image: {}))
    return Content("docx", (html_to_markdown(converted.value)[0],))


def read_pptx(data: bytes) -> Content:
    """A page for each slide, with its notes."""
    from pptx import Presentation

    open_office(data)
    slides = Presentation(BytesIO(data)).slides
    return Content("pptx", tuple(clean(_slide(slide, number)) for number, slide in enumerate(slides, 1)), paged=True)


def _slide(slide: Any, number: int) -> str:
    title = slide.shapes.title
    lines = [
        f"# {title.text_frame.text.strip()}" if title is not None and title.has_text_frame else f"# Slide {number}"
    ]
    for shape in _shapes(slide.shapes):
        if title is not None and shape.shape_id == title.shape_id:
            continue
        if shape.has_text_frame and shape.text_frame.text.strip():
            lines.append(shape.text_frame.text)
        elif getattr(shape, "has_table", False):
            lines.append(table([cell.text for cell in row.cells] for row in shape.table.rows))
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        lines.append(f"Notes: {slide.notes_slide.notes_text_frame.text}")
    return "\n\n".join(lines) + "\n"


def _shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    """With those that are grouped."""
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        else:
            yield shape


def read_xlsx(data: bytes) -> Content:
    """A page for each sheet, with values where the file has formulas."""
    from openpyxl import load_workbook

    open_office(data)
    book = load_workbook(BytesIO(data), read_only=True, data_only=True, keep_links=False)
    return Content("xlsx", tuple(clean(_sheet(sheet)) for sheet in book.worksheets), paged=True)


def _sheet(sheet: Any) -> str:
    rows = []
    for row in sheet.iter_rows(values_only=True):
        cells = ["" if value is None else str(value) for value in row]
        while cells and not cells[-1]:
            cells.pop()
        if cells:
            rows.append(cells)
    return f"# {sheet.title}\n\n{table(rows)}\n" if rows else ""


def table(rows: Iterable[list[str]]) -> str:
    """A table of Markdown, whose first row is its header."""
    every = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not every:
        return ""
    width = max(map(len, every))
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in every]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])
