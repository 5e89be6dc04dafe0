"""What is settled for the whole process before torch is loaded: how threads wait."""

from __future__ import annotations

import os


def wait_without_spinning() -> None:
    """Lets idle OpenMP threads sleep; what the user set in the environment stays.

    They spin by default, and spin on while another process has their core: with both cores of a small machine busy
    elsewhere, passes took 20 to 40 times as long (docs/performance.md). Batch jobs share their machines. That sleepers
    take a tenth of a millisecond to wake up is why small operations get one thread (quant/linear.py).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
