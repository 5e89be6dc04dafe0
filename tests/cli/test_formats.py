"""`moedge batch` (`cli/batch.py`) and `plan` (`cli/plan.py`) over files that are not JSON lines, and the recipes of
`docs/batches.md`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny_moe" / "model"
PAGE = (ROOT / "docs" / "batches.md").read_text().partition("\n## The input file\n")[0]

Cli = Callable[..., int]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "moedge"


def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    path.write_text('ticket,review\n17,"Late,\nbut good"\n18,Great\n')
    return path


def test_stdout_gets_every_answer_once_and_the_folder_is_removed(
    cli: Cli, tmp_path: Path, own_state: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    batch = ["batch", MODEL, reviews(tmp_path), "--prompt-column", "review", "--id-column", "ticket", "-o", "-"]
    assert cli(*batch, "--max-tokens", 3, "--max-rows", 1) == 75
    assert len(capfdbinary.readouterr().out.splitlines()) == 1
    assert len(list((own_state / "streams").iterdir())) == 1
    assert cli(*batch, "--max-tokens", 3) == 0
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted((row["id"], row["ticket"]) for row in found) == [("17", "17"), ("18", "18")]
    assert list((own_state / "streams").iterdir()) == []
    assert cli(*batch, "--max-tokens", 3, "-q", f"MOEDGE_JOB_DIR={tmp_path / 'kept'}") == 0
    assert (tmp_path / "kept" / "answers.jsonl").read_bytes().count(b"\n") == 2
    assert cli(*batch, "--format", "json") == 2
    assert not (tmp_path / "-").exists()


def test_a_csv_has_no_formulas_where_it_is_to_be_safe(cli: Cli, tmp_path: Path) -> None:
    """Of documents, unless it is told otherwise; of rows where it is asked for, whenever it is exported."""
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "in"
    rows.write_text('{"id": "=1+1", "prompt": "a", "max_tokens": 2}\n')
    folder.mkdir()
    (folder / "=1.txt").write_text("hello")
    docs = ("docs", MODEL, folder, "--prompt", "x", "--max-tokens", 2, "-q", "-o")
    for arguments, safe in (
        (("batch", MODEL, rows, "-q", "-o", tmp_path / "a.csv"), False),
        (("batch", MODEL, rows, "-q", "-o", tmp_path / "b.csv", "--csv-safe"), True),
        ((*docs, tmp_path / "c.csv"), True),
        ((*docs, tmp_path / "d.csv", "--no-csv-safe"), False),
    ):
        assert cli(*arguments) == 0
        out = arguments[arguments.index("-o") + 1]
        assert out.read_text().splitlines()[1].startswith("'=1" if safe else "=1"), arguments
    (tmp_path / "b.csv").unlink()
    assert cli("jobs", "export", tmp_path / "b.job", "-o", tmp_path / "again.csv") == 0
    assert (tmp_path / "again.csv").read_text().splitlines()[1].startswith("'=1")


def test_a_csv_begins_with_a_byte_order_mark_where_it_is_asked_for_and_is_read_with_it(
    cli: Cli, tmp_path: Path
) -> None:
    rows, folder, mark = tmp_path / "rows.jsonl", tmp_path / "in", b"\xef\xbb\xbf"
    rows.write_text('{"id": "ü", "prompt": "a", "max_tokens": 2}\n')
    folder.mkdir()
    (folder / "ü.txt").write_text("hello")
    docs = ("docs", MODEL, folder, "--prompt", "x", "--max-tokens", 2, "-q")
    for command in (("batch", MODEL, rows, "-q"), docs):
        plain, marked = (tmp_path / f"{command[0]}{name}.csv" for name in ("", "_marked"))
        assert cli(*command, "-o", plain) == 0
        assert cli(*command, "-o", marked, "--csv-bom") == 0
        assert mark not in plain.read_bytes()
        assert marked.read_bytes() == mark + plain.read_bytes()
    # Later exports are as the job began; a table of documents is as it is asked for now.
    assert cli("jobs", "export", tmp_path / "batch_marked.job", "-o", tmp_path / "again.csv") == 0
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "batch_marked.csv").read_bytes()
    assert cli(*docs, "-o", tmp_path / "docs.csv", "--csv-bom") == 0
    assert (tmp_path / "docs.csv").read_bytes() == (tmp_path / "docs_marked.csv").read_bytes()
    read = tmp_path / "read.csv"
    read.write_bytes(mark + "id,text\r\nü,a\r\n".encode())
    again = ("batch", MODEL, read, "--prompt-column", "text", "--id-column", "id", "-q", "--max-tokens", 2)
    assert cli(*again, "-o", tmp_path / "next.jsonl") == 0
    assert json.loads((tmp_path / "next.jsonl").read_text())["id"] == "ü"


def test_plan_says_which_rows_it_leaves_out(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_curves: None
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "a", "max_token": 1}\n{"prompt": "a", "max_tokens": 99999}\n')
    assert cli("plan", MODEL, rows) == 0
    said = capsys.readouterr().err
    assert "line 2: unknown_parameter" in said
    assert "planned without 1 invalid row\nplanned without 1 row longer than the model's context" in said
    assert cli("plan", MODEL, reviews(tmp_path), "--prompt-column", "review") == 0
    assert "planned without" not in capsys.readouterr().err


def test_rows_that_share_an_error_are_refused_before_anything_is_loaded(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "max_token": 1}\n' * 3 + '{"prompt": "a"}\n')
    assert cli("batch", MODEL, rows, "-o", tmp_path / "out.jsonl") == 7
    assert "3 of 4 rows have the error unknown_parameter" in capsys.readouterr().err
    assert not (tmp_path / "out.job").exists()


def blocks() -> list[tuple[str, str, str]]:
    """(file name, language, text) of each block of the page; a name in the line before it makes it a file."""
    found = re.findall(r"(?:`([\w.]+)`:\n\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) > 9
    return found


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path: Path) -> None:
    environment = {**os.environ, "MODEL": str(MODEL), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, language, text in blocks():
        if name:
            (tmp_path / name).write_text(text)
            continue
        # The one package of the page that the extra for tests does not have: no other block needs what it writes.
        if text.startswith("from datasets") and find_spec("datasets") is None:
            continue
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (text, done.stderr)
    assert (tmp_path / "answers.csv").read_text().startswith("id,text,finish_reason,")
    names = pq.read_schema(tmp_path / "happy.parquet").names
    assert names[-4:] == ["happy", "about", "ticket", "stars"]
    assert len((tmp_path / "piped.jsonl").read_text().splitlines()) == 2
