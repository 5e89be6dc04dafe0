"""How the threads of matrix products wait for each other, settled before torch is loaded."""

from __future__ import annotations

import os


def wait_without_spinning() -> None:
    """Lets idle OpenMP threads sleep; what the user set in the environment stays.

    They spin by default, and spin on while another process has their core: with both cores of a small machine busy
    elsewhere, passes took 20 to 40 times as long (docs/performance.md). Batch jobs share their machines.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
