"""Every benchmark says what it is for, and `bench/toy.py` runs all of them."""

import importlib
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import micro, toy

HERE = Path(__file__).parent
FILES = {path.stem for path in HERE.glob("*.py")}
SCRIPTS = {name for name in FILES if not name.startswith("test_")} - {"__init__", "conftest", "toy"}


def test_every_script_runs_at_toy_size() -> None:
    assert toy.COMMANDS.keys() == SCRIPTS | {"gpu"}
    subjects = {command.split()[0] for command in toy.COMMANDS["micro"]}
    found = {module.name for module in pkgutil.iter_modules([str(HERE / "subjects")])}
    assert subjects == found == micro.SUBJECTS.keys()


@pytest.fixture
def _same_environment() -> Iterator[None]:
    """Scripts set what torch and Triton read when they are imported."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_same_environment")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("script", sorted(SCRIPTS | {"toy"}))
def test_help_is_printed(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"bench.{script}", run_name="__main__", alter_sys=False)
    assert not ended.value.code
    about = (importlib.import_module(f"bench.{script}").__doc__ or "").splitlines()[0]
    assert about.split()[0] in capsys.readouterr().out
