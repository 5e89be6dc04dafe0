"""Where a model's files are: a folder, or a repository of the hub in its local cache. Torch-free."""

from __future__ import annotations

from pathlib import Path

from .errors import ModelNotFound

# Weights as safetensors, tokenizer and configuration: no pickle and no code is ever fetched.
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja", "*.txt"]


def find_model(name: str) -> Path:
    """The folder of a checkpoint; downloads a hub repository that is not in the cache.

    `name` is a folder, or `owner/repository`, with `@revision` where one is wanted. Cache, token and offline mode are
    huggingface_hub's own settings. Raises ModelNotFound.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    repository, _, revision = name.partition("@")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ModelNotFound(f"{name!r} is neither a folder nor a hub id like Qwen/Qwen3-30B-A3B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ModelNotFound(f"{name!r} is no folder here, and could not be fetched from the hub: {reason}") from None
