"""The checkpoints in huggingface_hub's cache, and whether they run. Torch-free; reads headers, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..offload.errors import BadCheckpoint
from .errors import UnsupportedModel
from .shape.folder import read_shape


@dataclass(frozen=True, slots=True)
class CachedModel:
    """`verdict` is "yes", or the sentence that says why not."""

    name: str
    nbytes: int
    verdict: str


def cached_models() -> Iterator[CachedModel]:
    """Repositories of kind model, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield CachedModel(repository.repo_id, repository.size_on_disk, _verdict(Path(newest.snapshot_path)))


def _verdict(folder: Path) -> str:
    try:
        read_shape(folder)
    except (BadCheckpoint, UnsupportedModel) as error:
        return f"no: {error}"
    return "yes"
