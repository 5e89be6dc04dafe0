"""A folder with documents of every type, and with everything that can be wrong with a file."""

import gzip
import io
import json
import mailbox
import os
import random
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from .compound_file import compound_file


def pdf(pages: Sequence[str], extra: bytes = b"", trailer: bytes = b"") -> bytes:
    """A PDF whose pages have these lines of Latin text; `trailer` goes into its trailer, `extra` are more objects."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    kids = []
    for text in pages:
        lines = b"".join(b"(%s) Tj T* " % line.encode("latin-1") for line in text.split("\n"))
        stream = b"BT /F1 12 Tf 14 TL 50 750 Td " + lines + b"ET" if text else b"0 0 100 100 re f"
        kids.append(b"%d 0 R" % (len(objects) + 1))
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>"
            % (len(objects) + 2)
        )
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream))
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(kids), b" ".join(kids))
    if extra:
        objects.append(extra)
    data, offsets = b"%PDF-1.5\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    start = len(data)
    return data + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n"
        % (size, table, size, trailer, start)
    )


def encrypted_pdf() -> bytes:
    """No password opens it: what its password is compared with is no hash of any."""
    secret = b"<</Filter/Standard/V 1/R 2/P -4/O<%s>/U<%s>>>" % (b"11" * 32, b"22" * 32)
    return pdf(["secret"], secret, b"/ID[<%s><%s>]/Encrypt 6 0 R" % (b"33" * 16, b"33" * 16))


def zipped(entries: dict[str, str | bytes], stored: tuple[str, ...] = ()) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content, zipfile.ZIP_STORED if name in stored else None)
    return buffer.getvalue()


_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"


_OASIS = "urn:oasis:names:tc:opendocument:xmlns"


def open_document(kind: str, body: str) -> bytes:
    """An ODT, ODS or ODP (`text`, `spreadsheet`, `presentation`) with this XML as its content."""
    names = {"office": "office", "text": "text", "table": "table", "draw": "drawing", "presentation": "presentation"}
    spaces = " ".join(f'xmlns:{short}="{_OASIS}:{name}:1.0"' for short, name in names.items())
    content = f"<office:document-content {spaces}><office:body><office:{kind}>{body}</office:{kind}></office:body>"
    mimetype = f"application/vnd.oasis.opendocument.{kind}"
    return zipped({"mimetype": mimetype, "content.xml": f"{content}</office:document-content>"}, ("mimetype",))


def _cells(*texts: str) -> str:
    return "".join(f"<table:table-cell><text:p>{each}</text:p></table:table-cell>" for each in texts)


ODT = (
    '<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes><text:h text:outline-level="2">Offer</text:h>'
    '<text:p>Dear<text:s text:c="2"/>all,<text:line-break/>see<text:note><text:note-body><text:p>a note</text:p>'
    "</text:note-body></text:note>.<office:annotation><text:p>remark</text:p></office:annotation></text:p>"
    "<text:list><text:list-item><text:p>one</text:p><text:list><text:list-item><text:p>inner</text:p></text:list-item>"
    "</text:list></text:list-item><text:list-item><text:p>two</text:p></text:list-item></text:list>"
    f"<table:table><table:table-row>{_cells('item', 'price')}</table:table-row>"
    f"<table:table-row>{_cells('pen', '2')}</table:table-row></table:table>"
)
ODS = (
    f'<table:table table:name="Costs"><table:table-row>{_cells("item", "price")}</table:table-row>'
    f'<table:table-row table:number-rows-repeated="2">{_cells("pen", "2")}<table:table-cell '
    'table:number-columns-repeated="16000"/></table:table-row><table:table-row table:number-rows-repeated="1048000">'
    '<table:table-cell table:number-columns-repeated="16384"/></table:table-row></table:table>'
)
ODP = (
    "<draw:page><draw:frame><draw:text-box><text:p>Goals</text:p></draw:text-box></draw:frame><presentation:notes>"
    "<text:p>Say hello</text:p></presentation:notes></draw:page><draw:page><text:p>Plan</text:p></draw:page>"
)
RTF = rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}{\*\generator x;}\f0 Stra\'dfe \u8364? 12\par Second line\par}"


def docx(heading: str, *paragraphs: str, prolog: str = "") -> bytes:
    body = f'<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>{heading}</w:t></w:r></w:p>'
    body += "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    style = '<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style>'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    return zipped(
        {
            "[Content_Types].xml": f'<Types xmlns="{_TYPES}"><Default Extension="rels" ContentType="application/vnd.'
            f'openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" ContentType="{kind}'
            f'.document.main+xml"/><Override PartName="/word/styles.xml" ContentType="{kind}.styles+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{_RELATIONS}"><Relationship Id="r1" Type="{office}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
            "word/_rels/document.xml.rels": f'<Relationships xmlns="{_RELATIONS}"><Relationship Id="r1" '
            f'Type="{office}/styles" Target="styles.xml"/></Relationships>',
            "word/styles.xml": f'<w:styles xmlns:w="{_WORD}">{style}</w:styles>',
            "word/document.xml": f'{prolog}<w:document xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>',
        }
    )


def pptx(*slides: tuple[str, str]) -> bytes:
    from pptx import Presentation

    deck, buffer = Presentation(), io.BytesIO()
    for title, text in slides:
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = text
    deck.save(buffer)
    return buffer.getvalue()


def xlsx(**sheets: Sequence[Sequence[object]]) -> bytes:
    from openpyxl import Workbook

    book, buffer = Workbook(), io.BytesIO()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(list(row))
    book.save(buffer)
    return buffer.getvalue()


def epub(title: str, *chapters: str) -> bytes:
    items = "".join(f'<item id="c{n}" href="c{n}.xhtml" media-type="x"/>' for n in range(len(chapters)))
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>{title}</dc:title></metadata><manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    texts = {f"OEBPS/c{n}.xhtml": f"<html><body>{text}</body></html>" for n, text in enumerate(chapters)}
    return zipped(
        {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "OEBPS/book.opf": package, **texts},
        stored=("mimetype",),
    )


MAIL = (
    b"From: =?utf-8?q?J=C3=B6rg?= <j@example.org>\r\nTo: a@example.org\r\nSubject: Offer\r\n"
    b"Date: Mon, 05 Aug 2024 10:00:00 +0200\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: multipart/mixed; boundary="x"\r\n\r\n--x\r\nContent-Type: text/html; charset=utf-8\r\n\r\n'
    b"<p>The price is <b>40</b> euros.</p>\r\n--x\r\nContent-Type: application/pdf\r\n"
    b'Content-Disposition: attachment; filename="offer.pdf"\r\n\r\n%PDF\r\n--x--\r\n'
)
_TEXT_MAIL = b"From: a@example.org\r\nTo: b@example.org\r\nSubject: Lunch\r\n\r\nAt noon.\r\n"


def mail_with(subject: str, text: str, **attachments: bytes) -> bytes:
    """A mail as Python's own library makes it; names of attachments have `_` for their dot."""
    from email.message import EmailMessage

    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "a@example.org", "b@example.org", subject
    mail.set_content(text)
    for name, content in attachments.items():
        mail.add_attachment(content, maintype="application", subtype="octet-stream", filename=name.replace("_", "."))
    return mail.as_bytes()


