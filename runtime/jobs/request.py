"""The request of a user: made of the options of a call or a command, in a form that a journal stores, and the part of
it that answers depend on.

Options (runtime/settings/options.py) are a mapping by name: names that a function does not use are ignored, and absent
ones have their defaults. Budgets, tokens per pass, the number of sequences, and the folders of the model and of its
store are not part of a job's identity: they change speed. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...moe.streaming_mode import Mode
from ...offload.errors import BadStore
from ...offload.store.manifest import MANIFEST, read_manifest
from ..plan.planner import reads_integers
from ..rows.fields import choices_setting, kwargs_setting
from ..rows.row import Defaults
from ..rows.row_formats import read_schema, settled, text_or_file
from ..rows.tables import InputFormat, input_format
from ..sampling.model_defaults import unset_names
from ..settings.errors import BadArgument, JobMismatch, SettingError
from ..settings.option import options_of
from ..settings.options import SAME, BatchOptions, LLMOptions, Size
from ..settings.settings import Budgets, Settings
from ..shape.shards import as_found
from ..source.model_source import ModelSource, model_fingerprint
from ..text.folder import has_chat_template
from .journal.state import JobState
from .outputs import OutputPaths
from .stop import Limits

if TYPE_CHECKING:
    from ..plan.placement import Plan
    from ..shape.model_shape import ModelShape
    from ..weights.key_offsets import KeyOffsets


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """How a job is resumed: with the rows that failed, although it was cancelled, and although settings differ.

    `drift` names the settings that may differ from those that the job was started with. `cut_to` is the new max_tokens
    of rows that were cut, which are then continued, of `cut_rows` where those are given; None leaves them as they are.
    `overwrite` removes the job and its outputs and starts over.
    """

    failed: bool = False
    cancelled: bool = False
    drift: tuple[str, ...] = ()
    cut_to: int | None = None
    cut_rows: frozenset[int] | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """A Ray cluster: its address, or "local" for one of this machine; None workers are as many as it has space for."""

    address: str
    workers: int | None = None


def cluster_request(address: str | None, workers: int | None) -> ClusterRequest | None:
    """What `ray` and `ray_workers` ask for. The number of workers may be a standing setting: it counts on a cluster."""
    return None if address is None else ClusterRequest(address, workers)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """`model` is a folder, a store or a hub id; `input` may be "-" for standard input; `plan` is a plan's file.

    `follow`: rows are appended to the partial file as soon as their answers are on disk. `unset` names sampling
    defaults that nobody has given: the model's generation_config.json may set them.
    """

    model: str
    input: Path
    output: Path
    settings: Settings = field(default_factory=Settings)
    defaults: Defaults = field(default_factory=Defaults)
    budgets: Budgets = field(default_factory=Budgets)
    limits: Limits = field(default_factory=Limits)
    stream: Mode | None = None
    lenient: bool = False
    csv_safe: bool = False
    csv_bom: bool = False
    input_format: InputFormat = InputFormat.AUTO
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    plan: Path | None = None
    follow: bool = True
    unset: frozenset[str] = frozenset()
    cluster: ClusterRequest | None = None

    def as_json(self) -> dict[str, Any]:
        """The identity of the job; budgets, limits and expert streaming belong to a single run."""
        return {
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model,
            "input": str(self.input if str(self.input) == "-" else self.input.resolve()),
            "output": str(self.output.resolve()),
            "settings": asdict(self.settings),
            "defaults": asdict(self.defaults),
            "lenient": self.lenient,
            "csv_safe": self.csv_safe,
            "csv_bom": self.csv_bom,
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
        csv_safe=request.get("csv_safe", False),
        csv_bom=request.get("csv_bom", False),
        input_format=InputFormat(request.get("input_format", InputFormat.AUTO)),
        resume=replace(resume, cancelled=True),
    )


# Settings whose "auto" is resolved once, when the job begins.
RESOLVED = ("dtype", "quant", "kv", "attention", "compute", "deterministic")
# What depends on the machine: what computes attention, and whether activations can be rounded to integers. It changes
# roundings, which a deterministic job refuses and any other job reports.
OF_MACHINE = ("attention", "compute")
_TEXT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_LIBRARIES = ("moedge", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Identity:
    """`facts` by name, flat, as the journal's first record keeps them; `model` is the name of the model."""

    facts: Mapping[str, Any]
    model: str

    def refuse_other(
        self, state: JobState, settings: Settings, accepted: Collection[str], paths: OutputPaths, to_do: bool
    ) -> None:
        """Raises JobMismatch, naming every difference to the job of `state`, minus those accepted.

        `to_do`: it has rows without an answer, so that it can be continued at all. Raises BadArgument if something is
        accepted that no job records.
        """
        recorded = state.opened["identity"]
        self.refuse_unknown(accepted, recorded)
        if changed := _changed({**self.facts, **_requested(settings, recorded)}, recorded, accepted):
            raise JobMismatch(_mismatch(state, changed, paths, self.model, to_do))

    def refuse_unknown(self, accepted: Collection[str], recorded: Iterable[str] = ()) -> None:
        """Raises BadArgument for accepted settings that a job does not record: this one, or the one of `recorded`."""
        names = list(recorded or {**self.facts, **dict.fromkeys(RESOLVED)})
        if unknown := sorted({*accepted} - {*names, KEY_OFFSETS}):
            raise BadArgument(
                f"--accept-drift {unknown[0]}: the job records no such setting; its settings are {', '.join(names)}"
            )

    def refuse_resolved(
        self, state: JobState, found: Mapping[str, Any], accepted: Collection[str], paths: OutputPaths
    ) -> None:
        """The same for what "auto" became, here or in an engine that was loaded for something else."""
        opened = state.opened["identity"]
        fixed = [name for name in RESOLVED if opened["deterministic"] or name not in OF_MACHINE]
        recorded = {name: opened[name] for name in fixed}
        if changed := _changed(found, recorded, accepted):
            raise JobMismatch(_mismatch(state, changed, paths, self.model, to_do=True))


