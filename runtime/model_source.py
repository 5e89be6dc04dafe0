"""What a user's MODEL is: a checkpoint folder, a hub repository, or a prepared store.

Torch-free but for stores, whose small files are read with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import SettingError
from .hub import find_model
from .plan.plan import Settings
from .shape.folder import read_shape
from .shape.model_shape import ModelShape
from .shape.shards import weights_nbytes

if TYPE_CHECKING:
    from ..offload.store.store import Store


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`folder` has config and tokenizer, and the weights too unless there is a `store`."""

    name: str
    folder: Path
    shape: ModelShape
    store: Path | None = None
    quant: str | None = None
    dtype: str | None = None

    def packed_nbytes(self, quant: str, dtype: str) -> int:
        """Bytes of all weights in a format."""
        return weights_nbytes(self.shape, quant, dtype)

    def settle(self, settings: Settings) -> Settings:
        """Settings with what a store has decided already. Raises SettingError where the user wants something else."""
        if self.store is None:
            return settings
        for option, found, wanted in (("quant", self.quant, settings.quant), ("dtype", self.dtype, settings.dtype)):
            if wanted not in ("auto", found):
                raise SettingError(
                    f"{self.store} was prepared with --{option} {found}, and --{option} {wanted} was asked for; "
                    "leave the option away, or give the checkpoint"
                )
        return replace(settings, quant=str(self.quant), dtype=str(self.dtype))


@contextmanager
def open_source(name: str) -> Iterator[ModelSource]:
    """Finds MODEL; the small files of a store are laid out in a temporary folder meanwhile."""
    folder = find_model(name)
    if not is_store(folder):
        yield ModelSource(name, folder, read_shape(folder))
        return
    from ..offload.store.store import Store
    from .shape.as_json import shape_from_json
    from .weights.stored import extract_files

    with tempfile.TemporaryDirectory(prefix="moedge-") as small:
        with Store.open(folder) as store:
            extract_files(store, Path(small))
            shape = shape_from_json(dict(store.manifest.extra["shape"]))
        yield ModelSource(name, Path(small), shape, folder, **_recipe(store))


def is_store(folder: Path) -> bool:
    """Whether a folder holds packed weights, finished or not, rather than a checkpoint."""
    return any((folder / name).is_file() for name in ("manifest.json", "progress.json"))


def _recipe(store: Store) -> dict[str, str]:
    return {"quant": store.manifest.recipe["quant"], "dtype": store.manifest.recipe["dtype"]}
