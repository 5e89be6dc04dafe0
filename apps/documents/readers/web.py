"""HTML, EPUB and mail (.eml) as Markdown."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from typing import Any, cast
from urllib.parse import unquote
from zipfile import ZipFile

from .content import Content, ReadCode, ReadFailure, clean
from .detection import open_zip
from .plain_text import decode

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
    roots = [each.get("full-path") for each in _xml(archive, "META-INF/container.xml").iter(f"{_CONTAINER}rootfile")]
    if not roots or roots[0] is None:
        raise ValueError("its container names no package")
    title = _xml(archive, roots[0]).find(".//{http://purl.org/dc/elements/1.1/}title")
    return roots[0], clean(title.text or "").strip() if title is not None else ""


def _spine(archive: ZipFile, package: str) -> Iterator[str]:
    """The paths of the chapters."""
    root, folder = _xml(archive, package), posixpath.dirname(package)
    paths = {each.get("id"): each.get("href", "") for each in root.iter(f"{_OPF}item")}
    for each in root.iter(f"{_OPF}itemref"):
        yield posixpath.normpath(posixpath.join(folder, unquote(paths[each.get("idref")])))


def _xml(archive: ZipFile, name: str) -> Any:
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
