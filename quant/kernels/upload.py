"""Uploads small tensors to a device through one ring of page-locked memory."""

from __future__ import annotations

import ctypes
import threading

import torch

# Page-locked once per process: otherwise torch would page-lock memory for every new size that occurs in passes, which
# fails if weights have used up the memory that may be locked.
RING_NBYTES = 8 << 20
_SEGMENTS = 4
_ALIGNMENT = 64


class UploadRing:
    """A ring of page-locked `memory`, uint8 [n], which is used in segments, one after the other.

    A segment is reused when the copies from it are done. The event for that was recorded before the other segments were
    filled, so there is hardly ever anything to wait for. Any thread may upload: one waits until another has its place
    and its copy is under way, so that none gets the other's place. Copies run on the current stream of the calling
    thread; where that is another one than before, a new segment begins, because an event tells of one stream only.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._address = memory.data_ptr()
        self._nbytes = memory.numel() // _SEGMENTS
        self._copied: list[torch.cuda.Event | None] = [None] * _SEGMENTS
        self._segment = 0
        self._head = 0
        self._lock = threading.Lock()
        self._stream = torch.cuda.current_stream()

    def upload(self, x: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """x on the device; None if x is empty or larger than a segment."""
        x = x.contiguous()
        nbytes = x.numel() * x.element_size()
        if not 0 < nbytes <= self._nbytes:
            return None
        with self._lock:
            stream = torch.cuda.current_stream()
            if stream != self._stream or self._head + nbytes > (self._segment + 1) * self._nbytes:
                self._take_next_segment()
                self._stream = stream
            begin, self._head = self._head, -(-(self._head + nbytes) // _ALIGNMENT) * _ALIGNMENT
            ctypes.memmove(self._address + begin, x.data_ptr(), nbytes)
            staged = self._memory[begin : begin + nbytes].view(x.dtype).view(x.shape)
            return staged.to(device, non_blocking=True)

    def _take_next_segment(self) -> None:
        copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        self._copied[self._segment] = copied
        self._segment = (self._segment + 1) % _SEGMENTS
        self._head = self._segment * self._nbytes
        if (before := self._copied[self._segment]) is not None:
            before.synchronize()


_rings: dict[torch.device, UploadRing | None] = {}
# Engines of one device may be loaded by several threads.
_opening = threading.Lock()


def open_ring(device: torch.device) -> int:
    """Page-locks the device's ring unless that was tried already; returns the number of bytes locked by this call.

    Call it before other memory is page-locked. If the machine refuses, uploads wait for the device.
    """
    with _opening:
        if device in _rings or device.type == "cpu":
            return 0
        try:
            memory = torch.empty(RING_NBYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            _rings[device] = None
            return 0
        _rings[device] = UploadRing(memory)
        return RING_NBYTES


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies x, which is in host memory, to the device without waiting for work that is queued on the device.

    A copy from memory that is not page-locked does wait; with thousands of copies per pass, the device would idle.
    Only tensors that are too large for the ring, or all of them if it could not be page-locked, are copied that way.
    """
    if device.type == "cpu":
        return x
    open_ring(device)
    ring = _rings[device]
    uploaded = None if ring is None else ring.upload(x, device)
    return x.to(device) if uploaded is None else uploaded