# Settings by name: what they were, and what is asked for.
Changed = Mapping[str, tuple[Any, Any]]


def _changed(found: Mapping[str, Any], recorded: Mapping[str, Any], accepted: Collection[str]) -> Changed:
    return {
        name: (before, found.get(name))
        for name, before in recorded.items()
        if name not in accepted and found.get(name) != before
    }


def _mismatch(state: JobState, changed: Changed, paths: OutputPaths, model: str, to_do: bool) -> str:
    job_id, models = state.opened["id"], (Path(state.opened["model_name"]).name, model)
    changes = ", ".join(_change(name, *values, models) for name, values in changed.items())
    text = (
        f"{paths.out} belongs to job {job_id}, started with other settings: {changes}. Use the old settings, "
        "another -o, or start over with moedge batch --overwrite."
    )
    if to_do:
        return f"{text} To continue anyway: {' '.join(f'--accept-drift {name}' for name in changed)}"
    before, now = changed.get("max_tokens", (0, 0))
    if state.counts.cut and now > before:
        text += f" To continue the rows that were cut: moedge jobs resume {job_id} --cut --max-tokens {now}"
    return text


def _change(setting: str, before: Any, now: Any, models: tuple[str, str]) -> str:
    """`max_tokens 256 -> 9`. A model and a tokenizer are named, since their hashes say nothing to a person."""
    if setting not in ("model", "tokenizer"):
        return f"{setting} {_brief(before)} -> {_brief(now)}"
    begun_with, asked = models
    of = setting if setting == "model" else "tokenizer of"
    return f"{of} {begun_with} -> {asked if asked != begun_with else 'changed since then'}"


def _brief(value: Any) -> str:
    """The beginning of a template or a schema; anything else as it is."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_MOST_SHOWN = 80


def model_facts(source: ModelSource) -> dict[str, str]:
    """What must be the same wherever rows of a job are computed: the model, its tokenizer and what computes it."""
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return {"model": _model(source), "tokenizer": _text(source.folder), "versions": versions}


def identity(source: ModelSource, defaults: Defaults, lenient: bool) -> Identity:
    """Reads headers and small files of the model, no weights."""
    facts: dict[str, Any] = {**model_facts(source), "lenient": lenient}
    for name, value in asdict(defaults).items():
        facts[name] = list(value) if isinstance(value, tuple) else value
    return Identity(facts, Path(source.name).name)


def resolved(plan: Plan) -> dict[str, Any]:
    """The choices of "auto", and everything else that answers depend on."""
    return {name: getattr(plan, name) for name in RESOLVED}


def pin_settings(settings: Settings, opened: Mapping[str, Any]) -> Settings:
    """Settings that resolve nothing again but attention, and the arithmetic where its kernels are not usable here."""
    recorded = {name: opened["identity"][name] for name in RESOLVED if name != "attention"}
    if recorded["compute"] == "int8" and not reads_integers(recorded["quant"], recorded["dtype"]):
        recorded["compute"] = "auto"
    return replace(settings, **recorded)


def _requested(settings: Settings, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of this job, with "auto" replaced by its choices."""
    values = {name: getattr(settings, name) for name in RESOLVED}
    return {
        name: as_found(value, recorded[name]) if isinstance(value, str) else value for name, value in values.items()
    }


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
    # Imports torch, which nothing else here needs.
    from ..weights.key_offsets import kept

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
        from ..weights.key_offsets import keep

        keep(folder, offsets)
    return found


