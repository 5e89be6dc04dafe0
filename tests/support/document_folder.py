"""A folder with documents of every type, and with everything that can be wrong with a file."""

import gzip
import io
import json
import os
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path


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
_HTML = "<!DOCTYPE html><html><head><title>Page</title><script>evil()</script></head><body><h1>Head</h1>"
_BILLION = (
    '<?xml version="1.0"?><!DOCTYPE w [<!ENTITY a "aaaaaaaaaaaaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 20}">' for n in range(8))
    + "]>"
)

# What reading each file must give: its type and a piece of its text, or an error code.
GOOD: dict[str, tuple[bytes, str, str]] = {
    "report.pdf": (pdf(["First page", "Second page"]), "pdf", "Second page"),
    "letter.docx": (docx("Dear", "The sum is 12."), "docx", "# Dear"),
    "deck.pptx": (pptx(("Goals", "Grow"), ("Plan", "Sell")), "pptx", "# Plan"),
    "table.xlsx": (xlsx(Costs=[["item", "price"], ["pen", 2]], Empty=[]), "xlsx", "| pen | 2 |"),
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
    # A link within the folder, made by `make`.
    "again.txt": (b"", "text", "Just text."),
}
BAD: dict[str, tuple[bytes, str]] = {
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
    "photo.jpg": (b"\xff\xd8\xff\xe0" + bytes(64), "document_unsupported"),
    "noise.txt": (bytes(range(256)) * 8, "document_unsupported"),
    "archive.zip": (zipped({"a.txt": "x"}), "document_unsupported"),
    "packed.txt.gz": (gzip.compress(b"text"), "document_unsupported"),
    "zip_bomb.docx": (zipped({"word/document.xml": bytes(80 << 20)}), "document_too_large"),
    "entity_bomb.docx": (docx("x", "&i;", prolog=_BILLION), "document_damaged"),
}  # fmt: skip


def make(folder: Path, outside: Path) -> None:
    """Writes all files, and what is no file. `outside` is a folder beside it."""
    for name, content in [(name, each[0]) for name, each in (*GOOD.items(), *BAD.items()) if name != "again.txt"]:
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


SKIPPED = {
    ".hidden.txt": "hidden", ".git": "hidden", "leak.txt": "link out of the folder",
    "leaks": "link out of the folder", "loop": "link to a folder", "gone.txt": "broken link",
    "pipe.txt": "not a regular file",
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
