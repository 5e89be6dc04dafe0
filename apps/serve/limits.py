"""What a server serves and where, and how much it takes from its clients. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from ...face import errors

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LEAST_KEY_CHARS = 16


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


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`options` are those of an LLM, `folder` has files and batches; None is one in the user's state for the model."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    folder: Path | None = None
    max_tokens: int = 512
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: ServerLimits = field(default_factory=ServerLimits)

    def check(self) -> None:
        """Raises BadArgument for a server that others could reach without a key."""
        if self.host not in LOOPBACK and self.key is None:
            raise errors.BadArgument(f"--host {self.host} is open to others and needs --api-key, or MOEDGE_API_KEY")
        if self.key is not None and (len(self.key) < _LEAST_KEY_CHARS or not self.key.isascii()):
            raise errors.BadArgument(f"the API key must have at least {_LEAST_KEY_CHARS} ASCII characters")

    def open_folder(self) -> Path:
        """The server's folder, made where it is missing."""
        folder = self.folder or default_folder(self.model)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder.resolve()


def default_folder(model: str) -> Path:
    """One for every model, so that the batches of one are not resumed by another."""
    name = str(Path(model).resolve()) if Path(model).is_dir() else model
    return (
        user_state_path("moedge") / "serve" / f"{Path(name).name}-{blake2b(name.encode(), digest_size=4).hexdigest()}"
    )
