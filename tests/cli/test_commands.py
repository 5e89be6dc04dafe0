"""What a person types (`cli/`): every refusal has its code and one sentence, every answer its file."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moedge.runtime.jobs.summary import json_schema
from support.forked import forked
from support.quantized_checkpoints import write_quantized

Rows = list[dict[str, Any]]
CODE = "import sys; from moedge.cli.main import main; main()"


@pytest.fixture
def good(rows_file: Callable[[Path, Rows], Path], tmp_path: Path) -> Path:
    return rows_file(tmp_path / "in.jsonl", [{"id": "a", "prompt": "Hello", "max_tokens": 4}])


def test_help_imports_no_torch() -> None:
    names = ("", "batch", "run", "demo", "jobs", "jobs resume", "models", "bench", "eval")
    code = (
        "import sys; from moedge.cli.main import app\n"
        f"for name in {names!r}:\n"
        "    try:\n        app([*name.split(), '--help'])\n"
        "    except SystemExit as end:\n        assert not end.code, name\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(names)


def test_evaluation_without_lm_eval_names_the_line_that_installs_it(
    cli: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli("eval", "a-model", "--tasks", "arc_easy") == 6
    assert re.search(r"evaluation needs lm-eval, .* pip install .*'lm-eval>=[\d.]+'", capsys.readouterr().err)


def test_a_batch_answers_rows_of_every_form(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    rows_file: Callable[[Path, Rows], Path],
    rows_of: Callable[[Path], Rows],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    rows = [
        {"id": "short", "prompt": "Hello", "max_tokens": 4},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": ["a", "b"], "max_tokens": 3},
        },
        {"id": "long", "prompt": "x" * 600},
        {"id": "odd", "prompt": "x", "echo": True},
        {"id": "messages", "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 3, "temperature": 1},
    ]
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    source = rows_file(tmp_path / "in.jsonl", rows)
    assert cli("batch", checkpoint("qwen3_moe"), source, "-o", out, "--summary", summary) == 3
    answered, failed = rows_of(out), rows_of(tmp_path / "out.errors.jsonl")
    assert [row.get("id") if "custom_id" not in row else row["custom_id"] for row in answered] == [
        "short", "chat", "text", "messages",
    ]  # fmt: skip
    assert [(row["id"], row["error"]["code"]) for row in failed] == [
        ("long", "context_length_exceeded"),
        ("odd", "unsupported_parameter"),
    ]
    assert len(answered[1]["response"]["body"]["choices"][0]["logprobs"]["content"]) == 5
    assert len(answered[2]["response"]["body"]["choices"]) == 2
    assert len(answered[3]["choices"]) == 2
    numbers = json.loads(summary.read_text())
    jsonschema.validate(numbers, json_schema())
    assert numbers["rows"] == {
        "total": 6, "ok": 4, "failed": 2, "cut": 4, "finish_reasons": {"length": 6},
        "errors": {"unsupported_parameter": 1, "context_length_exceeded": 1},
    }  # fmt: skip
    assert numbers["tokens"]["generated"] == 4 + 5 + 6 + 6
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "1 row is longer than the context" in printed.err


def test_a_run_says_the_energy_and_the_cost_of_its_own_rows(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    rows_file: Callable[[Path, Rows], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"id": str(each), "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True} for each in range(6)]
    source, out, summary = rows_file(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tmp_path / "summary.json"
    prices = ("--watts", 1000, "--price", "0.30/kWh", "--hosted", "100,1000")
    assert cli("batch", checkpoint("llama"), source, "-o", out, "--max-rows", 4) == 75
    capsys.readouterr()
    assert cli("batch", checkpoint("llama"), source, "-o", out, "--summary", summary, *prices) == 0
    said = capsys.readouterr().err
    seconds = json.loads(summary.read_text())["seconds"]["total"]
    assert f"energy at 1,000 W: {seconds / 3600:,.3g} kWh, {seconds / 3600 / 2 * 1000:,.3g} per 1,000 rows" in said
    assert (
        f"it costs {0.3 * seconds / 3600:,.2f}, {0.3 * seconds / 3600 * 500:,.3g} per 1,000 rows, at 0.3 a kWh" in said
    )
    # Two rows of three and four tokens.
    assert "hosted at 100 and 1,000 a million tokens: 0.01, 4.3 per 1,000 rows" in said
    assert cli("batch", checkpoint("llama"), source, "-o", tmp_path / "more.jsonl", "--price", "0.3") == 2
    assert "--price needs --watts" in capsys.readouterr().err


@pytest.mark.parametrize("quant", ["none", "int8", "nf4", "mxfp4"])
def test_packed_bytes_are_reported_beside_those_asked_for(
    quant: str, checkpoint: Callable[[str], Path], cli: Callable[..., int], good: Path, tmp_path: Path
) -> None:
    """No format is applied by halves without a word: the census says what became what."""
    summary = tmp_path / "summary.json"
    arguments = ("--quant", quant, "--summary", summary, "-q")
    assert cli("batch", checkpoint("qwen3_moe"), good, "-o", tmp_path / "out.jsonl", *arguments) == 0
    numbers = json.loads(summary.read_text())
    weights = numbers["weights"]
    assert list(weights["requested"]) == [quant]
    assert list(weights["packed"]) == [quant]
    share = weights["packed"][quant] / weights["requested"][quant]
    assert share == pytest.approx({"none": 1.0, "int8": 0.25, "nf4": 4.25 / 32, "mxfp4": 4.25 / 32}[quant], rel=0.08)
    assert numbers["plan"]["quant"] == quant


def broken_model(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    return folder


REFUSALS: dict[str, tuple[int, str]] = {
    "no model": (5, "neither a folder nor a hub id"),
    "broken model": (5, "download it again"),
    "no input": (7, "cannot be read"),
    "bad line": (7, "line 2: invalid_json_line"),
    "duplicate": (7, "duplicate_id"),
    "output exists": (2, "exists and is not overwritten"),
    "output is input": (2, "is the input"),
    "bad option": (2, "Invalid value"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_have_their_code_and_one_sentence(
    case: str,
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, source, out, extra = checkpoint("llama"), good, tmp_path / "out.jsonl", []
    if case == "no model":
        model = tmp_path / "nothing"
    elif case == "broken model":
        model = broken_model(Path(shutil.copytree(model, tmp_path / "model")))
    elif case == "no input":
        source = tmp_path / "nothing.jsonl"
    elif case == "bad line":
        source.write_text(source.read_text() + "{oops\n")
    elif case == "duplicate":
        source.write_text(source.read_text() * 2)
    elif case == "output exists":
        out.write_text("precious")
    elif case == "output is input":
        out = source
    else:
        extra = ["--quant", "int3"]
    code, sentence = REFUSALS[case]
    assert cli("batch", model, source, "-o", out, *extra) == code
    printed = capsys.readouterr()
    assert sentence in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
    assert case != "output exists" or out.read_text() == "precious"


def test_lenient_turns_bad_lines_into_error_rows(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    good: Path,
    rows_of: Callable[[Path], Rows],
    tmp_path: Path,
) -> None:
    good.write_text("{oops\n" + good.read_text())
    out = tmp_path / "out.jsonl"
    assert cli("batch", checkpoint("llama"), good, "-o", out, "--lenient", "-q") == 3
    assert [row["id"] for row in rows_of(out)] == ["a"]
    assert rows_of(tmp_path / "out.errors.jsonl")[0]["response"]["body"]["error"]["code"] == "invalid_json_line"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_stops_cleanly_with_what_is_finished(
    number: signal.Signals,
    code: int,
    checkpoint: Callable[[str], Path],
    rows_file: Callable[[Path, Rows], Path],
    tmp_path: Path,
) -> None:
    rows = [{"id": str(i), "prompt": "x", "max_tokens": 20 + 10 * i, "ignore_eos": True} for i in range(22)]
    source, out = rows_file(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ["batch", checkpoint("llama"), source, "-o", out, "--max-sequences", 4]
    with forked(command, tmp_path) as process:
        for line in process.stderr:
            if line.startswith("loaded"):
                break
        while b'"done"' not in (tmp_path / "out.job" / "journal").read_bytes():
            time.sleep(0.01)
        os.kill(process.pid, number)
        rest = process.stderr.read()
    assert process.wait() == code, rest
    assert not out.exists()
    partial = [json.loads(line)["id"] for line in (tmp_path / "out.partial.jsonl").read_text().splitlines()]
    assert partial == sorted(partial, key=int)
    assert 0 < len(partial) < len(rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.job", "out.partial.jsonl"]


def test_run_answers_on_stdout(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint("qwen3_moe")
    assert cli("run", folder, "Hello", "--max-tokens", 6) == 0
    asked = capsys.readouterr()
    assert asked.out.endswith("\n")
    assert cli("run", folder, "Hello", "--max-tokens", 6, "--raw") == 0
    assert capsys.readouterr().out != asked.out, "--raw leaves the chat template away"
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert cli("run", folder) == 7
    assert cli("run", folder, "x", "--max-tokens", 100_000) == 4


def test_models_shows_a_shape(
    checkpoint: Callable[[str], Path], cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("models", "show", checkpoint("mixtral"), "--json") == 0
    shape = json.loads(capsys.readouterr().out)
    assert (shape["layers"], shape["experts"]) == (4, 32)
    assert shape["active_parameters"] < shape["parameters"]
    assert cli("models", "show", checkpoint("mixtral")) == 0
    assert "32 experts in total" in capsys.readouterr().out
    assert cli("models", "families") == 0
    assert "gpt_oss" in capsys.readouterr().out.split()


def test_models_shows_what_lies_in_a_quantized_checkpoint(
    tmp_path: Path, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_quantized("awq", tmp_path / "quantized", tmp_path / "wide")
    assert cli("models", "show", tmp_path / "quantized", "--json") == 0
    stored = {each["group"]: each for each in json.loads(capsys.readouterr().out)["stored"]}
    assert stored["experts"]["becomes"] == "kept as int4-g32-f16-zp"
    assert stored["experts"]["bits"] == 4.625
    assert stored["embedding and head"]["becomes"] == "read as they are"
    assert cli("models", "show", tmp_path / "quantized") == 0
    assert "awq int4 g32, 4.62 bits per weight" in capsys.readouterr().out


def test_a_prepared_store_answers_without_its_checkpoint(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    good: Path,
    rows_of: Callable[[Path], Rows],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, store = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")), tmp_path / "stores" / "one"
    assert cli("batch", model, good, "-o", tmp_path / "a.jsonl", "--quant", "nf4", "-q", "--deterministic") == 0
    assert cli("prepare", model, "-o", store) == 0
    shutil.rmtree(model)
    assert cli("batch", store, good, "-o", tmp_path / "b.jsonl", "-q", "--deterministic") == 0
    assert rows_of(tmp_path / "a.jsonl") == rows_of(tmp_path / "b.jsonl")
    assert cli("batch", store, good, "-o", tmp_path / "c.jsonl", "--quant", "int8") == 4
    assert cli("batch", store, good, "-o", tmp_path / "c.jsonl", "MOEDGE_COMPUTE=int8") == 4
    assert cli("models", "check", store) == 0
    capsys.readouterr()
    assert cli("models", "ls", "--disk-dir", store.parent) == 0
    assert str(store) in capsys.readouterr().out
    file = store / "layer-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-4096] + bytes(4096))
    assert cli("models", "check", store) == 5
    assert cli("prepare", checkpoint("qwen3_moe"), "-o", store) == 0
    assert cli("models", "check", store) == 0
    assert cli("models", "rm", store) == 0
    assert not store.exists()


def test_a_budget_too_small_names_the_one_that_works(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases M1 and M3 of the failure table: what is named works, and no moment shows more than it from outside."""
    stores = ("--disk-dir", tmp_path / "stores", "-q")
    assert cli("batch", checkpoint("mixtral"), good, "-o", tmp_path / "out.jsonl", "--ram", "100MiB", *stores) == 4
    # For rows of one token, and for all rows of the model's context.
    least, named = re.findall(r"--ram (\d+MiB)", capsys.readouterr().err)
    assert int(least.removesuffix("MiB")) < int(named.removesuffix("MiB"))
    assert cli("batch", checkpoint("mixtral"), good, "-o", tmp_path / "o2.jsonl", "--ram", "three", *stores) == 2
    # In a process of its own: the peak that is held against the budget is a whole process's.
    command = ["batch", checkpoint("mixtral"), good, "-o", tmp_path / "out.jsonl", "--ram", named, *stores]
    command = [sys.executable, "-m", "moedge", *map(str, command), "--summary", str(tmp_path / "summary.json")]
    with subprocess.Popen(command) as process:
        seen = list(taken(process.pid))
    assert process.returncode == 0
    host = json.loads((tmp_path / "summary.json").read_text())["memory"]["host"]
    assert 0 < host["peak"] <= host["budget"] == int(named.removesuffix("MiB")) << 20
    assert len(seen) > 50
    assert 100 << 20 < max(seen) <= host["budget"]


def taken(pid: int) -> Iterator[int]:
    """Bytes that only this process has, as the kernel counts them, every 10 ms until it has ended."""
    while True:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if "RssAnon" not in fields:
            return
        yield sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        time.sleep(0.01)
