"""How many threads a computation gets. Torch-free."""

from __future__ import annotations

import os

# Threads that compute experts side by side. They take turns at Python between the operations of an expert, for a tenth
# of its time or less; from here on each gets several of torch's threads instead.
MAX_CREW = 8


def crew_size() -> int:
    """Threads that compute side by side, the main one among them: one per core, as far as they do not queue up."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))
    return min(MAX_CREW, cores)
