"""PDF by PDFium, page by page; pages that are pictures of text by Tesseract, where it is installed."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .content import Content, ReadCode, ReadFailure, clean

# How PDFium writes a hyphen at a line's end.
_HYPHEN = re.compile("[\x02\ufffe](?:\r?\n)?")
_OCR_DPI = 200
_MAX_PIXELS = 50_000_000

# Called before each page that Tesseract reads, with its number: the limit on time is one page's.
Progress = Callable[[int], None]


def read_pdf(data: bytes, languages: str | None, progress: Progress) -> Content:
    """`languages` are Tesseract's, such as "eng+deu"; None reads no scans. Raises ReadFailure."""
    import pypdfium2

    document = _open(pypdfium2, data)
    pages = [_text(page) for page in document]
    scans = [number for number, text in enumerate(pages) if not text.strip()]
    binary = shutil.which("tesseract") if languages and scans else None
    notes: tuple[str, ...] = ()
    if binary is not None and languages is not None:
        for number in scans:
            progress(number)
            pages[number] = _ocr(document[number], binary, languages)
        notes = (f"{len(scans)} of {len(pages)} pages read by Tesseract",)
    elif scans and len(scans) < len(pages):
        notes = (f"{len(scans)} of {len(pages)} pages have no text (pages {_listed(scans)})",)
    found = document.get_metadata_dict(skip_empty=True)
    content = Content(
        "pdf",
        tuple(pages),
        paged=True,
        front_matter={
            name.lower(): clean(str(found[name]))
            for name in ("Title", "Author", "Subject", "Keywords")
            if name in found
        },
        notes=notes,
    )
    if content.blank:
        raise ReadFailure(ReadCode.NO_TEXT, _scan(len(pages), binary))
    return content


def read_image(data: bytes, languages: str | None, progress: Progress) -> Content:
    """The text in a picture, of all pages of a TIFF, by Tesseract. Raises ReadFailure where it is not installed."""
    binary = shutil.which("tesseract") if languages else None
    if binary is None or languages is None:
        raise ReadFailure(ReadCode.NO_TEXT, "it is a picture; install Tesseract, or give --reader")
    progress(1)
    text = _recognized(data, [binary, "stdin", "stdout", "-l", languages])
    if not text.strip():
        raise ReadFailure(ReadCode.NO_TEXT, "it is a picture in which Tesseract found no text")
    return Content("image", (text,), notes=("read by Tesseract",))


def tesseract() -> list[Path]:
    """What is started to read scans: the program, and that which runs it where it is a script; empty without one."""
    found = shutil.which("tesseract")
    if found is None:
        return []
    with Path(found).open("rb") as file:
        first = file.readline(4096)
    runs = first[2:].split()[:1] if first.startswith(b"#!") else []
    return [Path(found), *(Path(os.fsdecode(each)) for each in runs)]


def _open(pypdfium2: Any, data: bytes) -> Any:
    try:
        document = pypdfium2.PdfDocument(data)
        len(document)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise ReadFailure(ReadCode.ENCRYPTED, "the PDF is encrypted; save it without a password") from None
        raise ReadFailure(ReadCode.DAMAGED, f"the PDF is damaged ({error}); copy the file again") from None
    return document


def _text(page: Any) -> str:
    text = page.get_textpage().get_text_bounded()
    return clean(_HYPHEN.sub("", text))


def _scan(num_pages: int, binary: str | None) -> str:
    pages = f"none of its {num_pages:,} pages has text: it is a scan"
    if binary is not None:
        return f"{pages}, and Tesseract found no text either"
    return f"{pages}; install Tesseract, or give --reader"


def _ocr(page: Any, binary: str, languages: str) -> str:
    """The text of a page's picture. Raises ReadFailure."""
    width, height = page.get_size()
    scale = min(_OCR_DPI / 72, (_MAX_PIXELS / max(1.0, width * height)) ** 0.5)
    bitmap = page.render(scale=scale, grayscale=True)
    rows = bytes(bitmap.buffer)
    pixels = b"".join(rows[at : at + bitmap.width] for at in range(0, bitmap.stride * bitmap.height, bitmap.stride))
    picture = b"P5 %d %d 255\n" % (bitmap.width, bitmap.height) + pixels
    return _recognized(picture, [binary, "stdin", "stdout", "-l", languages, "--dpi", str(_OCR_DPI)])


def _recognized(picture: bytes, command: list[str]) -> str:
    """What Tesseract reads in a picture. Raises ReadFailure."""
    done = subprocess.run(command, input=picture, capture_output=True, check=False, env={"OMP_THREAD_LIMIT": "1"})
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()[:200]
        raise ReadFailure(ReadCode.NO_TEXT, f"Tesseract failed on a page ({message})")
    return clean(done.stdout.decode("utf-8", "replace").replace("\f", ""))


def _listed(numbers: list[int]) -> str:
    first = ", ".join(str(number + 1) for number in numbers[:8])
    return first if len(numbers) <= 8 else f"{first}, ..."
