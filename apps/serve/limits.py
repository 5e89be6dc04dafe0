"""How much one server takes from its clients. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bytes, counts and seconds.

    `upload_nbytes` bounds one file, `body_nbytes` any other body. `files` and `batches` are kept at a time,
    `queued` batches wait, `chats` run or wait, and `requests` are open on as many `connections`; uploads have
    `stored_nbytes` in all, other open bodies `bodies_nbytes`, those that wait to be tokenized `waiting_nbytes`.
    Headers must be complete within `header_seconds`, the next piece of a body must come and a piece of an answer
    must be taken within `idle_seconds`, and a body must be complete within `body_seconds`, an upload within
    `upload_seconds`. Each of at most `clients` addresses may send `burst` requests at once, and
    `requests_per_second` on and on.
    """

    upload_nbytes: int = 512 << 20
    body_nbytes: int = 8 << 20
    bodies_nbytes: int = 64 << 20
    waiting_nbytes: int = 16 << 20
    stored_nbytes: int = 64 << 30
    files: int = 1000
    batches: int = 10_000
    queued: int = 100
    chats: int = 512
    requests: int = 1000
    connections: int = 1000
    requests_per_second: float = 100.0
    burst: int = 1000
    clients: int = 10_000
    header_seconds: float = 10.0
    idle_seconds: float = 30.0
    body_seconds: float = 60.0
    upload_seconds: float = 3600.0
