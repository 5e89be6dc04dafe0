"""Slips of a person at the command line (`cli/options/`, `cli/views/job_view.py`): refused in a sentence before any
work begins, and nothing is overwritten.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from moedge.cli.main import app
from moedge.cli.views import job_view
from moedge.runtime.jobs.summary import Rows as RowCounts
from moedge.runtime.settings.option import Panel

Cli = Callable[..., int]
Rows = list[dict[str, Any]]
MODEL = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"
# Options whose value is a file that must be there.
READ = {"calibrate", "include_path", "plan", "machine", "schema", "from_plan"}


def commands(group: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*name, word))
        else:
            yield (*name, word), command


def takes_path(option: Any) -> bool:
    """Typer says it by an annotation since 0.28, by a type of click's before."""
    found = getattr(option, "type_descriptor", None)
    return found.annotation is Path if found is not None else option.type.name in {"path", "file", "directory"}


def test_help_lists_every_option_of_a_job_under_a_heading() -> None:
    listed = {name: command for name, command in commands(get_command(app)) if name == ("batch",)}
    panels = {option.name: option.rich_help_panel for option in listed["batch",].params if option.opts[0][0] == "-"}
    assert {name for name, panel in panels.items() if panel is None} <= {"profile", "help", "help_all"}
    assert set(panels.values()) - {None} == set(Panel)