def mailbox_of(*mails: bytes) -> bytes:
    """As Python's own library writes them, with lines of text that begin like a separator."""
    with tempfile.TemporaryDirectory() as folder:
        box = mailbox.mbox(Path(folder) / "box")
        for each in mails:
            box.add(each)
        box.close()
        return (Path(folder) / "box").read_bytes()


def outlook(subject: str, text: str, **attachments: bytes) -> bytes:
    """A message as Outlook saves it."""

    def wide(value: str) -> bytes:
        return value.encode("utf-16-le")

    streams: dict[str, Any] = {
        "__properties_version1.0": bytes(32), "__substg1.0_0037001F": wide(subject),
        "__substg1.0_0C1A001F": wide("Jörg"), "__substg1.0_1000001F": wide(text),
    }  # fmt: skip
    for number, (name, content) in enumerate(attachments.items()):
        streams[f"__attach_version1.0_#{number:08X}"] = {
            "__properties_version1.0": bytes(8), "__substg1.0_3707001F": wide(name.replace("_", ".")),
            "__substg1.0_37010102": content,
        }  # fmt: skip
    return compound_file(streams)


def _locked(data: bytes) -> bytes:
    """The same archive with its entries marked as encrypted."""
    local, central = data.index(b"PK\x03\x04"), data.index(b"PK\x01\x02")
    changed = bytearray(data)
    changed[local + 6] |= 1
    changed[central + 8] |= 1
    return bytes(changed)


