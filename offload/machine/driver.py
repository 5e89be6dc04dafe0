"""The NVIDIA driver, as its library and the kernel describe it. Torch-free; makes no context."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda` is the newest CUDA version it serves, as (13, 0); `release` is empty where the kernel does not say."""

    cuda: tuple[int, int]
    release: str = ""


def find_driver(library: Any = None, root: Path = Path("/")) -> Driver | None:
    """None where the library `libcuda.so.1` is not there or does not answer."""
    version = ctypes.c_int()
    cuda = library or load_driver()
    # 1000 x major + 10 x minor: cuDriverGetVersion in the CUDA driver API.
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) or version.value < 1000:
        return None
    return Driver((version.value // 1000, version.value % 1000 // 10), _release(root))


def load_driver() -> Any:
    """The driver's library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _release(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,4}(?:\.\d+)+)\b", text)
    return found[1] if found else ""
