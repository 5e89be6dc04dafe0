"""Files that hold others: ZIP archives, mailboxes, mails with attachments, and Outlook's messages.

What is in one is a document of its own; `members` gives the names and the bytes. How .msg files are made: [MS-OXMSG].
"""

import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from io import BytesIO
from typing import Any

from .content import MAX_ENTRIES, Content, ReadCode, ReadFailure, clean, detect, open_zip

# Files that are no documents beside what lies in them, and those that are.
ARCHIVES, MAILS = (".zip", ".mbox"), (".eml", ".msg")


def members(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """(the path of a member as its container has it, its bytes), in the container's order. A file that holds no others
    gives none.

    Raises ReadFailure for a container that is damaged, encrypted or too large, behind the members that could be read.
    """
    try:
        find = _MEMBERS.get(detect(data, name))
        for number, (path, content) in enumerate(find(data) if find is not None else (), 1):
            if number > MAX_ENTRIES:
                raise ReadFailure(ReadCode.TOO_LARGE, f"it holds more than {MAX_ENTRIES:,} files; divide it")
            yield clean(path), content
    except (ReadFailure, MemoryError, GeneratorExit):
        raise
    except Exception as error:
        raise _damaged(error) from None


def _damaged(error: object) -> ReadFailure:
    message = f"the container cannot be read ({str(error)[:200]}); save it again, or unpack it into the folder"
    return ReadFailure(ReadCode.DAMAGED, message)


def read_archive(data: bytes, name: str) -> Content:
    """Raises the ReadFailure that says why an archive or a mailbox is listed, and not what lies in it."""
    count = sum(1 for _ in members(data, name))
    if not count:
        raise ReadFailure(ReadCode.EMPTY, "no file lies in it")
    raise ReadFailure(
        ReadCode.TOO_LARGE,
        f"what lies in it ({count:,}) lies too deep in other files, or these hold too much; unpack it into the folder",
    )


def _in_zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    archive, fault = open_zip(data), None
    for each in archive.infolist():
        if not each.is_dir():
            try:
                content = archive.read(each)
            except Exception as error:
                # A checksum, or a method of compression, of this one file.
                fault = fault or f"{each.filename[:100]}: {error}"
            else:
                yield each.filename, content
    if fault is not None:
        raise _damaged(fault)


def _in_mail(data: bytes) -> Iterator[tuple[str, bytes]]:
    mail: EmailMessage = BytesParser(policy=policy.default).parsebytes(data)
    for number, part in enumerate(mail.iter_attachments(), 1):
        kind, name = part.get_content_type(), part.get_filename()
        if kind == "message/rfc822":
            inner: Any = part.get_content()
            yield _name(name or f"{inner['Subject'] or f'mail {number}'}.eml"), inner.as_bytes()
        else:
            payload = part.get_payload(decode=True)
            content = payload if isinstance(payload, bytes) else b""
            yield _name(name or f"part {number}{mimetypes.guess_extension(kind) or ''}"), content


def _name(text: str) -> str:
    """Of an attachment, which lies in no folder."""
    return text.replace("/", "-").replace("\\", "-")


# Between two mails: an empty line, and one with a sender and a time (RFC 4155).
_BETWEEN = re.compile(rb"(?:\A|\r?\n\r?\n)From [^ \n]+ [^\n]*\d\d:\d\d[^\n]*\n")


def _in_mailbox(data: bytes) -> Iterator[tuple[str, bytes]]:
    starts = [each.end() for each in _BETWEEN.finditer(data)]
    ends = [each.start() for each in _BETWEEN.finditer(data)][1:]
    if not starts:
        raise ReadFailure(ReadCode.DAMAGED, "no line of it begins a mail as mailboxes do (From ...)")
    for number, (start, end) in enumerate(zip(starts, [*ends, len(data)], strict=True), 1):
        yield f"{number:05}.eml", data[start:end]


class _Message:
    """An Outlook message, by the streams of its properties: tag and type in eight digits of hexadecimal."""

    def __init__(self, data: bytes) -> None:
        import olefile

        try:
            self._file = olefile.OleFileIO(BytesIO(data))
        except (OSError, ValueError) as error:
            raise ReadFailure(ReadCode.DAMAGED, f"the message is damaged ({error}); save it again") from None
        self._names = {"/".join(each) for each in self._file.listdir()}

    def data(self, tag: str, below: str = "") -> bytes | None:
        name = f"{below}__substg1.0_{tag}"
        if name not in self._names:
            return None
        found: bytes = self._file.openstream(name).read()
        return found

    def text(self, tag: str, below: str = "") -> str:
        """A text in UTF-16, or in the code page of old messages."""
        wide = self.data(f"{tag}001F", below)
        if wide is not None:
            return wide.decode("utf-16-le", "replace").rstrip("\0")
        return (self.data(f"{tag}001E", below) or b"").decode("cp1252", "replace").rstrip("\0")

    def attachments(self) -> Iterable[str]:
        return sorted({f"{each.split('/')[0]}/" for each in self._names if each.startswith("__attach_version1.0_")})


def _in_message(data: bytes) -> Iterator[tuple[str, bytes]]:
    message = _Message(data)
    for below in message.attachments():
        content = message.data("37010102", below)
        if content is not None:
            yield _name(message.text("3707", below) or message.text("3704", below)), content


def read_msg(data: bytes) -> Content:
    """The text of an Outlook message behind its headers. Raises ReadFailure."""
    message = _Message(data)
    shown = (("Subject", "0037"), ("From", "0C1A"), ("To", "0E04"), ("Cc", "0E03"))
    facts: dict[str, Any] = {name.lower(): text for name, tag in shown if (text := clean(message.text(tag)))}
    head = "\n".join(f"{name}: {facts[name.lower()]}" for name, _ in shown if name.lower() in facts)
    attached = [clean(message.text("3707", each) or message.text("3704", each)) for each in message.attachments()]
    if attached:
        facts["attachments"] = attached
    names = f"\n\nAttachments: {', '.join(attached)}" if attached else ""
    return Content("email", (f"{head}\n\n{clean(message.text('1000')).strip()}{names}\n",), front_matter=facts)


_MEMBERS: dict[str, Callable[[bytes], Iterator[tuple[str, bytes]]]] = {
    "archive": _in_zip, "mailbox": _in_mailbox, "email": _in_mail, "msg": _in_message,
}  # fmt: skip
