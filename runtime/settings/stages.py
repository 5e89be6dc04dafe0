"""Work that takes a while, reported while it is done: loading, quantizing, writing a store, measuring. Torch-free.

Code that works opens a `stage` and calls `advance` on it; it knows nobody who watches. Whoever shows progress watches
with `watching`. Without a watcher, a stage costs nothing. A stage within another one is part of it and is not reported.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

from ...offload.memory import gc_paused


@dataclass(frozen=True, slots=True)
class Stage:
    """`doing` names the work: "quantizing to int4"; `nbytes` is its size, None if it has no size in bytes.

    `announcement` is what a user should know before it begins: "" for nothing.
    """

    doing: str
    nbytes: int | None = None
    announcement: str = ""


# Called with the bytes done since the last call.
Advance = Callable[[int], None]


# Shows stages: the context is open while the work is done, and gives what the work calls as it advances.
Watcher = Callable[[Stage], AbstractContextManager[Advance]]
_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watching(watcher: Watcher | None) -> Iterator[None]:
    """`watcher` is given every stage that this thread begins in the context; None: nobody watches."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


@contextmanager
def stage(doing: str, nbytes: int | None = None, announcement: str = "") -> Iterator[Advance]:
    """Reports the work of the context to the watcher of this thread."""
    watcher = _WATCHER.get()
    shown: AbstractContextManager[Advance] = (
        nullcontext(lambda nbytes: None) if watcher is None else watcher(Stage(doing, nbytes, announcement))
    )
    with shown as advance, watching(None):
        yield advance


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Reports an import that takes seconds. What it has created is not traversed by the garbage collector any more."""
    with stage(f"importing {what}"), gc_paused():
        yield
    gc.freeze()
