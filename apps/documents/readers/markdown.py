"""All formats but PDF as Markdown: text files with their encodings and YAML front matter; HTML, EPUB and mail (.eml);
DOCX, PPTX and XLSX, of which slides and sheets are pages.
"""

import codecs
import posixpath
import re
from collections.abc import Iterable, Iterator
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from io import BytesIO
from typing import Any, cast
from urllib.parse import unquote
from zipfile import ZipFile

from ....face import guessed_encoding
from .content import Content, ReadCode, ReadFailure, clean, open_office, open_zip, text_type

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
    found = guessed_encoding(sample)
    if found is None:
        raise _no_text()
    return found


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


_CHARSET = re.compile(
    rb"""<meta[^>]+charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]+)|<\?xml[^>]+encoding=["']([A-Za-z0-9_.-]+)""", re.I
)
_DROPPED = ["script", "style", "noscript", "template", "svg", "iframe", "object", "img", "form", "nav"]
_BLANK_LINES = re.compile(r"\n{3,}")
_CONTAINER = "{urn:oasis:names:tc:opendocument:xmlns:container}"
_SHOWN = ("Subject", "From", "To", "Cc", "Date")
_OPF = "{http://www.idpf.org/2007/opf}"


def read_html(data: bytes) -> Content:
    """Raises ReadFailure."""
    markdown, title = html_to_markdown(_decoded(data))
    return Content("html", (markdown,), front_matter={"title": title} if title else {})


def _decoded(data: bytes) -> str:
    """By the page's own word for its encoding, unless that is wrong."""
    declared = _CHARSET.search(data[:4096])
    if declared is not None and not data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        try:
            return data.decode((declared[1] or declared[2]).decode("ascii"))
        except (LookupError, UnicodeDecodeError):
            pass
    return decode(data)[0]


def html_to_markdown(html: str) -> tuple[str, str]:
    """(the text as Markdown, its title)."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    soup = BeautifulSoup(html, "lxml")
    for tag in soup(_DROPPED):
        tag.decompose()
    title = clean(soup.title.get_text(" ", strip=True)) if soup.title else ""
    if soup.title:
        soup.title.decompose()
    markdown = MarkdownConverter(heading_style="ATX", bullets="-", autolinks=False).convert_soup(soup)
    return _BLANK_LINES.sub("\n\n", clean(markdown)).strip() + "\n", title


def read_epub(data: bytes) -> Content:
    """The chapters in the order of the book's spine. Raises ReadFailure."""
    archive = open_zip(data)
    try:
        package, title = _package(archive)
        chapters = [html_to_markdown(_decoded(archive.read(name)))[0] for name in _spine(archive, package)]
    except (KeyError, ValueError, SyntaxError) as error:
        raise ReadFailure(ReadCode.DAMAGED, f"the EPUB is damaged ({error}); copy the file again") from None
    return Content("epub", ("\n".join(chapters),), front_matter={"title": title} if title else {})


def _package(archive: ZipFile) -> tuple[str, str]:
    """(the path of the package file, the book's title)."""
    roots = [
        each.get("full-path") for each in read_xml(archive, "META-INF/container.xml").iter(f"{_CONTAINER}rootfile")
    ]
    if not roots or roots[0] is None:
        raise ValueError("its container names no package")
    title = read_xml(archive, roots[0]).find(".//{http://purl.org/dc/elements/1.1/}title")
    return roots[0], clean(title.text or "").strip() if title is not None else ""


def _spine(archive: ZipFile, package: str) -> Iterator[str]:
    """The paths of the chapters."""
    root, folder = read_xml(archive, package), posixpath.dirname(package)
    paths = {each.get("id"): each.get("href", "") for each in root.iter(f"{_OPF}item")}
    for each in root.iter(f"{_OPF}itemref"):
        yield posixpath.normpath(posixpath.join(folder, unquote(paths[each.get("idref")])))


def read_xml(archive: ZipFile, name: str) -> Any:
    """An XML file of the archive, without what its document type declares."""
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    return etree.fromstring(archive.read(name), parser)


def read_mail(data: bytes) -> Content:
    """The plain text of a mail, or its HTML as Markdown, behind its headers."""
    mail: EmailMessage = BytesParser(policy=policy.default).parsebytes(data)
    facts: dict[str, Any] = {name.lower(): clean(str(mail[name])) for name in _SHOWN if mail[name] is not None}
    attached = [clean(part.get_filename() or part.get_content_type()) for part in mail.iter_attachments()]
    if attached:
        facts["attachments"] = attached
    head = "\n".join(f"{name}: {facts[name.lower()]}" for name in _SHOWN if name.lower() in facts)
    names = f"\n\nAttachments: {', '.join(attached)}" if attached else ""
    return Content("email", (f"{head}\n\n{_body(mail)}{names}\n",), front_matter=facts)


def _body(mail: EmailMessage) -> str:
    part = mail.get_body(preferencelist=("plain", "html"))
    if part is None:
        return ""
    try:
        text = str(cast(Any, part).get_content())
    except (LookupError, KeyError, AttributeError):
        # An encoding that Python does not know.
        payload = part.get_payload(decode=True)
        text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
    return html_to_markdown(text)[0] if part.get_content_subtype() == "html" else clean(text).strip()


def read_rtf(data: bytes) -> Content:
    """The text, without pictures, styles and tables' lines."""
    from striprtf.striprtf import rtf_to_text

    return Content("rtf", (clean(rtf_to_text(data.decode("latin-1"), errors="replace")).strip() + "\n",))


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
