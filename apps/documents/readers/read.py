"""One file to text: the reader of its type, and every fault of a reader as a ReadFailure."""

import zipfile
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ....face import errors
from .containers import read_archive, read_msg
from .content import Content, ReadCode, ReadFailure, clean, detect
from .markdown import read_docx, read_epub, read_html, read_mail, read_pptx, read_rtf, read_text, read_xlsx
from .open_document import read_odp, read_ods, read_odt
from .pdf import Progress, read_image, read_pdf

# A reader of the user's own: the bytes and the file's name to its text, its pages, or None for a file of other readers.
OwnReader = Callable[[bytes, str], str | list[str] | None]
_READERS = {
    "docx": read_docx, "pptx": read_pptx, "xlsx": read_xlsx, "epub": read_epub, "html": read_html, "email": read_mail,
    "odt": read_odt, "ods": read_ods, "odp": read_odp, "rtf": read_rtf, "msg": read_msg,
}  # fmt: skip
_BY_NAME = {"archive": read_archive, "mailbox": read_archive, "text": read_text}

_WITH_TESSERACT = {"pdf": read_pdf, "image": read_image}
# What the readers of these files import. Other types are found in their bytes, and are errors of their file.
_NEEDS = {".pdf": "pypdfium2", ".docx": "mammoth", ".pptx": "pptx", ".xlsx": "openpyxl", ".epub": "lxml",
          ".odt": "lxml", ".ods": "lxml", ".odp": "lxml", ".rtf": "striprtf", ".msg": "olefile",
          ".html": "markdownify", ".htm": "markdownify", ".xhtml": "markdownify"}  # fmt: skip


def refuse_missing_readers(suffixes: Iterable[str]) -> None:
    """Raises MissingExtra for the first suffix whose reader is not installed."""
    for suffix in suffixes:
        if suffix in _NEEDS and find_spec(_NEEDS[suffix]) is None:
            raise errors.MissingExtra(f"reading {suffix} files needs {_NEEDS[suffix]}", "docs", ", or leave them out")


def read(data: bytes, name: str, own: OwnReader | None, languages: str | None, progress: Progress) -> Content:
    """The text of a file. Raises ReadFailure, and MemoryError where the limit on memory was reached."""
    if not data.strip():
        raise ReadFailure(ReadCode.EMPTY, "the file is empty")
    content = None if own is None else _own(own, data, name)
    content = content or _read(data, name, languages, progress)
    if content.blank:
        raise ReadFailure(ReadCode.EMPTY, f"the file, of type {content.type}, has no text")
    return content


def _read(data: bytes, name: str, languages: str | None, progress: Progress) -> Content:
    kind = detect(data, name)
    try:
        if kind in _WITH_TESSERACT:
            return _WITH_TESSERACT[kind](data, languages, progress)
        return _READERS[kind](data) if kind in _READERS else _BY_NAME[kind](data, name)
    except (ReadFailure, MemoryError):
        raise
    except ModuleNotFoundError as error:
        message = f"reading {kind} needs {error.name}: pip install 'moedge[docs]'"
        raise ReadFailure(ReadCode.UNREADABLE, message) from None
    except (zipfile.BadZipFile, Exception) as error:
        # Whatever a parser raises is the fault of this one file.
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ReadFailure(ReadCode.DAMAGED, f"the {kind} cannot be read ({what}); open and save it again") from None


def _own(own: OwnReader, data: bytes, name: str) -> Content | None:
    try:
        found: Any = own(data, name)
    except MemoryError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ReadFailure(ReadCode.UNREADABLE, f"--reader failed on the file ({what})") from None
    if found is None:
        return None
    pages = [found] if isinstance(found, str) else found
    if not isinstance(pages, list | tuple) or not all(isinstance(page, str) for page in pages):
        raise ReadFailure(ReadCode.UNREADABLE, "--reader must return a string, a list of strings (pages), or None")
    return Content("own", tuple(map(clean, pages)), paged=not isinstance(found, str))


def load_own(name: str) -> OwnReader:
    """The function that `module:function` names. Raises ValueError."""
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]
