"""transformers' model definitions, with four seams: attention, experts, weights and norms (docs/dev/internals.md).

Importing this package imports transformers' modeling code, without packages that only its losses and compilers need:
where both are installed, they take 107 MiB of the 443 that a process had, and a quarter of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ...offload.machine.hardware import find_driver


@contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """While entered, those of `packages` that are not loaded yet cannot be imported, as if they were not installed."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# transformers looks for scipy when it is imported itself: whoever did that before has decided. torch's compiler imports
# Triton; without a GPU nothing calls it.
_UNUSED = (*(() if "transformers" in sys.modules else ("scipy",)), *(() if find_driver() else ("triton",)))
with _hidden(*_UNUSED):
    from transformers import PreTrainedModel

__all__ = ["PreTrainedModel"]