_HTML = "<!DOCTYPE html><html><head><title>Page</title><script>evil()</script></head><body><h1>Head</h1>"
_BILLION = (
    '<?xml version="1.0"?><!DOCTYPE w [<!ENTITY a "aaaaaaaaaaaaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 20}">' for n in range(8))
    + "]>"
)

# What reading each file must give: its type and a piece of its text, or an error code.
GOOD: dict[str, tuple[bytes | None, str, str]] = {
    "report.pdf": (pdf(["First page", "Second page"]), "pdf", "Second page"),
    "letter.docx": (docx("Dear", "The sum is 12."), "docx", "# Dear"),
    "deck.pptx": (pptx(("Goals", "Grow"), ("Plan", "Sell")), "pptx", "# Plan"),
    "table.xlsx": (xlsx(Costs=[["item", "price"], ["pen", 2]], Empty=[]), "xlsx", "| pen | 2 |"),
    "offer.odt": (open_document("text", ODT), "odt", "- one\n  - inner\n- two\n\n| item | price |"),
    "note.odt": (open_document("text", ODT), "odt", "## Offer\n\nDear  all,\nsee (a note).\n\n- one"),
    "costs.ods": (
        open_document("spreadsheet", ODS),
        "ods",
        "| item | price |\n| --- | --- |\n| pen | 2 |\n| pen | 2 |\n",
    ),
    "deck.odp": (open_document("presentation", ODP), "odp", "# Slide 1\n\nGoals\n\nNotes: Say hello"),
    "letter.rtf": (RTF, "rtf", "Straße € 12\nSecond line"),
    "book.epub": (epub("Story", "<h1>One</h1><p>a</p>", "<h1>Two</h1><p>b</p>"), "epub", "# Two"),
    "page.html": (f"{_HTML}<p>Text &amp; more</p></body></html>".encode(), "html", "Text & more"),
    "old.htm": (f"{_HTML}<meta charset=iso-8859-1><p>Stra\xdfe</p>".encode("latin-1"), "html", "Straße"),
    "offer.eml": (MAIL, "email", "The price is **40** euros."),
    "notes.md": (b"---\ntitle: Notes\ndate: 2024-05-01\n---\n# Notes\n\nBuy milk.", "markdown", "# Notes\n\nBuy"),
    "plain.txt": (b"Just text.", "text", "Just text."),
    "code.py": (b"def f():\n    return 1\n", "source", "return 1"),
    "data.csv": (b"a,b\n1,2\n", "csv", "1,2"),
    "data.json": (b'{"a": [1, 2]}', "json", '"a"'),
    # Wrong or missing suffixes.
    "really_pdf.txt": (pdf(["Hidden"]), "pdf", "Hidden"),
    "really_text.pdf": (b"No PDF at all", "text", "No PDF"),
    "really_docx": (docx("Top"), "docx", "# Top"),
    "of_pdfs.md": (b"# PDF\n\nA file begins with %PDF-1.7 and ends with %%EOF.\n", "markdown", "ends with"),
    "from_printer.pdf": (b"sent by a printer\n" + pdf(["Scanned"]), "pdf", "Scanned"),
    # Encodings.
    "utf16.txt": ("Grüße aus Köln".encode("utf-16"), "text", "Grüße"),
    "utf16_no_mark.txt": ("plain words, two bytes each".encode("utf-16-le"), "text", "two bytes"),
    "bom.txt": (b"\xef\xbb\xbfwith mark", "text", "with mark"),
    "latin1.txt": ("Schöne Grüße aus Köln, die Straße ist für Äpfel da.".encode("latin-1"), "text", "Schöne Grüße"),
    "shift_jis.txt": ("これは日本語の文章です。文字コードを確かめます。".encode("shift_jis"), "text", "日本語の文章"),
    # Names.
    "two\nlines.txt": (b"A name of two lines", "text", "two lines"),
    "with space & ünïcode.txt": (b"A name with more", "text", "more"),
    "sub/deeper/inner.txt": (b"Deep down", "text", "Deep down"),
    "Offer.msg": (outlook("Offer", "See there.", terms_md=b"# Terms"), "email", "From: Jörg\n\nSee there."),
    "mail.eml": (
        mail_with("Bill", "Please pay.\n", bill_pdf=pdf(["Total 12"]), more_zip=zipped({"x.txt": "X says"})),
        "email",
        "Please pay.",
    ),
    # A link within the folder, made by `make`.
    "again.txt": (None, "text", "Just text."),
    # What lies in files of this folder, made by `make`.
    "offer.eml/offer.pdf": (None, "text", "%PDF"),
    "Offer.msg/terms.md": (None, "markdown", "# Terms"),
    "mail.eml/bill.pdf": (None, "pdf", "Total 12"),
    "mail.eml/more.zip/x.txt": (None, "text", "X says"),
    "bills.zip/1.pdf": (None, "pdf", "one"),
    "bills.zip/2.pdf": (None, "pdf", "two"),
    "all.zip/a.txt": (None, "text", "First"),
    "all.zip/a (2).txt": (None, "text", "Another of this name"),
    "all.zip/sub/b.md": (None, "markdown", "# Deeper"),
    "all.zip/up.txt": (None, "text", "Led out"),
    "all.zip/m.eml": (None, "email", "Attached"),
    "all.zip/m.eml/n.txt": (None, "text", "Two deep"),
    "box.mbox/00001.eml": (None, "email", "At noon."),
    "box.mbox/00002.eml": (None, "email", ">From here on"),
    "box.mbox/00002.eml/c.txt": (None, "text", "In a box"),
    "half.zip/good.txt": (None, "text", "All there"),
    "letter.zip": (docx("In disguise"), "docx", "# In disguise"),
}
BAD: dict[str, tuple[bytes | None, str]] = {
    "empty.txt": (b"", "document_empty"),
    "blank.txt": (b" \n\t\n", "document_empty"),
    "blank.docx": (docx(""), "document_empty"),
    "scan.pdf": (pdf(["", ""]), "document_no_text"),
    "cut.pdf": (b"%PDF-1.5\n1 0 obj\n<</Type/Cat", "document_damaged"),
    "cut.docx": (docx("Top", "x" * 4000)[:700], "document_damaged"),
    "locked.pdf": (encrypted_pdf(), "document_encrypted"),
    "locked.docx": (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100) + "EncryptedPackage".encode("utf-16-le"), "document_encrypted",
    ),
    "old.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "document_unsupported"),
    "photo.jpg": (b"\xff\xd8\xff\xe0" + bytes(64), "document_no_text"),
    "noise.txt": (bytes(range(256)) * 8, "document_unsupported"),
    "nothing.zip": (zipped({}), "document_empty"),
    "locked.zip": (_locked(zipped({"a.txt": "secret"})), "document_encrypted"),
    "cut.zip": (zipped({"a.txt": "x" * 4000})[:60], "document_damaged"),
    "no_mail.mbox": (b"From here on it is a letter", "document_damaged"),
    "half.zip": (
        zipped({"good.txt": "All there", "bad.txt": "Damaged"}, ("bad.txt",)).replace(b"Damaged", b"dAMAGED"),
        "document_damaged",
    ),
    "deep.zip/1.zip/2.zip/3.zip": (None, "document_too_large"),
    "all.zip/void.txt": (None, "document_empty"),
    "packed.txt.gz": (gzip.compress(b"text"), "document_unsupported"),
    "zip_bomb.docx": (zipped({"word/document.xml": bytes(80 << 20)}), "document_too_large"),
    "entity_bomb.docx": (docx("x", "&i;", prolog=_BILLION), "document_damaged"),
}  # fmt: skip


