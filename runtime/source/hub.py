"""Finds the files of a model: in a folder, or in the local cache of the hub. Torch-free."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ...offload.checkpoint.gguf_file import is_gguf, split_files
from ...offload.errors import BadCheckpoint
from ...offload.store.stores import disk_free, disk_of
from ..settings.errors import ModelNotFound, UnsupportedModel
from ..shape.checkpoint_shape import read_shape

# Weights as safetensors, tokenizer and configuration: no pickle and no code is ever fetched.
_WANTED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]
# Copies of the weights in other layouts, which some repositories keep beside those that are read.
_UNWANTED = ["*/*", "consolidated*"]


def find_model(name: str) -> Path:
    """The folder of a checkpoint, or its GGUF file; downloads a hub repository that is not in the cache.

    `name` is a folder, a GGUF file, or `owner/repository`, with `@revision` where one is wanted and a `/FILE.gguf` of
    it at the end, all parts of which are downloaded where it is split. Cache, token and offline mode are
    huggingface_hub's own settings. Raises ModelNotFound.
    """
    if (here := _on_this_machine(name)) is not None:
        return here
    repository, revision, files = _in_repository(name)
    from huggingface_hub import hf_hub_download, snapshot_download

    asked: dict[str, Any] = {"revision": revision, "local_files_only": not is_reachable()}
    try:
        if files:
            first, *_ = [Path(hf_hub_download(repository, file, **asked)) for file in files]
            return first
        return Path(snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, **asked))
    # The library lets through the errors of its HTTP client, another one in every major version, and, where a proxy
    # answers something else than the hub would, whatever its own code trips over.
    except Exception as error:
        what = "file" if files else "folder"
        raise ModelNotFound(
            f"{name!r} is not a local {what}, and could not be downloaded from the hub: {hub_reason(error)}"
        ) from None


def repository_of(name: str) -> tuple[str, str | None]:
    """Owner and repository of a hub id, and the revision where it names one. Raises ModelNotFound for anything else.

    What is, or looks like, a path on this machine is no hub id: it must not leave the machine.
    """
    repository, _, revision = name.partition("@")
    path = Path(name).expanduser()
    if path.exists() or path.suffix.lower() in _FILE_SUFFIXES:
        what = "is a file" if path.exists() else "names a file"
        raise ModelNotFound(
            f"{name!r} {what}; give the folder of the checkpoint, with config.json and *.safetensors, or a hub id"
        )
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")) or repository.endswith("/"):
        raise ModelNotFound(f"{name!r} is neither a folder nor a hub id like Qwen/Qwen3-30B-A3B")
    return repository, revision or None


_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json", ".jsonl", ".ckpt")


def _on_this_machine(name: str) -> Path | None:
    """The folder or GGUF file of that path. A folder with nothing but GGUF files is not one model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return folder if is_gguf(folder) and folder.is_file() else None
    files = sorted(folder.glob("*.gguf"))
    if files and not any(folder.glob("*.json")):
        raise ModelNotFound(f"{name!r} holds GGUF files; give one of them, such as {files[0]}")
    return folder


def local_folder(name: str) -> Path | None:
    """The folder of a complete local checkpoint, or one in the cache of the hub; makes no connection."""
    if (here := _on_this_machine(name)) is not None:
        return here
    repository, revision, files = _in_repository(name)
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if files:
        paths = [try_to_load_from_cache(repository, file, revision=revision) for file in files]
        return Path(str(paths[0])) if all(isinstance(path, str) for path in paths) else None
    try:
        found = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except Exception:
        return None
    return found if any(found.glob("*.safetensors")) else None


def _in_repository(name: str) -> tuple[str, str | None, list[str]]:
    """Repository, revision, and the files of a GGUF checkpoint in it; no files for the whole. Raises ModelNotFound."""
    if not is_gguf(Path(name)):
        return *repository_of(name), []
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not file:
        raise ModelNotFound(
            f"{name!r} is neither a file nor a file of a hub repository like owner/repository/FILE.gguf"
        )
    folder, _, last = file.rpartition("/")
    files = [f"{folder}/{part}" if folder else part for part in split_files(last)]
    return *repository_of(f"{owner}/{repository}"), files


def is_reachable() -> bool:
    """Whether the hub takes a connection: its library tries for half a minute. Proxies are not tried."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().keys() & {hub.scheme, "all"}:
        return True
    try:
        port = hub.port or (443 if hub.scheme == "https" else 80)
        socket.create_connection((hub.hostname or "", port), timeout=constants.HF_HUB_ETAG_TIMEOUT).close()
    except OSError:
        return False
    return True


def hub_reason(error: Exception) -> str:
    """Why the hub gave nothing, in one sentence: the library's own are long, and name its functions."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            return "it is not in the model cache, and HF_HUB_OFFLINE is set"
        if not isinstance(error.__cause__, errors.HfHubHTTPError):
            return "it is not in the model cache, and the hub cannot be reached; check the connection"
        error = error.__cause__
    for kind, says in (
        (errors.GatedRepoError, "it is gated: accept the terms on its page, and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "the hub has no model of that name, or a private one (then set HF_TOKEN)"),
        (errors.RevisionNotFoundError, "the hub has no such revision of it"),
    ):
        if isinstance(error, kind):
            return says
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def download_space() -> int:
    """Free bytes of the disk that checkpoints are downloaded to."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return disk_free(Path(HF_HUB_CACHE))


def same_disk(folder: Path) -> bool:
    """Whether downloads take space of the disk of `folder`, which need not exist."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return disk_of(folder) == disk_of(Path(HF_HUB_CACHE))


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
