"""What a run may use of the machine, as the user said it and as bytes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...offload.budget import parse_size
from ...offload.memory import host_available, host_total


@dataclass(frozen=True, slots=True)
class Budgets:
    """Sizes as people write them; `disk` bounds all stores together, `disk_dir` is where they lie."""

    ram: str = "auto"
    disk: str = "auto"
    disk_dir: Path | None = None

    def host_nbytes(self) -> int:
        """Raises BadSize."""
        return parse_size(self.ram, host_total(), host_available())

    def disk_nbytes(self) -> int | None:
        """None for auto: what the store needs, less a reserve."""
        return None if self.disk == "auto" else parse_size(self.disk, 0, 0)
