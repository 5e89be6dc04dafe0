"""Where a model's files are: a folder, or a repository of the hub in its local cache. Torch-free."""

from __future__ import annotations

from pathlib import Path

from .errors import ModelNotFound

# Weights as safetensors, tokenizer and configuration: no pickle and no code is ever fetched.
_WANTED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]
# Copies of the weights in other layouts, which some repositories keep beside those that are read.
_UNWANTED = ["*/*", "consolidated*"]


def find_model(name: str) -> Path:
    """The folder of a checkpoint; downloads a hub repository that is not in the cache.

    `name` is a folder, or `owner/repository`, with `@revision` where one is wanted. Cache, token and offline mode are
    huggingface_hub's own settings. Raises ModelNotFound.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    return _fetch(name, *repository_of(name))


def repository_of(name: str) -> tuple[str, str | None]:
    """Owner and repository of a hub id, and the revision where it names one. Raises ModelNotFound for anything else."""
    repository, _, revision = name.partition("@")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ModelNotFound(f"{name!r} is neither a folder nor a hub id like Qwen/Qwen3-30B-A3B")
    return repository, revision or None


def local_folder(name: str) -> Path | None:
    """The folder of a checkpoint that is here whole, in the hub's cache too; asks nobody."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    repository, revision = repository_of(name)
    try:
        found = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except Exception:
        return None
    return found if any(found.glob("*.safetensors")) else None


def _fetch(name: str, repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    # The library lets through the errors of its HTTP client, another one in every major version, and, where a proxy
    # answers something else than the hub would, whatever its own code trips over.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelNotFound(f"{name!r} is no folder here, and could not be fetched from the hub: {reason}") from None
    return Path(found)
