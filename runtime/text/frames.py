"""Length-prefixed JSON: four bytes, big-endian, then UTF-8. The words between the renderer and its worker process."""

import json
from typing import Any, BinaryIO

HEADER_NBYTES = 4


def pack(content: object) -> bytes:
    """Raises UnicodeEncodeError if a string in `content` has no UTF-8 form."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return len(body).to_bytes(HEADER_NBYTES, "big") + body


def read_body(source: BinaryIO) -> bytes | None:
    """The next frame's body from a blocking stream, undecoded; None when the stream has ended."""
    header = source.read(HEADER_NBYTES)
    if len(header) < HEADER_NBYTES:
        return None
    nbytes = int.from_bytes(header, "big")
    body = source.read(nbytes)
    return body if len(body) == nbytes else None


def unpack(body: bytes) -> Any:
    return json.loads(body)
