"""`moedge report` of a job with the bundled model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer import BadParameter

from moedge.cli.options.options import own_file

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"


def moedge(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "moedge", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_the_page_of_a_batch_has_the_figures_of_its_summary(tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "prompt": f"Say {number}", "max_tokens": 6 + number} for number in range(8)]
    rows.append({"id": "<script>alert(1)</script>", "prompt": ""})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = ("batch", str(MODEL), "in.jsonl", "-o", "out.jsonl", "--ram", "2GiB", "--summary", "s.json")
    assert moedge(tmp_path, *batch).returncode == 3
    done = moedge(tmp_path, "report", "out.jsonl")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "out.report.html")), done.stderr
    page, summary = (tmp_path / "out.report.html").read_text(), json.loads((tmp_path / "s.json").read_text())
    assert f"<b>{summary['rows']['ok']}</b>of 9 rows answered" in page
    assert f"<b>{summary['tokens']['generated']:,}</b>tokens generated" in page
    assert f"{summary['throughput']['generated_tok_s']:,.1f}" in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "moedge batch" in page
    for section in ("Phases, and what they waited for", "Memory against budgets", "Expert use", "invalid_value"):
        assert section in page
    # Once more over its own page, never over a file of somebody else.
    assert own_file(tmp_path / "out.report.html") is not None
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(BadParameter, match="was not written by moedge"):
        own_file(tmp_path / "mine.html")