@pytest.mark.sample("batch", "docs", "plan", "serve", "jobs resume", "config init", "models rm")
@pytest.mark.parametrize("name", [pytest.param(name, id=" ".join(name)) for name, _ in commands(get_command(app))])
def test_help_shows_at_most_twenty_options_and_help_all_the_rest(
    name: tuple[str, ...], cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = dict(commands(get_command(app)))[name]
    typed = {max(each.opts, key=len) for each in command.params if each.param_type_name == "option" and not each.hidden}
    assert cli(*name, "--help") == 0
    shown = set(re.findall(r"^│[ *]+(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    assert len(shown) < 20
    assert shown <= typed
    if not hasattr(command, "declared"):
        assert shown == typed
        return
    assert cli(*name, "--help-all") == 0
    assert set(re.findall(r"^│[ *]+(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"} == typed


def test_what_only_measurements_need_is_a_key_and_says_so(
    cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(commands(get_command(app)))["batch",].declared
    keys = {name for name, option in found.items() if option.file_only}
    assert keys == {"attention", "compute", "job_dir", "progress", "ray_workers", "speculate", "stream"}
    for name in keys:
        assert cli("batch", "model", "in.jsonl", "-o", "out.jsonl", f"{found[name].flag}=x") == 2
        assert f"is no option but a key of moedge.toml: {found[name].file_key} = ..." in capsys.readouterr().err
    assert cli("batch", "model", "in.jsonl", "-o", "out.jsonl", "--partial") == 2, "it is always on"


def path_options() -> list[Any]:
    """(words of the command, the option, its required arguments) of every option that takes a path."""
    found = []
    for name, command in commands(get_command(app)):
        needed = ["nothing" for each in command.params if each.param_type_name == "argument" and each.required]
        if name in (("batch",), ("docs",)):
            needed += ["-o", "fine.jsonl"]
        if name == ("eval",):
            needed += ["--tasks", "any"]
        for option in command.params:
            if option.param_type_name == "option" and takes_path(option) and not option.hidden:
                found.append(pytest.param(name, option, needed, id=" ".join([*name, option.opts[0]])))
    return found


def test_the_sweep_finds_options() -> None:
    """Negative control."""
    names = {each.id for each in path_options()}
    assert {"batch --output", "batch --summary", "batch --plan", "plan --save", "jobs export --output"} <= names


@pytest.mark.parametrize(("name", "option", "needed"), path_options())
def test_every_option_that_takes_a_path_is_checked_before_work_begins(
    name: tuple[str, ...], option: Any, needed: list[str], cli: Cli, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The model, the input and the job do not exist, so that any work would fail with another code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "foreign.txt").write_text("mine")
    # A folder for prepared weights is made, with those above it.
    folder = "dir" in option.name or option.name in ("cache", "mirror", "log_samples") or name == ("prepare",)
    bad = ["foreign.txt/x"] if folder else ["missing/x", "folder"]
    if option.name == "include_path":
        bad = ["missing/x", "foreign.txt"]
    if option.name not in READ and (name, option.name) not in ((("batch",), "output"), (("docs",), "output")):
        bad.append("foreign.txt")
    for value in bad:
        assert cli(*name, *needed, option.opts[0], value) == 2, value
        said = capsys.readouterr().err
        assert "internal error" not in said
        # A long path breaks anywhere in the frame that typer draws.
        assert value.split("/")[0] in re.sub(r"[│\s]", "", said)
    assert (tmp_path / "foreign.txt").read_text() == "mine"


def test_a_summary_that_moedge_wrote_is_replaced_and_an_empty_input_is_a_sentence(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.json").write_text(json.dumps({"schema": "moedge.run/10"}))
    (tmp_path / "empty.jsonl").write_text("\n")
    assert cli("batch", MODEL, "empty.jsonl", "-o", "out.jsonl", "--summary", "s.json") == 7
    assert "contains no rows" in capsys.readouterr().err
    assert cli("plan", MODEL, "empty.jsonl") == 7
    assert capsys.readouterr().err.splitlines()[1:] == ["moedge: empty.jsonl contains no rows"]
    assert cli("plan", MODEL, "a\x1b[31m\u202eb.jsonl") == 7
    assert "a\\x1b[31m\\u202eb.jsonl cannot be read" in capsys.readouterr().err, "nothing steers the terminal"


@pytest.mark.parametrize("command", ["batch", "plan"])
def test_rows_that_are_all_too_long_are_refused_with_what_to_change(
    command: str, cli: Cli, rows_file: Callable[[Path, Rows], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = rows_file(tmp_path / "in.jsonl", [{"prompt": f"row {i}", "max_tokens": 1 << 20} for i in range(3)])
    output = ["-o", tmp_path / "out.jsonl"] if command == "batch" else []
    assert cli(command, MODEL, source, *output) == 7
    said = capsys.readouterr().err
    assert "3 rows" in said
    assert "context_length_exceeded" in said
    assert "lower max_tokens" in said
    assert "loaded" not in said
    assert not (tmp_path / "out.job").exists()


def test_a_slip_in_most_rows_refuses_the_job_before_anything_loads(
    cli: Cli, rows_file: Callable[[Path, Rows], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: Rows = [{"prompt": "a"}] * 10 + [{"prompt": "a", "max_token": 9}] * 30
    source = rows_file(tmp_path / "in.jsonl", rows)
    assert cli("batch", MODEL, source, "-o", tmp_path / "out.jsonl") == 7
    said = capsys.readouterr().err
    assert "30 of 40 rows have the error unknown_parameter" in said
    assert "line 11" in said
    assert "plan:" not in said


@pytest.mark.parametrize(("code", "offered"), [("context_length_exceeded", False), ("kv_cache_exceeded", True)])
def test_failed_rows_are_offered_again_only_where_that_can_help(code: str, offered: bool, tmp_path: Path) -> None:
    rows = RowCounts(2, 1, 1, errors={code: 1})
    ended = SimpleNamespace(
        summary=SimpleNamespace(rows=rows),
        session=SimpleNamespace(job_id="7f3a91c0"),
        paths=SimpleNamespace(errors=tmp_path / "out.errors.jsonl"),
    )
    (line,) = job_view.unfinished(ended)  # type: ignore[arg-type]
    assert line.startswith("1 row failed (see ")
    assert ("moedge jobs resume 7f3a91c0 --failed" in line) is offered
