"""The request of a user in a form that a journal stores, and the part of it that answers depend on.

Budgets, tokens per pass, the number of sequences, and the folders of the model and of its store are not part of a job's
identity: they change speed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...moe.streaming_mode import DEFAULTS, ExpertOptions
from ...offload.errors import BadStore
from ...offload.store.manifest import MANIFEST, read_manifest
from ..plan.placement import Plan
from ..rows.columns import settled
from ..rows.row import Defaults
from ..rows.tables import InputFormat, input_format
from ..settings.budgets import Budgets
from ..settings.errors import JobMismatch
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..source.model_source import ModelSource, model_fingerprint
from ..text.folder import has_chat_template
from ..weights.key_offsets import KeyOffsets, keep, kept
from .outputs import OutputPaths
from .stop import Limits


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """How a job is resumed: with the rows that failed, although it was cancelled, and although settings differ.

    `drift` names the settings that may differ from those that the job was started with.
    """

    failed: bool = False
    cancelled: bool = False
    drift: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """`model` is a folder, a store or a hub id; `input` may be "-" for standard input; `plan` is a plan's file.

    `unset` names sampling defaults that nobody has given: the model's generation_config.json may set them.
    """

    model: str
    input: Path
    output: Path
    settings: Settings = field(default_factory=Settings)
    defaults: Defaults = field(default_factory=Defaults)
    budgets: Budgets = field(default_factory=Budgets)
    limits: Limits = field(default_factory=Limits)
    experts: ExpertOptions = DEFAULTS
    lenient: bool = False
    input_format: InputFormat = InputFormat.AUTO
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    plan: Path | None = None
    unset: frozenset[str] = frozenset()

    def as_json(self) -> dict[str, Any]:
        """The identity of the job; budgets, limits and expert streaming belong to a single run."""
        return {
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model,
            "input": str(self.input if str(self.input) == "-" else self.input.resolve()),
            "output": str(self.output.resolve()),
            "settings": asdict(self.settings),
            "defaults": asdict(self.defaults),
            "lenient": self.lenient,
            "input_format": self.input_format,
        }


def settled_rows(request: BatchRequest, model_folder: Path) -> BatchRequest:
    """The request with the format of its input as found, and with what its prompts are made of on this model.

    Raises InputUnreadable, InputRefused, SettingError.
    """
    kind = input_format(request.input, request.input_format)
    defaults = settled(request.defaults, kind is InputFormat.TXT, has_chat_template(model_folder))
    return replace(request, input_format=kind, defaults=defaults)


def resumed(
    opened: Mapping[str, Any], piped: Path, budgets: Budgets, limits: Limits, resume: ResumeOptions
) -> BatchRequest:
    """The request that began a job, under the budgets of today; `piped` is where rows of a pipe were kept."""
    request = opened["request"]
    defaults: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in request["defaults"].items()
    }
    return BatchRequest(
        model=request["model"],
        input=piped if request["input"] == "-" else Path(request["input"]),
        output=Path(request["output"]),
        settings=Settings(**request["settings"]),
        defaults=Defaults(**defaults),
        budgets=budgets,
        limits=limits,
        lenient=request["lenient"],
        input_format=InputFormat(request.get("input_format", InputFormat.AUTO)),
        resume=replace(resume, cancelled=True),
    )


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

    def refuse_other(
        self, opened: Mapping[str, Any], settings: Settings, accepted: Collection[str], paths: OutputPaths
    ) -> None:
        """Raises JobMismatch, naming every difference to the job that begins with `opened`, minus those accepted."""
        recorded = opened["identity"]
        _refuse(opened, {**self.facts, **_requested(settings, recorded)}, recorded, accepted, paths)

    def refuse_resolved(
        self, opened: Mapping[str, Any], found: Mapping[str, Any], accepted: Collection[str], paths: OutputPaths
    ) -> None:
        """The same for what "auto" became, as of an engine that was loaded for something else."""
        recorded = {name: opened["identity"][name] for name in RESOLVED}
        _refuse(opened, found, recorded, accepted, paths)


def _refuse(
    opened: Mapping[str, Any],
    found: Mapping[str, Any],
    recorded: Mapping[str, Any],
    accepted: Collection[str],
    paths: OutputPaths,
) -> None:
    different = [name for name in recorded if name not in accepted and found.get(name) != recorded[name]]
    if different:
        changes = ", ".join(f"{name} {recorded[name]} -> {found.get(name)}" for name in different)
        accept = " ".join(f"--accept-drift {name}" for name in different)
        raise JobMismatch(
            f"{paths.out} belongs to job {opened['id']}, started with other settings: {changes}. Use the old settings, "
            f"another -o, or start over: rm -r {paths.job} {paths.out}. To continue anyway: {accept}"
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
    """The choices of "auto", and everything else that answers depend on."""
    return {name: getattr(plan, name) for name in RESOLVED}


def settle(settings: Settings, opened: Mapping[str, Any]) -> Settings:
    """Settings that resolve nothing again."""
    return replace(settings, **{name: opened["identity"][name] for name in RESOLVED})


def _requested(settings: Settings, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of this job, with "auto" replaced by its choices."""
    values = {name: getattr(settings, name) for name in RESOLVED}
    return {name: recorded[name] if value == "auto" else value for name, value in values.items()}


def _model(source: ModelSource) -> str:
    """The same for a checkpoint and for a store that was made of it."""
    if source.store is not None:
        return read_manifest(source.store / MANIFEST).fingerprint
    return model_fingerprint(source.weights)


def _text(folder: Path) -> str:
    digest = sha256()
    for name in _TEXT_FILES:
        data = (folder / name).read_bytes() if (folder / name).is_file() else b""
        digest.update(f"{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


KEY_OFFSETS = "key_offsets"


def recall_offsets(folder: Path, recorded: str | None, shape: ModelShape) -> KeyOffsets | None:
    """The offsets that the journal names; None if it names none, or if they are missing and must be measured again."""
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
    """The entry to record; saves the offsets. Raises JobMismatch if the job was started with others.

    They are measured on the device that computes: another device, or a store made elsewhere, may bring others.
    """
    found = None if offsets is None else offsets.digest
    if recorded not in (None, found) and KEY_OFFSETS not in accepted:
        raise JobMismatch(
            f"{folder} was started with other key offsets, and its copy of them is missing: {KEY_OFFSETS} "
            f"{recorded} -> {found}. Resume it with the model, the store and the device that it was started with, or "
            f"choose another -o. To continue anyway: --accept-drift {KEY_OFFSETS}"
        )
    if offsets is not None and found != recorded:
        keep(folder, offsets)
    return found
