"""How much scratch decoding over the cache takes. Torch-free, because the planner counts it."""

from __future__ import annotations

# Elements of keys that are widened to float32 at a time: 1 MiB, so that they are still in the core's cache when used.
WIDE_NUMEL = 1 << 18
# Bytes of gathered native keys and values, of all threads together.
NATIVE_NBYTES = 32 << 20
