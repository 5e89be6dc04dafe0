"""Mail (.eml): headers, the text, and the names of what is attached."""

from __future__ import annotations

from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from typing import Any, cast

from .content import Content, clean
from .web import html_to_markdown

_SHOWN = ("Subject", "From", "To", "Cc", "Date")


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
