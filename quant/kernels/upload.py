"""Small tensors on their way to a device, through one ring of page-locked memory."""

from __future__ import annotations

import ctypes
import threading

import torch

# Page-locked once for the whole process: torch would otherwise page-lock anew for every size that comes up in passes,
# which fails where weights have taken what may be locked.
RING_NBYTES = 8 << 20
_SEGMENTS = 4
_ALIGNMENT = 64


class UploadRing:
    """`memory` is uint8 [n], page-locked; it is used in segments, one after the other.

    A segment is used anew when the copies out of it are over: that waits for an event, which was recorded when the
    others were full, so that there is hardly ever anything left to wait for. Copies go to the current stream of the
    calling thread, which must be the same each time.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._address = memory.data_ptr()
        self._nbytes = memory.numel() // _SEGMENTS
        self._copied: list[torch.cuda.Event | None] = [None] * _SEGMENTS
        self._segment = 0
        self._head = 0
        self._lock = threading.Lock()

    def upload(self, x: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """x on the device; None where a segment has no room for it."""
        x = x.contiguous()
        nbytes = x.numel() * x.element_size()
        if not 0 < nbytes <= self._nbytes:
            return None
        with self._lock:
            if self._head + nbytes > (self._segment + 1) * self._nbytes:
                self._take_next_segment()
            begin, self._head = self._head, -(-(self._head + nbytes) // _ALIGNMENT) * _ALIGNMENT
            ctypes.memmove(self._address + begin, x.data_ptr(), nbytes)
            staged = self._memory[begin : begin + nbytes].view(x.dtype).view(x.shape)
            return staged.to(device, non_blocking=True)

    def _take_next_segment(self) -> None:
        copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream())
        self._copied[self._segment] = copied
        self._segment = (self._segment + 1) % _SEGMENTS
        self._head = self._segment * self._nbytes
        if (before := self._copied[self._segment]) is not None:
            before.synchronize()


_rings: dict[torch.device, UploadRing | None] = {}


def open_ring(device: torch.device) -> int:
    """Page-locks the device's ring where that was not tried yet; returns how many bytes it took to.

    To be called before other memory is page-locked. Where the machine refuses, uploads wait for the device.
    """
    if device in _rings or device.type == "cpu":
        return 0
    try:
        memory = torch.empty(RING_NBYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        _rings[device] = None
        return 0
    _rings[device] = UploadRing(memory)
    return RING_NBYTES


def close_rings() -> None:
    """Gives all rings back; copies out of them must be over."""
    _rings.clear()


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x, made in host memory, on the device; the host does not wait for what the device still has to do.

    A copy out of memory that is not page-locked does: thousands of times a pass, and the device would run dry. So are
    copied only tensors that the ring has no room for, and all of them where it could not be page-locked.
    """
    if device.type == "cpu":
        return x
    open_ring(device)
    ring = _rings[device]
    uploaded = None if ring is None else ring.upload(x, device)
    return x.to(device) if uploaded is None else uploaded
