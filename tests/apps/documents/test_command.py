"""`moedge docs` with the bundled model: structured answers as a table, quotes, prompts to edit, and no socket."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.document_folder import BAD, GOOD, pdf

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "tiny_moe" / "model"
PAGE = (ROOT / "docs" / "documents.md").read_text()
# Everything that could leave the machine ends the process, in it and in the processes that it starts.
GUARD = """
import os, sys
def refuse(event, arguments):
    if event.startswith("socket.") and event != "socket.gethostname":
        os.write(2, f"SOCKET {event} {arguments}".encode())
        os._exit(99)
sys.addaudithook(refuse)
"""


def docs(folder: Path, *options: str, guard: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder.parent / "state"), "HF_HUB_OFFLINE": "1"}
    if guard is not None:
        environment["PYTHONPATH"] = str(guard)
    command: Sequence[str] = (sys.executable, "-m", "moedge", "docs", str(MODEL), str(folder), *options)
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    root.mkdir()
    for name in ("letter.docx", "page.html", "offer.eml"):
        (root / name).write_bytes(GOOD[name][0])
    (root / "locked.pdf").write_bytes(BAD["locked.pdf"][0])
    (root / "report.pdf").write_bytes(pdf(["Nothing here", "The sum is 12"]))
    return root


@pytest.mark.slow
def test_a_folder_becomes_a_table_and_no_socket_opens(folder: Path, tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    proof = "import socket; socket.socket()"
    environment = {**os.environ, "PYTHONPATH": str(guard)}
    assert subprocess.run([sys.executable, "-c", proof], env=environment, check=False).returncode == 99
    out = tmp_path / "out.csv"
    options = ("-o", str(out), "--task", "extract", "--fields", "kind: letter|other, said: quote", "--max-tokens", "80")
    done = docs(folder, *options, "--ram", "2GiB", guard=guard)
    assert done.returncode == 3, done.stderr
    assert "Everything stays on this machine." in done.stderr
    assert "errors: 1 document_encrypted" in done.stderr
    assert "prefix cache" in done.stderr
    with out.open() as file:
        table = {row["source"]: row for row in csv.DictReader(file)}
    assert set(table) == {"letter.docx", "page.html", "offer.eml", "locked.pdf", "report.pdf", "offer.eml/offer.pdf"}
    assert table["locked.pdf"]["error"].startswith("document_encrypted")
    assert all(row["kind"] in ("letter", "other") for row in table.values() if not row["error"])
    again = docs(folder, *options, "--ram", "2GiB", guard=guard)
    assert "loaded in" not in again.stderr
    assert again.returncode == 3


def test_prompts_are_printed_to_be_edited(folder: Path, tmp_path: Path) -> None:
    printed = docs(
        folder, "-o", str(tmp_path / "o.csv"), "--task", "classify", "--fields", "kind: a|b", "--print-prompt"
    )
    assert printed.returncode == 0, printed.stderr
    assert "Classify the document below." in printed.stdout
    assert "Partial answers, in the order of the document" in printed.stdout
    schema = json.loads(printed.stdout.rpartition("--- --schema\n")[2])
    assert schema["properties"] == {"kind": {"enum": ["a", "b"]}}
    assert not (tmp_path / "o.job").exists()


@pytest.mark.slow
def test_the_recipes_of_the_page_run_as_shown(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "documents", tmp_path / "work")
    recipes = re.findall(r"```sh\n(.*?)```", PAGE.partition("## Three recipes")[2], re.DOTALL)
    assert len(recipes) == 3
    program = Path(sys.executable).parent
    environment = {
        **os.environ, "MODEL": str(MODEL), "PATH": f"{program}:{os.environ['PATH']}", "MOEDGE_RAM": "2GiB",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }  # fmt: skip
    for recipe in recipes:
        done = subprocess.run(
            ["bash", "-ec", recipe], cwd=tmp_path / "work", env=environment, check=False, capture_output=True, text=True
        )
        # The demo model closes few JSON objects: answers that --max-tokens cut are failed rows.
        assert done.returncode == 0 or "incomplete_output" in done.stderr, recipe + done.stderr
    with (tmp_path / "work" / "invoices.csv").open() as file:
        assert [row["source"] for row in csv.DictReader(file)] == ["2024-017.html", "2024-021.txt"]
    mails = [json.loads(line) for line in (tmp_path / "work" / "mail.jsonl").read_text().splitlines()]
    assert [(mail["id"], mail["type"]) for mail in mails] == [("offer.eml", "email"), ("roof.eml", "email")]
    written = [tmp_path / "work" / name for name in ("notice.jsonl", "notice.errors.jsonl")]
    (notice,) = [json.loads(line) for file in written if file.exists() for line in file.read_text().splitlines()]
    assert notice["source"] == "lease.md"


@pytest.mark.slow
def test_the_python_of_the_page_runs_as_shown(tmp_path: Path) -> None:
    code = PAGE.partition("## From Python")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lease.md None # Lease of a boat shed" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 Counter()"
