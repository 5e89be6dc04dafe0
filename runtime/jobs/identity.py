"""What a job's answers depend on, and how a new start differs from the one that began it.

Budgets, tokens per pass, sequences together, the place of the model and of its store are not in it: they change speed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...offload.errors import BadStore
from ...offload.store.manifest import MANIFEST, read_manifest
from ..plan.placement import Plan
from ..rows.row import Defaults
from ..settings.errors import JobMismatch
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..source.model_source import ModelSource, model_fingerprint
from ..weights.key_offsets import KeyOffsets, keep, kept

# Settings whose "auto" is resolved once, when the job begins.
RESOLVED = ("dtype", "quant", "kv", "attention", "compute", "deterministic")
_TEXT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_LIBRARIES = ("moedge", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Identity:
    """`facts` by name, flat, as the journal's first record keeps them."""

    facts: Mapping[str, Any]

    def refuse_other(self, opened: Mapping[str, Any], settings: Settings, accepted: Collection[str] = ()) -> None:
        """Raises JobMismatch, naming every difference to a job that was begun, less those accepted."""
        recorded = opened["identity"]
        found = {**self.facts, **_wished(settings, recorded)}
        different = [name for name in recorded if name not in accepted and found.get(name) != recorded[name]]
        if different:
            lines = "\n".join(f"  {name}: was {recorded[name]}, is {found.get(name)}" for name in different)
            raise JobMismatch(
                f"this output belongs to job {opened['id']}, which was begun with something else:\n{lines}\nGive what "
                f"it was begun with, choose another output, or go on all the same with --accept-drift {different[0]}"
            )


def identity(source: ModelSource, defaults: Defaults, lenient: bool) -> Identity:
    """Reads headers and small files of the model, no weights."""
    facts: dict[str, Any] = {
        "model": _model(source),
        "tokenizer": _text(source.folder),
        "versions": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
        "lenient": lenient,
    }
    for name, value in asdict(defaults).items():
        facts[name] = list(value) if isinstance(value, tuple) else value
    return Identity(facts)


def resolved(plan: Plan) -> dict[str, Any]:
    """What "auto" became, and what decides answers besides."""
    return {name: getattr(plan, name) for name in RESOLVED}


def settle(settings: Settings, opened: Mapping[str, Any]) -> Settings:
    """Settings that resolve nothing again."""
    return replace(settings, **{name: opened["identity"][name] for name in RESOLVED})


def _wished(settings: Settings, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What the settings come to for this job: "auto" is what it became then."""
    wished = {name: getattr(settings, name) for name in RESOLVED}
    return {name: recorded[name] if value == "auto" else value for name, value in wished.items()}


def _model(source: ModelSource) -> str:
    """The same for a checkpoint and for a store that was made of it."""
    if source.store is not None:
        return read_manifest(source.store / MANIFEST).fingerprint
    return model_fingerprint(source.folder)


def _text(folder: Path) -> str:
    digest = sha256()
    for name in _TEXT_FILES:
        data = (folder / name).read_bytes() if (folder / name).is_file() else b""
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


NAME = "key_offsets"


def recall(folder: Path, recorded: str | None, shape: ModelShape) -> KeyOffsets | None:
    """Those that the journal names; None where it names none, or where they are gone and have to be found again."""
    if recorded is None:
        return None
    try:
        offsets = kept(folder, shape)
    except BadStore:
        return None
    return offsets if offsets is not None and offsets.digest == recorded else None


def settle_offsets(
    folder: Path, recorded: str | None, offsets: KeyOffsets | None, accepted: Collection[str] = ()
) -> str | None:
    """What to record; keeps the offsets. Raises JobMismatch where the job was begun with others.

    They are measured where weights compute, so that another device, or a store made elsewhere, may bring others.
    """
    found = None if offsets is None else offsets.digest
    if recorded not in (None, found) and NAME not in accepted:
        raise JobMismatch(
            f"{folder} was begun with other key offsets, and its own copy of them is gone:\n  {NAME}: was {recorded}, "
            f"is {found}\nResume it with the model, the store and the device that it was begun with, choose another "
            f"output, or go on all the same with --accept-drift {NAME}"
        )
    if offsets is not None and found != recorded:
        keep(folder, offsets)
    return found
