"""The socket that a server listens on. Torch-free, so that an address is refused before anything long is imported."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ...face import errors


def listen(host: str, port: int) -> socket.socket:
    """Raises BadArgument for an address that cannot be listened on."""
    with _refused(host, port):
        return socket.create_server((host, port), family=_family(host, port), backlog=1024)


def refuse_taken(host: str, port: int) -> None:
    """Raises BadArgument where `listen` would, and accepts nothing meanwhile."""
    with _refused(host, port), socket.socket(_family(host, port)) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind((host, port))


def _family(host: str, port: int) -> int:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


@contextmanager
def _refused(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror
        raise errors.BadArgument(f"cannot listen on {host} port {port}: {reason}; choose another --port") from None
