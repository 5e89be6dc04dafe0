"""What somebody meets who has just installed moedge (`cli/main.py`, `cli/models.py`, `Makefile`): no message is untrue,
empty or a traceback.
"""

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moedge.cli import main as command
from moedge.offload.errors import FolderRefused
from moedge.offload.store.manifest import make_folder

Cli = Callable[..., int]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny_moe" / "model"


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, in the place of the folders for caches and states: nobody, root included, can write below it."""
    path = tmp_path / "no-folder"
    path.touch()
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(path))
    return path


def test_prepared_weights_that_cannot_be_written_are_a_sentence(
    cli: Cli, no_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("prepare", MODEL) == 6
    said = capsys.readouterr().err
    assert "cannot be written: Not a directory; give --disk-dir FOLDER" in said
    assert "internal error" not in said
    with pytest.raises(FolderRefused):
        make_folder(no_home / "store")


def test_a_bug_is_told_where_no_log_can_be_written(
    cli: Cli, no_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("one bug")

    monkeypatch.setattr(command, "app", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli("batch") == 1
    said = capsys.readouterr().err
    assert "internal error: RuntimeError('one bug')" in said
    (written,) = tmp_path.glob("moedge-bug-*.txt")
    assert str(written) in said
    assert "RuntimeError: one bug" in written.read_text()


@pytest.mark.parametrize("error", [MemoryError(), SystemError("error return without exception set")], ids=repr)
def test_memory_that_runs_out_within_python_is_a_sentence(
    error: Exception, cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is CPython 3.11's own, where a deep call finds no memory for its frames."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(command, "app", fail)
    assert cli("prepare") == 8
    assert f"memory ran out ({error!r}); free some memory" in capsys.readouterr().err


def test_a_list_of_no_models_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moedge.runtime.source import hub

    monkeypatch.setattr(hub, "cached_models", lambda: iter(()))
    assert cli("models", "ls", "--disk-dir", tmp_path) == 0
    printed = capsys.readouterr()
    assert (printed.out, f"No prepared weights in {tmp_path}" in printed.err.replace("\n", " ")) == ("", True)


def test_the_demo_sends_nobody_to_files_that_it_removes(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("demo") == 0
    printed = capsys.readouterr()
    assert "answers in" not in printed.err
    assert "jobs resume" not in printed.err
    assert printed.out.splitlines()[-1].startswith("Nothing of this is kept. The same job, to keep: moedge batch ")


def test_the_demo_installs_what_users_need_and_takes_what_tests_have(tmp_path: Path) -> None:
    def recipe(target: str) -> str:
        make = ["make", "--dry-run", target, f"VENV={tmp_path}"]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    alone = recipe("demo")
    assert "pip install --quiet --editable '.[formats]'\n" in alone, "README's next command reads a GGUF file"
    assert "[test]" not in alone
    assert "[test]" in recipe("test"), "an installation for the demo is not one for tests"
    stamp = next(line.split()[-1] for line in recipe("test").splitlines() if line.startswith("touch"))
    Path(stamp).touch()
    assert "pip" not in recipe("demo")
    assert "pip" not in recipe("test")