_DEFAULTS = {name: option.default for name, option in options_of(BatchOptions).items()}
LLM_DEFAULTS = {name: option.default for name, option in options_of(LLMOptions).items()}


def weight_format(quant: str, options: Mapping[str, Any]) -> str:
    """`--quant`, with a plus and the format of `--experts` where the options name one (shards.open_formats)."""
    experts = options.get("experts", SAME)
    return quant if experts == SAME else f"{quant}+{experts}"


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Those of the options that say how a model is computed. Raises BadSize."""
    settings = Settings(**{name: options[name] for name in Settings.__dataclass_fields__ if name in options})
    return replace(settings, quant=weight_format(settings.quant, options))


def budgets_of(options: Mapping[str, Any]) -> Budgets:
    """Those of the options that say with what memory."""
    sizes = {name: _size_text(options[name]) for name in ("ram", "gpu_mem", "disk") if name in options}
    folder = options.get("disk_dir")
    return Budgets(**sizes, disk_dir=None if folder is None else Path(folder))


def stream_of(options: Mapping[str, Any]) -> Mode | None:
    """The mode of every layer and pass; None where each layer uses the cheapest one."""
    stream = options.get("stream", "auto")
    return None if stream == "auto" else Mode(stream)


def limits_of(options: Mapping[str, Any]) -> Limits:
    """Those of the options that say when a job stops early."""
    failures = options.get("max_failures")
    return Limits(options.get("until"), options.get("max_rows"), None if failures is None else str(failures))


def input_format_of(options: Mapping[str, Any]) -> InputFormat:
    """The one of the options that says what the input file is."""
    return InputFormat(options.get("input_format", "auto"))


def row_defaults_of(options: Mapping[str, Any]) -> Defaults:
    """What rows get that do not say it, and what their prompts are made of.

    Raises InputUnreadable, MissingExtra, BadArgument.
    """
    given = {**_DEFAULTS, **options}
    prompt, system, schema = options.get("prompt"), options.get("system"), options.get("schema")
    return Defaults(
        max_tokens=given["max_tokens"],
        temperature=given["temperature"] or 0.0,
        seed=given["seed"],
        max_thinking_tokens=given["max_thinking_tokens"],
        chat_template_kwargs=_template_variables(given["chat_template_kwargs"]),
        reasoning_effort=given["reasoning_effort"],
        schema=None if schema is None else read_schema(Path(schema)),
        choices=() if (choices := options.get("choices")) is None else choices_setting(choices),
        prompt_column=options.get("prompt_column"),
        id_column=options.get("id_column"),
        prompt=None if prompt is None else text_or_file(str(prompt), "--prompt"),
        system=None if system is None else text_or_file(str(system), "--system"),
        chat=options.get("chat"),
    )


def _template_variables(given: str | Mapping[str, Any] | None) -> str:
    """What chat templates get for every row, as the text of a JSON object. Raises BadArgument."""
    if given is None:
        return ""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        return kwargs_setting(text, "chat_template_kwargs")
    except (SettingError, TypeError, ValueError) as error:
        raise BadArgument(f"chat_template_kwargs must be an object of JSON: {error}") from None


def _size_text(size: Size) -> str:
    """As the command line takes it."""
    if isinstance(size, int):
        return f"{size}B" if size else "0"
    return size


def request_of(
    model: str | Path, input_file: str | Path, output: str | Path, options: Mapping[str, Any]
) -> BatchRequest:
    """The request that these of `BatchOptions` make, for `run_batch` and the command. Other names are ignored."""
    drift, plan = options.get("accept_drift"), options.get("plan")
    return BatchRequest(
        model=str(model),
        input=Path(input_file),
        output=Path(output),
        settings=settings_of(options),
        defaults=row_defaults_of(options),
        input_format=input_format_of(options),
        unset=unset_names(options.get("temperature")),
        budgets=budgets_of(options),
        stream=stream_of(options),
        limits=limits_of(options),
        lenient=options.get("lenient", False),
        csv_safe=options.get("csv_safe", False),
        csv_bom=options.get("csv_bom", False),
        resume=ResumeOptions(
            drift=(drift,) if isinstance(drift, str) else tuple(drift or ()),
            overwrite=options.get("overwrite", False),
            failed=options.get("failed", False),
        ),
        plan=None if plan is None else Path(plan),
        cluster=cluster_request(options.get("ray"), options.get("ray_workers")),
    )
