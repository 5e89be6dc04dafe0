"""Small tensors on their way to a device."""

from __future__ import annotations

import torch


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x, made in host memory, on the device; the host does not wait for what the device still has to do.

    A copy out of memory that is not page-locked would: thousands of times a pass, and the device would run dry.
    """
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