# Files that are no documents: what lies in them is.
_ARCHIVES = {
    "bills.zip": zipped({"1.pdf": pdf(["one"]), "2.pdf": pdf(["two"])}, ("1.pdf", "2.pdf")),
    "all.zip": zipped(
        {
            "a.txt": "First", "./a.txt": "Another of this name", "sub/b.md": "# Deeper", "sub/.draft/c.txt": "hidden",
            "../../up.txt": "Led out", "m.eml": mail_with("M", "Attached\n", n_txt=b"Two deep"), "void.txt": "",
        }
    ),
    "deep.zip": zipped({"1.zip": zipped({"2.zip": zipped({"3.zip": zipped({"4.txt": "Four deep"})})})}),
    "box.mbox": mailbox_of(_TEXT_MAIL, mail_with("Box", "Look\nFrom here on\n", c_txt=b"In a box")),
}  # fmt: skip
INSIDE = {name for name in (*GOOD, *BAD) if any(parent.suffix for parent in PurePath(name).parents)}


def make(folder: Path, outside: Path) -> None:
    """Writes all files, and what is no file. `outside` is a folder beside it."""
    files = {name: each[0] for name, each in (*GOOD.items(), *BAD.items())} | _ARCHIVES
    for name, content in [(name, content) for name, content in files.items() if content is not None]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    outside.mkdir(exist_ok=True)
    (outside / "secret.txt").write_text("not for the model")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "leak.txt").symlink_to(outside / "secret.txt")
    (folder / "leaks").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / "again.txt").symlink_to(folder / "plain.txt")
    (folder / "gone.txt").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe.txt")
    (folder / "old.job").mkdir()
    (folder / "old.job" / "rows.txt").write_text("of a job")


