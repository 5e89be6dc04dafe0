"""The folder of an office: 120 files of every type that docs/documents.md lists, and what lies in them.

Beside those of `document_folder`: names that a spreadsheet would take for formulas and numbers, mails in archives in
mails, scans, and letters, tables and decks in the number in which an office has them.
"""

import random
from pathlib import Path

from .document_folder import (
    BAD,
    GOOD,
    MAIL,
    ODS,
    ODT,
    RTF,
    docx,
    encrypted_pdf,
    epub,
    mail_with,
    mailbox_of,
    make,
    open_document,
    outlook,
    pdf,
    pptx,
    xlsx,
    zipped,
)

NUM_FILES = 120
_NO_TEXT, _DAMAGED, _EMPTY, _ENCRYPTED = "document_no_text", "document_damaged", "document_empty", "document_encrypted"
_INVOICE = pdf(["Invoice 7", "Total 1,200.50"])

# Names that are formulas, numbers or nothing that a spreadsheet expects.
_NAMES = {
    "=1+1.txt": b"A name like a formula", "=HYPERLINK(\"x\").md": b"# Link", "+49 30 1.txt": b"A name like a number",
    "-2.5": b"A number", "007": b"Zeros lead", "1e5": b"A power", "@home.txt": b"At home", "TRUE": b"A truth",
    "2024-05-01": b"A date", "\U0001f600.txt": b"An emoji", "Äpfel & Öl \u200f.txt": "Grüße".encode(),
    "'quoted'.txt": b"Quoted", "semi;colon, comma \"mark\".txt": b"Separated",
}  # fmt: skip
_SCANS = {
    "scans/receipt.png": b"\x89PNG\r\n\x1a\n" + bytes(64), "scans/receipt.gif": b"GIF89a" + bytes(64),
    "scans/fax.tiff": b"II*\0" + bytes(64), "scans/letter.pdf": pdf([""]),
}  # fmt: skip
# What lies in each container, by its path below it, and the code of its row; an archive has no row of its own.
_CONTAINERS: dict[str, tuple[bytes, dict[str, str]]] = {
    "post/Monday.zip": (
        zipped({"a/b.eml": mail_with("Bill", "See there\n", bills_zip=zipped({"1.pdf": _INVOICE, "2.txt": ""}))}),
        {"/a/b.eml": "", "/a/b.eml/bills.zip/1.pdf": "", "/a/b.eml/bills.zip/2.txt": _EMPTY},
    ),
    "post/Tuesday.msg": (
        outlook("Contract", "Signed.", contract_docx=docx("Contract", "Notice: 3 months"), key_pdf=encrypted_pdf()),
        {"": "", "/contract.docx": "", "/key.pdf": _ENCRYPTED},
    ),
    "post/archive.mbox": (
        mailbox_of(mail_with("One", "First\n", one_pdf=_INVOICE), mail_with("Two", "Second\n", cut_docx=b"PK\3\4cut")),
        {"/00001.eml": "", "/00001.eml/one.pdf": "", "/00002.eml": "", "/00002.eml/cut.docx": _DAMAGED},
    ),
    "post/forwarded.eml": (MAIL, {"": "", "/offer.pdf": ""}),
}


def _ordinary(number: int) -> tuple[str, bytes]:
    """A letter, a table, a deck, a page: the suffix and the content."""
    fact = f"K{number} is agreed."
    kinds = (
        ("docx", docx("Letter", fact)), ("pdf", pdf([fact])), ("xlsx", xlsx(Costs=[["item", "sum"], [fact, number]])),
        ("pptx", pptx(("Plan", fact))), ("odt", open_document("text", ODT)), ("ods", open_document("spreadsheet", ODS)),
        ("rtf", RTF), ("epub", epub("Manual", f"<h1>{fact}</h1>")), ("html", f"<html><p>{fact}</p></html>".encode()),
        ("eml", mail_with("Note", fact)), ("md", f"# Note\n\n{fact}".encode()), ("csv", f"a,b\n{number},1\n".encode()),
        ("json", b'{"agreed": true}'), ("py", b"agreed = True\n"), ("txt", fact.encode("utf-16")),
    )  # fmt: skip
    return kinds[number % len(kinds)]


def make_office(folder: Path, outside: Path, seed: int = 0) -> dict[str, str]:
    """Writes the files; returns the error code of every document, "" for one that has text, by its name in the output.

    `outside` is a folder beside it, which links lead to.
    """
    make(folder, outside)
    wanted = dict.fromkeys(GOOD, "") | {name: code for name, (_, code) in BAD.items()}
    files = dict(_NAMES) | _SCANS | {name: content for name, (content, _) in _CONTAINERS.items()}
    wanted |= dict.fromkeys(_NAMES, "") | dict.fromkeys(_SCANS, _NO_TEXT)
    for name, (_, inside) in _CONTAINERS.items():
        wanted |= {f"{name}{below}": code for below, code in inside.items()}
    generator = random.Random(seed)
    for number in range(NUM_FILES - len(files) - count_files(folder)):
        suffix, content = _ordinary(number)
        name, code = f"office/{number:03}.{suffix}", ""
        if number % 9 == 4:
            # Misnamed: what it is decides.
            name = f"office/{number:03}.{generator.choice(['pdf', 'doc', 'txt', 'bin'])}"
        elif number % 12 == 7:
            content, code = b"", _EMPTY
        files[name] = content
        wanted[name] = code
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return wanted


def count_files(folder: Path) -> int:
    """Those of the office: regular, in sight, in no job's folder, and not led out of it by a link."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.resolve().is_relative_to(folder.resolve()))
    parts = (path.relative_to(folder).parts for path in files)
    return sum(not any(each.startswith(".") or each.endswith(".job") for each in path) for path in parts)
