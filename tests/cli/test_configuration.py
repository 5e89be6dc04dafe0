"""Standing settings (`cli/options/configured_command.py`): which source counts, that every option has one, and that
nothing wrong is passed over in silence.

Cases K1, K3 and K4 of the failure table.
"""

import json
import re
import socket
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from typer import Context
from typer.main import get_command

from moedge import computing, generation
from moedge.cli.main import app
from moedge.cli.options import configured_command
from moedge.cli.options.configured_command import ConfigError, configured_commands, read_entries
from moedge.cli.views import job_view
from moedge.offload.store import stores
from moedge.runtime.jobs.request import BatchRequest

Cli = Callable[..., int]
COMMANDS = configured_commands(get_command(app))
BATCH = COMMANDS["batch"].options
COMPUTING = "computing on a device of this test"


class Places:
    """The current folder, the user's settings and the environment of one test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project, self.user = folder / "here" / "moedge.toml", folder / "config" / "moedge" / "moedge.toml"
        for file in (self.project, self.user):
            file.parent.mkdir(parents=True)
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(self.project.parent)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))

    def variable(self, name: str, value: str | None) -> None:
        if value is None:
            self._monkeypatch.delenv(name, raising=False)
        else:
            self._monkeypatch.setenv(name, value)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(computing, "computing_line", lambda gpu_mem: COMPUTING)
    return Places(tmp_path, monkeypatch)


@pytest.fixture
def requested(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BatchRequest]:
    """`requested("--ram", ...)` is what `moedge batch` would run."""
    seen: list[Any] = []

    def record(self: Any, request: BatchRequest, summary: Path | None) -> int:
        seen.append((request, self))
        return 0

    monkeypatch.setattr(job_view.JobView, "run", record)

    def call(*flags: str) -> BatchRequest:
        assert cli("batch", "model", "in.jsonl", "-o", "out.jsonl", *flags) == 0
        request, view = seen[-1]
        request_view.update(style=str(view._style), energy=view._energy)
        return request

    return call


request_view: dict[str, Any] = {}

# By key: a value that is not the default, as a file writes it, and where it arrives.
ARRIVES: dict[str, tuple[str, Callable[[BatchRequest], object], object]] = {
    "dtype": ('"fp32"', lambda r: r.settings.dtype, "fp32"),
    "quant": ('"int4"', lambda r: r.settings.quant.partition("+")[0], "int4"),
    "experts": ('"int3"', lambda r: r.settings.quant.partition("+")[2], "int3"),
    "compute": ('"int8"', lambda r: r.settings.compute, "int8"),
    "kv": ('"int8/int4"', lambda r: r.settings.kv, "int8/int4"),
    "attention": ('"torch"', lambda r: r.settings.attention, "torch"),
    "tokens-per-pass": ("777", lambda r: r.settings.tokens_per_pass, 777),
    "max-sequences": ("33", lambda r: r.settings.max_sequences, 33),
    "deterministic": ("true", lambda r: r.settings.deterministic, True),
    "max-tokens": ("12", lambda r: r.defaults.max_tokens, 12),
    "temperature": ("0.5", lambda r: r.defaults.temperature, 0.5),
    "reasoning-effort": ('"low"', lambda r: r.defaults.reasoning_effort, "low"),
    "max-thinking-tokens": ("99", lambda r: r.defaults.max_thinking_tokens, 99),
    "chat-template-kwargs": (r'"{\"a\": false}"', lambda r: r.defaults.chat_template_kwargs, '{"a": false}'),
    "seed": ("7", lambda r: r.defaults.seed, 7),
    "ram": ('"3GiB"', lambda r: r.budgets.ram, "3GiB"),
    "gpu-mem": ('"0"', lambda r: r.budgets.gpu_mem, "0"),
    "disk": ('"60GB"', lambda r: r.budgets.disk, "60GB"),
    "disk-dir": ('"/stores"', lambda r: r.budgets.disk_dir, Path("/stores")),
    "until": ('"07:00"', lambda r: r.limits.until, "07:00"),
    "max-failures": ('"5%"', lambda r: r.limits.max_failures, "5%"),
    "lenient": ("true", lambda r: r.lenient, True),
    "csv-safe": ("true", lambda r: r.csv_safe, True),
    "csv-bom": ("true", lambda r: r.csv_bom, True),
    "progress": ('"none"', lambda r: request_view["style"], "none"),
    "watts": ("180", lambda r: getattr(request_view["energy"], "watts", None), 180),
    "price": ('"0.3/kWh"', lambda r: getattr(request_view["energy"], "price", None), 0.3),
    "hosted": ('"1,2"', lambda r: getattr(request_view["energy"], "hosted", None), (1, 2)),
    "host-kv": ('"8GiB"', lambda r: r.settings.host_kv, "8GiB"),
    "cpu-experts": ('"off"', lambda r: r.settings.cpu_experts, "off"),
    "cpu-attention": ('"off"', lambda r: r.settings.cpu_attention, "off"),
    "speculate": ('"off"', lambda r: r.settings.speculate, "off"),
    "stream": ('"wanted"', lambda r: r.stream, "wanted"),
    "ray-workers": ("3", lambda r: r.cluster and r.cluster.workers, 3),
    "job-dir": ('"kept"', lambda r: r.output.parent.name, "kept"),
}
# What a setting needs to be of use.
BESIDE = {
    "price": ["--watts", "9"],
    "hosted": ["--watts", "9"],
    "ray-workers": ["--ray", "local"],
    "job-dir": ["-o", "-"],
}


def test_every_option_that_may_stand_is_tried_below() -> None:
    assert set(ARRIVES) == set(BATCH)


def typed(written: str) -> str:
    """A value of a file as a flag or a variable has it."""
    found: str = json.loads(written) if '"' in written else written
    return found


def flags(key: str) -> list[str]:
    if COMMANDS["batch"].declared[BATCH[key].name].file_only:
        return []
    written = ARRIVES[key][0]
    return [f"--{key}"] if written == "true" else [f"--{key}", typed(written)]


def test_all_options_arrive_together_from_every_source(places: Places, requested: Callable[..., BatchRequest]) -> None:
    """Those that are true or false could be mistaken for each other here, and not where each is alone."""
    beside = [word for words in BESIDE.values() if words[0].removeprefix("--") not in ARRIVES for word in words]

    def arrived(*arguments: str) -> set[str]:
        request = requested(*beside, *arguments)
        return {key for key, (_, found, wanted) in ARRIVES.items() if found(request) == wanted}

    assert arrived() == set()
    text = "".join(f"{key} = {written}\n" for key, (written, _, _) in ARRIVES.items())
    for file, table in ((places.project, ""), (places.user, "[batch]\n")):
        file.write_text(table + text)
        assert arrived() == set(ARRIVES), file
        file.unlink()
    for key, (written, _, _) in ARRIVES.items():
        places.variable(BATCH[key].envvar, typed(written))
    assert arrived() == set(ARRIVES)
    for key in ARRIVES:
        places.variable(BATCH[key].envvar, None)
        assert f"--{key}" in BATCH[key].opts, "a key is its option's name"
    assert arrived(*(word for key in ARRIVES for word in flags(key))) == {key for key in ARRIVES if flags(key)}


@pytest.mark.slow
@pytest.mark.parametrize("key", ARRIVES)
def test_every_option_alone_arrives_from_every_source(
    key: str, places: Places, requested: Callable[..., BatchRequest]
) -> None:
    written, arrived, wanted = ARRIVES[key]
    beside = BESIDE.get(key, [])
    assert arrived(requested(*beside)) != wanted
    for file, table in ((places.project, ""), (places.user, "[batch]\n")):
        file.write_text(f"{table}{key} = {written}\n")
        assert arrived(requested(*beside)) == wanted, file
        file.unlink()
    places.variable(BATCH[key].envvar, typed(written))
    assert arrived(requested(*beside)) == wanted
    places.variable(BATCH[key].envvar, None)
    if flags(key):
        assert arrived(requested(*beside, *flags(key))) == wanted


SOURCES = ("--ram", "MOEDGE_RAM", "project [batch]", "project", "user [batch]", "user")


@pytest.mark.parametrize("first", range(len(SOURCES) + 1))
def test_a_source_counts_before_all_that_come_later(
    first: int, places: Places, requested: Callable[..., BatchRequest]
) -> None:
    the_first_counts(places, requested, set(SOURCES[first:]))


@pytest.mark.slow
@given(st.sets(st.sampled_from(SOURCES)))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_first_source_that_is_present_counts(
    places: Places, requested: Callable[..., BatchRequest], present: set[str]
) -> None:
    the_first_counts(places, requested, present)


def the_first_counts(places: Places, requested: Callable[..., BatchRequest], present: set[str]) -> None:
    value = {source: f"{number}GiB" for number, source in enumerate(SOURCES, start=1)}
    for name, file in (("project", places.project), ("user", places.user)):
        lines = [f'ram = "{value[name]}"'] * (name in present)
        lines += [f'[batch]\nram = "{value[name + " [batch]"]}"'] * (f"{name} [batch]" in present)
        # Another command's is nobody's business here.
        file.write_text("\n".join([*lines, '[run]\nram = "99GiB"']))
    places.variable("MOEDGE_RAM", value["MOEDGE_RAM"] if "MOEDGE_RAM" in present else None)
    request = requested(*(["--ram", value["--ram"]] if "--ram" in present else []))
    assert request.budgets.ram == next((value[source] for source in SOURCES if source in present), "auto")


def test_what_stands_is_said_with_its_origin_unless_a_flag_outdoes_it(
    places: Places, requested: Callable[..., BatchRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    places.project.write_text('# mine\nram = "3GiB"\n[batch]\nseed = 3\n')
    places.variable("MOEDGE_KV", "int8")
    requested()
    said = "settings: ram 3GiB (moedge.toml:2), kv int8 (MOEDGE_KV), seed 3 (moedge.toml:4)\n"
    assert capsys.readouterr().err == f"{said}{COMPUTING}\n"
    requested("--ram", "4GiB", "--kv", "int4", "--seed", "1")
    assert capsys.readouterr().err == f"{COMPUTING}\n"
    for silent in ("-q", "--format=json"):
        requested(silent)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('rma = "3GiB"', "moedge.toml:1: unknown key 'rma'; nearest: 'ram'".replace("'ram'", "ram")),
        ('\n\ngpu_mem = "3GiB"', "moedge.toml:3: unknown key 'gpu_mem'; nearest: gpu-mem"),
        ("[bacth]\nseed = 1", "unknown table [bacth]; nearest: batch"),
        ("[run]\nmax-sequences = 3", "moedge.toml:2: unknown key 'max-sequences' of [run]"),
        ("ram = 8", "moedge.toml:1: ram = 8; '8' is not a size"),
        ('ram = "8"', "nearest: 8GiB"),
        ('ram = "8 gigs"', "nearest: 8GiB"),
        ('seed = "3"', "wanted a number, without quotation marks"),
        ("seed = -1", "moedge.toml:1: seed = -1; "),
        ("seed = 1.5", "moedge.toml:1: seed = 1.5; "),
        ("max-tokens = 0", "moedge.toml:1: max-tokens = 0; "),
        ("until = 7", "wanted text in quotation marks"),
        ('kv = "int16"', "'int8'"),
        ("seed = true", "seed = true; wanted a value, not true or false"),
        ('deterministic = "yes"', "wanted true or false"),
        ("seed = [1]", "wanted one value"),
        ("seed = 2026-11-21", "wanted one value"),
        ("[batch.seed]\nx = 1", "wanted one value"),
        ("ram = \n#", "line 1"),
        ("ram = 1\nram = 2\n#", "line 2"),
    ],
)
def test_a_file_with_anything_wrong_is_refused_with_its_line_and_the_nearest(
    text: str, says: str, places: Places, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (places.project, places.user):
        file.write_text(text)
        assert cli("batch", "model", "in.jsonl", "-o", "out.jsonl") == 2
        told = capsys.readouterr().err
        assert told.startswith("moedge: ")
        assert str(file) in told or file == places.project
        assert says in told
        file.unlink()


def test_what_is_no_text_file_is_refused(places: Places, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    places.project.write_bytes(b"ram = '\xff'")
    assert cli("config", "show") == 2
    assert "not UTF-8 at byte 7" in capsys.readouterr().err
    places.project.write_bytes(b"#" * (1 << 20) + b"\n")
    assert cli("config", "show") == 2
    places.project.unlink()
    places.project.mkdir()
    assert cli("config", "show") == 2
    assert "a regular file" in capsys.readouterr().err


@given(st.sampled_from(sorted(BATCH)), st.data())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_key_with_a_slip_is_refused_with_a_key_that_exists(
    tmp_path_factory: pytest.TempPathFactory, key: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz-_"))
    kind = data.draw(st.sampled_from(("replace", "insert", "drop")))
    slip = key[:place] + letter * (kind != "drop") + key[place + (kind != "insert") :]
    assume(slip not in BATCH and slip)
    above = data.draw(st.integers(0, 5))
    file = tmp_path_factory.getbasetemp() / "slip.toml"
    file.write_text("\n" * above + f'{slip} = "x"\n')
    with pytest.raises(ConfigError) as refusal:
        checked(file)
    told = str(refusal.value)
    assert told.startswith(f"{file}:{above + 1}: unknown key {slip!r}; ")
    assert told.rpartition("nearest: ")[2] in BATCH or "; known are " in told


def checked(file: Path) -> None:
    from moedge.cli.options.configured_command import _check

    context = Context(next(iter(COMMANDS.values())))
    for entry in read_entries(file):
        _check(entry, COMMANDS, context)


def test_lines_are_found_in_any_style(tmp_path: Path) -> None:
    file = tmp_path / "moedge.toml"
    file.write_text(
        '"ram" = "1GiB"\nbatch.seed = 3\n\n[run] # here\n  kv="int8"\nuntil = """\nseed = 9\n"""\n[prepare]\n'
        'ram = "2GiB"'
    )
    found = {(entry.command, entry.key): entry.origin.rpartition(":")[2] for entry in read_entries(file)}
    assert found == {
        ("", "ram"): "1", ("batch", "seed"): "2", ("run", "kv"): "5", ("run", "until"): "6", ("prepare", "ram"): "10",
    }  # fmt: skip
    file.write_text("run = {seed = 3}")
    (entry,) = read_entries(file)
    assert (entry.command, entry.key, entry.origin) == ("run", "seed", str(file)), "no line rather than a wrong one"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MOEDGE_RAM", "3", "MOEDGE_RAM=3; '3' is not a size"),
        ("MOEDGE_SEED", "x", "environment: MOEDGE_SEED=x; "),
        ("MOEDGE_DETERMINISTIC", "perhaps", "environment: MOEDGE_DETERMINISTIC=perhaps; "),
    ],
)
def test_a_wrong_variable_is_refused_by_name(
    name: str, value: str, says: str, places: Places, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    places.variable(name, value)
    assert cli("batch", "model", "in.jsonl", "-o", "out.jsonl") == 2
    assert says in capsys.readouterr().err
    assert cli("batch", "--help") == 0, "help is there whatever stands"


@pytest.mark.parametrize(("name", "nearest"), [("MOEDGE_RAMM", "MOEDGE_RAM"), ("MOEDGE_GPU", "MOEDGE_GPU_MEM")])
def test_an_unknown_variable_is_a_warning_with_the_nearest(
    name: str,
    nearest: str,
    places: Places,
    requested: Callable[..., BatchRequest],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configured_command, "_warned", set())
    places.variable(name, "3GiB")
    assert requested().budgets.ram == "auto"
    assert capsys.readouterr().err.count(f"warning: unknown variable {name} is ignored; nearest: {nearest}\n") == 1


TABLES = """ram = "1GiB"
kv = "int8"
[batch]
ram = "2GiB"
kv = "int4"
[machine.here]
ram = "3GiB"
[machine."there.example"]
ram = "4GiB"
[profile.night]
ram = "5GiB"
"""


@pytest.mark.parametrize(
    ("host", "profile", "ram"),
    [
        ("any", [], "2GiB"),
        ("here", [], "3GiB"),
        ("there.example", [], "4GiB"),
        ("here", ["--profile", "night"], "5GiB"),
    ],
)
def test_tables_of_machines_and_profiles_count_where_their_name_is_that_of_this_run(
    host: str,
    profile: list[str],
    ram: str,
    places: Places,
    requested: Callable[..., BatchRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    places.project.write_text(TABLES)
    found = requested(*profile)
    assert (found.budgets.ram, found.settings.kv) == (ram, "int4")
    assert requested(*profile, "--ram", "6GiB").budgets.ram == "6GiB"
    if profile:
        places.variable("MOEDGE_PROFILE", profile[1])
        assert requested().budgets.ram == ram


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (TABLES, ["--profile", "nigth"], "nearest: night"),
        ("", ["--profile", "night"], "there is no [profile.NAME] table"),
        ('[machine.x]\nrom = "1GiB"', [], "moedge.toml:2: unknown key 'rom' of [machine.x]; nearest: ram"),
        ("[profile.x]\n\nram = 8", [], "moedge.toml:3: ram = 8"),
        ('[profile]\nram = "8GiB"', [], "[profile] wants a table for each name, such as [profile.night]"),
        ('[profil.x]\nram = "8GiB"', [], "unknown table [profil]; nearest: profile"),
    ],
)
def test_what_is_wrong_in_such_tables_is_refused_wherever_they_count(
    text: str, arguments: list[str], says: str, places: Places, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    places.project.write_text(text)
    assert cli("batch", "model", "in.jsonl", "-o", "out.jsonl", *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_config_init_writes_what_can_be_read_and_overwrites_nothing(
    places: Places, cli: Cli, capsys: pytest.CaptureFixture[str], requested: Callable[..., BatchRequest]
) -> None:
    assert cli("config", "init") == 0
    text = places.project.read_text()
    assert read_entries(places.project) == [], "all of it is comments"
    uncommented = [line.removeprefix("# ") for line in text.splitlines() if re.match(r"# (\[[\w.]+\]|[\w-]+ = )", line)]
    assert cli("config", "init") == 2
    assert "exists already" in capsys.readouterr().err
    places.project.write_text("\n".join(uncommented))
    checked(places.project)
    assert requested().defaults.max_tokens == 1024


def test_config_init_takes_budgets_and_formats_from_a_plan(
    places: Places,
    cli: Cli,
    requested: Callable[..., BatchRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(files("moedge.demo") / "model")
    assert cli("plan", model, "--ram", "659MiB", "--quant", "nf4", "--max-sequences", 2, "--save", "plan.json") == 0
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    assert cli("config", "init", "--from-plan", "plan.json", "--for-machine") == 0
    assert '[machine."box"]' in places.project.read_text()
    found = requested()
    assert (found.budgets.ram, found.settings.quant) == ("659MiB", "nf4")
    planned = json.loads(Path("plan.json").read_text())
    store = sum(planned["tiers"][-1]["parts"].values())
    assert store > 0
    assert f'# disk = "{-(-store // (1 << 20))}MiB"' in places.project.read_text(), "no budget unless a person says so"
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert requested().budgets.ram == "auto"
    assert cli("config", "init", "--from-plan", "moedge.toml", "-o", "other.toml") == 4
    assert "holds no plan" in capsys.readouterr().err


def test_a_folder_in_a_file_is_relative_to_that_file(places: Places, requested: Callable[..., BatchRequest]) -> None:
    places.user.write_text('disk-dir = "stores"')
    assert requested().budgets.disk_dir == places.user.parent / "stores"
    places.user.write_text('disk-dir = "~/stores"')
    assert requested().budgets.disk_dir == Path.home() / "stores"


def test_show_prints_every_value_with_its_origin(places: Places, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    places.user.write_text("[run]\nmax-tokens = 9\n")
    places.project.write_text("deterministic = true\n")
    places.variable("MOEDGE_GPU_MEM", "6GiB")
    assert cli("config", "show", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    for name, command in COMMANDS.items():
        assert {row["key"] for row in rows if name in row["commands"]} == set(command.options)
    found = {(row["key"], name): (row["value"], row["origin"]) for row in rows for name in row["commands"]}
    assert found["gpu-mem", "jobs resume"] == ("6GiB", "MOEDGE_GPU_MEM")
    assert found["deterministic", "batch"] == (True, "moedge.toml:1")
    assert found["max-tokens", "run"] == (9, f"{places.user}:2")
    assert found["max-tokens", "batch"] == (256, "default")
    assert found["quant", "batch"] == ("auto", "default: chosen by the planner")
    assert cli("config", "show") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "deterministic    true         moedge.toml:1" in lines
    assert f"max-tokens       9            {places.user}:2  [run]" in lines
    assert cli("config", "path") == 0
    assert capsys.readouterr().out == f"{places.user}\n{places.project}\n"


def test_run_takes_what_stands(
    places: Places, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(generation, "answer", lambda *arguments: seen.append(arguments) or ["hello"])
    places.project.write_text('[run]\nmax-tokens = 9\nkv = "int8"\n')
    assert cli("run", files("moedge.demo") / "model", "hi") == 0
    _, _, wanted, _, asked = seen[0]
    assert (wanted.kv, asked.max_tokens) == ("int8", 9)
    assert capsys.readouterr().out == "hello\n", "what stands is said on stderr"


def test_other_commands_take_their_folder_from_what_stands(
    places: Places, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places.project.write_text(f'disk-dir = "{tmp_path}/elsewhere"')
    seen: list[Path] = []
    monkeypatch.setattr(stores, "stores", lambda root: seen.append(root) or [])
    monkeypatch.setattr(stores, "prune", lambda root, keep: seen.append(root) or [])
    assert cli("models", "ls") == 0
    assert cli("models", "prune", "--keep", "1GiB") == 0
    assert seen == [tmp_path / "elsewhere"] * 2