SKIPPED = {
    ".hidden.txt": "hidden", ".git": "hidden", "leak.txt": "link out of the folder",
    "leaks": "link out of the folder", "loop": "link to a folder", "gone.txt": "broken link",
    "pipe.txt": "not a regular file", "all.zip/sub/.draft/c.txt": "hidden", "old.job": "of a job",
}  # fmt: skip


def make_many(
    folder: Path, outside: Path, count: int = 300, long_nbytes: int = 2 << 20, seed: int = 0
) -> dict[str, str]:
    """`count` files that are read, of all types, in three folders, most with a fact K1, K2... of their own.

    Beside those of `make`: files cut at random, one above the limit of bytes, a long text, bytes in a name that are no
    UTF-8. Returns the code of each file that has no text, and "" for the others, by the name in the output.
    """
    make(folder, outside)
    wanted = dict.fromkeys(GOOD, "") | {name: code for name, (_, code) in BAD.items()}
    generator = random.Random(seed)
    with (folder / "sparse.txt").open("wb") as file:
        file.truncate((256 << 20) + 1)
    filler = "This sentence says nothing of interest. " * 24
    (folder / "long.txt").write_text(
        "".join(f"K{9000 + n} is said here. {filler}\n\n" for n in range(long_nbytes // 1000))
    )
    with open(os.fsencode(folder) + b"/odd\xff.txt", "wb") as odd:
        odd.write(b"K9999 under an odd name")
    wanted |= {"sparse.txt": "document_too_large", "long.txt": "", "odd\\xff.txt": ""}
    for number in range(count - len(wanted)):
        name, content, code = _one(number, generator)
        path = folder / ("a", "m/n", "z")[number % 3] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        wanted[str(path.relative_to(folder))] = code
    return wanted


def _one(number: int, generator: random.Random) -> tuple[str, bytes, str]:
    """(name, content, code of the error or "") of a file."""
    fact = f"K{number} is what this file says."
    kinds = (
        ("txt", fact.encode()), ("md", f"# Title\n\n{fact}".encode()), ("html", f"{_HTML}<p>{fact}</p>".encode()),
        ("csv", f"a,b\nfact,{fact}\n".encode()), ("json", json.dumps({"fact": fact}).encode()),
        ("py", f"# {fact}\n".encode()), ("pdf", pdf([fact, "Second page"])), ("docx", docx("Head", fact)),
        ("eml", b"From: a@example.org\r\nSubject: S\r\n\r\n" + fact.encode()), ("utf16.txt", fact.encode("utf-16")),
    )  # fmt: skip
    suffix, content = kinds[number % len(kinds)]
    if number % 7 == 3:
        # Whatever the name says, and whatever blanks are in it.
        return f"wrong \n{number}.{generator.choice(['pdf', 'docx', 'xlsx'])}", fact.encode(), ""
    if number % 11 == 5:
        return f"cut{number}.docx", docx("Head", fact)[: generator.randint(200, 600)], "document_damaged"
    if number % 13 == 6:
        return f"empty{number}.{suffix}", b"", "document_empty"
    return f"f{number}.{suffix}", content, ""
