"""The text of one file, why there may be none, and the type of a file by its content. The name decides only between
types that are all text.
"""

import json
import re
import zipfile
from dataclasses import dataclass, field
from enum import StrEnum
from io import BytesIO
from pathlib import PurePath
from typing import Any

# Seconds by the clock that a reader has for each of the processor: a busy machine, or Tesseract, takes them.
WAITING = 4


class ReadCode(StrEnum):
    """Why a file has no text; docs/documents.md lists them."""

    EMPTY = "document_empty"
    NO_TEXT = "document_no_text"
    ENCRYPTED = "document_encrypted"
    DAMAGED = "document_damaged"
    UNSUPPORTED = "document_unsupported"
    UNREADABLE = "document_unreadable"
    CHANGED = "document_changed"
    TOO_LARGE = "document_too_large"
    TIME_LIMIT = "document_time_limit"
    MEMORY_LIMIT = "document_memory_limit"
    CRASHED = "document_crashed"

    @property
    def permanent(self) -> bool:
        """Whether the same bytes would give it again, on any machine at any time."""
        return self in _PERMANENT


_PERMANENT = {ReadCode.EMPTY, ReadCode.ENCRYPTED, ReadCode.DAMAGED, ReadCode.UNSUPPORTED}


class ReadFailure(Exception):
    """A file could not be read. Never leaves the folder `documents`."""

    def __init__(self, code: ReadCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Content:
    """What a reader found: `pages` is the text, in one piece unless it is `paged`, as PDFs and slides are.

    `front_matter` are facts that the file states about itself: YAML front matter, headers of a mail, a title. `notes`
    say what was left out, or read in another way.
    """

    type: str
    pages: tuple[str, ...]
    paged: bool = False
    front_matter: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def blank(self) -> bool:
        return not any(page.strip() for page in self.pages)


# Control characters but tab, line feed and form feed.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")


def clean(text: str) -> str:
    """The text with \\n as its line end, without control characters, and without lone surrogates."""
    text = _CONTROLS.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_ZIP, _OLE = (b"PK\x03\x04", b"PK\x05\x06"), b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
# Part names that only one kind of office document has.
_OFFICE = (("word/document.xml", "docx"), ("ppt/presentation.xml", "pptx"), ("xl/workbook.xml", "xlsx"))
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*")
_OPEN_DOCUMENT = "application/vnd.oasis.opendocument."
_OPEN = {"text": "odt", "spreadsheet": "ods", "presentation": "odp"}
_BINARY = (
    (b"\x1f\x8b", "a gzip file"), (b"7z\xbc\xaf", "a 7z archive"), (b"Rar!", "a RAR archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"), (b"\x7fELF", "a program"), (b"MZ\x90", "a program"),
    (b"SQLite format 3", "a database"), (b"PAR1", "a Parquet file"), (b"ID3", "audio"), (b"OggS", "audio"),
)  # fmt: skip
_HTML = re.compile(rb"<!doctype\s+html|<html|<head|<body", re.IGNORECASE)
# Matched one after the other: a pattern for any number of them would try every way to divide them.
_BEFORE_HTML = re.compile(rb"\s+|<!--.*?-->|<\?xml[^>]*>", re.DOTALL)
_HEADER = re.compile(rb"([A-Za-z][A-Za-z0-9-]*):[ \t].*\n")
_CONTINUED = re.compile(rb"[ \t].*\n")
_MAIL_HEADERS = {b"from", b"to", b"subject", b"date", b"received", b"message-id", b"mime-version", b"return-path"}
_BY_SUFFIX = {
    **dict.fromkeys((".md", ".markdown", ".mdx"), "markdown"),
    **dict.fromkeys((".csv", ".tsv", ".tab"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".ipynb", ".geojson"), "json"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys(
        (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".js", ".ts", ".tsx", ".jsx",
         ".rb", ".php", ".sh", ".pl", ".lua", ".sql", ".r", ".jl", ".scala", ".swift", ".cs", ".toml", ".yaml", ".yml",
         ".ini", ".cfg", ".xml", ".css", ".tex", ".rst"),
        "source",
    ),
}  # fmt: skip
# Limits on archives, which all office documents are.
MAX_ENTRIES, MAX_INFLATED_NBYTES, MAX_RATIO = 10_000, 256 << 20, 200
_RATIO_COUNTS_FROM = 8 << 20
# A longer JSON text is not parsed only to know that it is one.
_MAX_PARSED_NBYTES = 16 << 20


def detect(data: bytes, name: str) -> str:
    """`pdf`, `docx`, `pptx`, `xlsx`, `odt`, `ods`, `odp`, `rtf`, `epub`, `html`, `email`, `msg`, `image`, `archive`,
    `mailbox`, or `text`, which `text_type` divides.

    Raises ReadFailure for what is surely something else.
    """
    if data.startswith(b"%PDF-"):
        return "pdf"
    if data.startswith(_ZIP):
        return _zip_type(data)
    if data.startswith(_OLE):
        return _ole_type(data)
    if data.startswith(b"{\\rtf"):
        return "rtf"
    if data.startswith(_IMAGES):
        return "image"
    for magic, what in _BINARY:
        if data.startswith(magic):
            raise ReadFailure(ReadCode.UNSUPPORTED, f"it is {what}, which no reader takes; give one with --reader")
    if _is_late_pdf(data, name):
        return "pdf"
    if data.startswith(b"From ") and _suffix(name) == ".mbox":
        return "mailbox"
    if _is_html(data[:4096].removeprefix(b"\xef\xbb\xbf")) or _BY_SUFFIX.get(_suffix(name)) == "html":
        return "html"
    return "email" if is_mail(data, name) else "text"


def _is_late_pdf(data: bytes, name: str) -> bool:
    """Whether a PDF begins within 1,024 bytes, as readers allow, and not a text that mentions one."""
    if b"%PDF-" not in data[:1024] or _suffix(name) in (*_BY_SUFFIX, ".txt", ".eml"):
        return False
    return _suffix(name) == ".pdf" or b"%%EOF" in data[-2048:]


def _is_html(head: bytes) -> bool:
    at = 0
    while (found := _BEFORE_HTML.match(head, at)) is not None:
        at = found.end()
    return _HTML.match(head, at) is not None


def text_type(text: str, name: str) -> str:
    """`json` by content; `markdown`, `csv` or `source` by the name; else `text`."""
    start = text.lstrip()[:1]
    if start in ("{", "[") and len(text) <= _MAX_PARSED_NBYTES and _is_json(text):
        return "json"
    named = _BY_SUFFIX.get(_suffix(name), "text")
    return "text" if named == "html" else named


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _suffix(name: str) -> str:
    return PurePath(name).suffix.lower()


def is_mail(data: bytes, name: str) -> bool:
    """Whether it begins with headers of a mail: three of the usual ones, or one where the name says .eml."""
    head, end = data[: 64 << 10], 0
    found = set()
    while (header := _HEADER.match(head, end)) is not None:
        found.add(header[1].lower())
        end = header.end()
        while (continued := _CONTINUED.match(head, end)) is not None:
            end = continued.end()
    return len(found & _MAIL_HEADERS) >= (1 if _suffix(name) == ".eml" else 3)


def open_zip(data: bytes) -> zipfile.ZipFile:
    """The archive, whose sizes were checked. Raises ReadFailure for damaged and encrypted ones, and for bombs."""
    try:
        archive = zipfile.ZipFile(BytesIO(data))
        entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
        raise ReadFailure(ReadCode.DAMAGED, f"the archive is damaged ({error}); copy the file again") from None
    inflated = sum(each.file_size for each in entries)
    if len(entries) > MAX_ENTRIES or inflated > MAX_INFLATED_NBYTES:
        raise ReadFailure(
            ReadCode.TOO_LARGE,
            f"the archive has {len(entries):,} entries of {inflated:,} bytes; at most {MAX_ENTRIES:,} of "
            f"{MAX_INFLATED_NBYTES:,} bytes are read",
        )
    if inflated > max(_RATIO_COUNTS_FROM, MAX_RATIO * len(data)):
        raise ReadFailure(ReadCode.TOO_LARGE, f"the archive inflates {inflated // max(1, len(data)):,} times: a bomb")
    if any(each.flag_bits & 1 for each in entries):
        raise ReadFailure(ReadCode.ENCRYPTED, "the file is encrypted; save it without a password")
    return archive


def open_office(data: bytes) -> zipfile.ZipFile:
    """The same for an office document, whose XML may declare no document type: its entities could grow without end."""
    archive = open_zip(data)
    for name in archive.namelist():
        if name.endswith((".xml", ".rels")):
            with archive.open(name) as part:
                if b"<!DOCTYPE" in part.read(1024):
                    raise ReadFailure(ReadCode.DAMAGED, f"{name[:100]} declares a document type, which is not allowed")
    return archive


def _zip_type(data: bytes) -> str:
    archive = open_zip(data)
    names = set(archive.namelist())
    for part, kind in _OFFICE:
        if part in names:
            return kind
    if "META-INF/container.xml" in names:
        return "epub"
    if "mimetype" in names:
        what = archive.read("mimetype")[:80].decode("ascii", "replace").strip()
        if found := _OPEN.get(what.removeprefix(_OPEN_DOCUMENT).removesuffix("-template")):
            return found
        raise ReadFailure(ReadCode.UNSUPPORTED, f"it is {what}; save it as DOCX, XLSX, PPTX or PDF")
    return "archive"


def _ole_type(data: bytes) -> str:
    """`msg`, the only one that is read. Raises ReadFailure."""
    if "EncryptedPackage".encode("utf-16-le") in data:
        raise ReadFailure(ReadCode.ENCRYPTED, "the file is encrypted; save it without a password")
    if "__properties_version1.0".encode("utf-16-le") in data:
        return "msg"
    raise ReadFailure(ReadCode.UNSUPPORTED, "it is an old Office document; save it as DOCX, XLSX, PPTX or PDF")
