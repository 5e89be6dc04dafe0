"""What a run may use of the machine, as the user said it and as bytes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...offload.budget import auto_device, parse_size
from ...offload.memory import host_available, host_total
from .errors import SettingError


@dataclass(frozen=True, slots=True)
class Budgets:
    """Sizes as people write them; `disk` bounds all stores together, `disk_dir` is where they lie."""

    ram: str = "auto"
    disk: str = "auto"
    disk_dir: Path | None = None
    gpu_mem: str = "auto"

    def host_nbytes(self) -> int:
        """Raises BadSize."""
        return parse_size(self.ram, host_total(), host_available())

    @property
    def wants_device(self) -> bool:
        return self.gpu_mem.strip() != "0"

    def device_nbytes(self, total: int, available: int) -> int:
        """Of a device of `total` bytes. Raises BadSize."""
        return parse_size(self.gpu_mem, total, available, auto_device)

    def without_device(self) -> None:
        """Raises SettingError where a device was asked for: this machine has none."""
        if self.wants_device and not self.gpu_mem.strip().lower().startswith("auto"):
            raise SettingError(
                f"--gpu-mem {self.gpu_mem} was asked for and CUDA finds no device here; "
                "give --gpu-mem 0 to compute on the processor, or look at `nvidia-smi`"
            )

    def disk_nbytes(self) -> int | None:
        """None for auto: what the store needs, less a reserve."""
        return None if self.disk == "auto" else parse_size(self.disk, 0, 0)
