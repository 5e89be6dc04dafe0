"""`run_batch` is the job of `moedge batch`: the same options, the same job on disk, resumed by each other."""

import csv
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge import LLM, run_batch, run_documents
from moedge import plan as plan_of
from moedge.apps.documents.options import DocumentOptions
from moedge.batch import batch_request
from moedge.cli import jobs
from moedge.cli.batch import batch
from moedge.cli.plan import plan
from moedge.runtime.jobs.session import JobSession
from moedge.runtime.settings.errors import BadArgument, JobMismatch, OverBudget
from moedge.runtime.settings.option import options_of
from moedge.runtime.settings.options import BatchOptions, LLMOptions, PlanOptions

# What a command prints, and where; a caller has the objects themselves.
PRESENTATION = {"summary", "progress", "output_format", "quiet", "explain", "as_json", "save", "job_dir", "verbose"}
# A command's own numbers are printed, those of a plan are in its report.
ENERGY = {"watts", "price", "hosted"}
POSITIONAL = {"model", "input_file", "output"}


def parameters(command: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(command).parameters) - PRESENTATION - POSITIONAL


def write_rows(path: Path, count: int, **fields: Any) -> Path:
    lines = ({"id": str(index), "prompt": f"row {index}", "max_tokens": 4} | fields for index in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_arguments_are_the_options_of_the_commands() -> None:
    assert set(BatchOptions.__annotations__) == parameters(batch) - ENERGY
    assert set(PlanOptions.__annotations__) == parameters(plan)
    assert parameters(jobs.resume) - ENERGY - {"job", "failed", "cut"} <= set(BatchOptions.__annotations__)


@pytest.mark.parametrize(
    ("call", "kind", "own"),
    [
        (run_batch, BatchOptions, ["model", "input_file", "output", "progress"]),
        (plan_of, PlanOptions, ["model", "input_file"]),
        (LLM, LLMOptions, ["model"]),
        (run_documents, DocumentOptions, ["model", "folder", "output", "progress"]),
    ],
)
def test_python_functions_have_real_parameters(call: Callable[..., Any], kind: type, own: list[str]) -> None:
    """What `help`, completion and `inspect` show: every option by name, with its default."""
    parameters = inspect.signature(call).parameters
    declared = options_of(kind)
    assert list(parameters) == [*own, *declared]
    assert {name: parameters[name].default for name in declared} == {n: each.default for n, each in declared.items()}
    assert str(parameters["ram"]).replace(" ", "") == "ram:str|int='auto'"


def test_a_request_has_what_the_arguments_say() -> None:
    request = batch_request(
        "m", "in", "out", ram=3 << 30, gpu_mem=0, disk="5GiB", disk_dir="/d", quant="int4", stream="all",
        max_tokens=7, temperature=0.5, seed=3, plan="p", lenient=True, until="07:00", max_rows=9, max_failures=4,
        accept_drift="kv", deterministic=True, reasoning_effort="low", max_thinking_tokens=8,
        chat_template_kwargs={"enable_thinking": False}, overwrite=True,
    )  # fmt: skip
    assert (request.budgets.ram, request.budgets.gpu_mem, request.budgets.host_nbytes()) == (
        "3221225472B",
        "0",
        3 << 30,
    )
    assert not request.budgets.wants_device
    assert (request.settings.quant, request.settings.deterministic, str(request.stream)) == (
        "int4",
        True,
        "all",
    )
    assert (request.defaults.max_tokens, request.defaults.temperature, request.defaults.seed) == (7, 0.5, 3)
    assert (request.defaults.reasoning_effort, request.defaults.max_thinking_tokens) == ("low", 8)
    assert request.defaults.chat_template_kwargs == '{"enable_thinking": false}'
    assert "temperature" not in request.unset, "a temperature that is given is not the model's to set"
    assert "temperature" in batch_request("m", "in", "out").unset
    assert (request.limits.until, request.limits.max_rows, request.limits.max_failures) == ("07:00", 9, "4")
    assert (request.resume.overwrite, request.follow) == (True, True)
    assert (request.plan, request.lenient, request.resume.drift) == (Path("p"), True, ("kv",))
    with pytest.raises(BadArgument, match="temperature must be at least 0; found -1"):
        batch_request("m", "in", "out", temperature=-1)
    with pytest.raises(BadArgument, match="reasoning_effort must be one of none, minimal"):
        batch_request("m", "in", "out", reasoning_effort="max")  # type: ignore[typeddict-item]
    with pytest.raises(BadArgument, match="chat_template_kwargs must be"):
        batch_request("m", "in", "out", chat_template_kwargs="[1]")
    with pytest.raises(BadArgument, match="max_token is not an option; did you mean max_tokens"):
        batch_request("m", "in", "out", max_token=1)  # type: ignore[call-arg]


def test_a_job_stops_is_resumed_and_done_once(
    checkpoint: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, rows, out = checkpoint("llama"), write_rows(tmp_path / "in.jsonl", 6), tmp_path / "out.jsonl"
    stopped = run_batch(model, rows, out, ram="3GiB", max_rows=2)
    assert (stopped.rows.total, out.exists()) == (2, False)
    shown = capfd.readouterr()
    assert (shown.out, "2/6 rows" in shown.err) == ("", True)
    with pytest.raises(JobMismatch, match="max_tokens 256 -> 9"):
        run_batch(model, rows, out, ram="3GiB", max_tokens=9, progress=False)
    done = run_batch(model, rows, out, ram="3GiB", progress=False)
    assert (done.rows.ok, done.rows.failed, done.tokens.generated) == (6, 0, 24)
    assert (done.rows.cut, done.rows.finish_reasons, done.rows.errors) == (6, {"length": 6}, {})
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [str(index) for index in range(6)]
    assert run_batch(model, rows, out, ram="3GiB").rows.ok == 6, "a finished job is not run again"
    assert run_batch(model, rows, out, ram="3GiB", max_tokens=9, overwrite=True, progress=False).rows.ok == 6


def test_choices_of_rows_are_scored_as_by_an_llm_and_a_stopped_job_goes_on(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, rows, out = checkpoint("llama"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = [{"role": "user", "content": "Is it a letter?"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "The invoice says", "choices": [" letter", " letters of"], "text": "mine"},
        {"messages": chat}, {"prompt": "And so", "choices": ["on"]}, {"prompt": "It is", "n": 2},
    ]  # fmt: skip
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: dict[str, Any] = {"ram": "3GiB", "choices": "yes, no ,perhaps not", "deterministic": True}
    stopped = run_batch(model, rows, out, max_rows=1, progress=False, **options)
    assert (stopped.rows.cut, stopped.tokens.generated) == (0, 0)
    done = run_batch(model, rows, out, progress=False, **options)
    assert (done.rows.ok, done.rows.failed, done.rows.cut, done.rows.finish_reasons) == (3, 1, 0, {"scored": 6})
    found = [json.loads(line) for line in out.read_text().splitlines()]
    with LLM(model, ram="3GiB", deterministic=True) as llm:
        named = [each.get("choices") or ["yes", "no", "perhaps not"] for each in lines[:3]]
        wanted = [
            llm.score([prompt], each, progress=False)[0]
            for prompt, each in zip(("The invoice says", chat, "And so"), named, strict=True)
        ]
        prompt_tokens = len(llm.get_tokenizer().encode("The invoice says letter")), 1
    for answer, scores in zip(found, wanted, strict=True):
        assert list(answer["logprobs"].items()) == list(zip(scores.choices, scores.logprobs, strict=True))
        assert list(answer["probabilities"].values()) == list(scores.probabilities)
        assert (answer["text"], answer["probability"]) == (scores.best, max(scores.probabilities))
        assert answer["usage"]["completion_tokens"] == 0
    assert found[0]["input_text"] == "mine"
    assert found[2]["probability"] == 1.0
    # A choice of one token, and one that has a second: the prompt counts once.
    assert prompt_tokens[0] < found[0]["usage"]["prompt_tokens"] < 2 * prompt_tokens[0]
    [refused] = [json.loads(line)["error"] for line in out.with_suffix(".errors.jsonl").open()]
    assert (refused["code"], refused["param"]) == ("invalid_value", "n")
    table = tmp_path / "table.csv"
    run_batch(model, rows, table, progress=False, **options)
    with table.open() as file:
        first = next(csv.DictReader(file))
    assert (first["text"], float(first["probability"])) == (found[0]["text"], found[0]["probability"])


def test_ctrl_c_keeps_what_was_answered(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows, out = checkpoint("llama"), write_rows(tmp_path / "in.jsonl", 6), tmp_path / "out.jsonl"
    why = JobSession.cancelled

    def press(session: JobSession) -> str | None:
        # Rows are confirmed by another thread, which a busy disk may hold up beyond the last pass.
        session.journal.sync()
        if session.journal.committed.ok >= 2:
            os.kill(os.getpid(), signal.SIGINT)
        return why(session)

    with monkeypatch.context() as patch:
        patch.setattr(JobSession, "cancelled", press)
        with pytest.raises(KeyboardInterrupt):
            run_batch(model, rows, out, ram="3GiB", max_sequences=2, progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    partial = (tmp_path / "out.partial.jsonl").read_text().splitlines()
    assert 2 <= len(partial) < 6
    assert run_batch(model, rows, out, ram="3GiB", progress=False).rows.ok == 6


def test_memory_above_the_budget_raises_and_the_answers_are_there(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else in the process takes the memory, after the rehearsal."""
    model, rows, out = checkpoint("llama"), write_rows(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    monkeypatch.setattr(
        JobSession,
        "cancelled",
        lambda session: monkeypatch.setattr("moedge.runtime.plan.memory_ledger.host_peak", huge),
    )
    with pytest.raises(OverBudget, match=r"1024\.00 GiB of RAM were used, and the budget is") as raised:
        run_batch(model, rows, out, ram="3GiB", progress=False)
    assert raised.value.result.rows.ok == 2
    assert len(out.read_text().splitlines()) == 2


def huge() -> int:
    return 1 << 40


ROWS = 300
KILLED = "import sys; from moedge import run_batch; run_batch(*sys.argv[1:], ram='3GiB', max_sequences=8)"


@pytest.mark.slow
def test_a_job_of_run_batch_is_killed_and_the_command_resumes_it(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, out = checkpoint("llama"), tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "in.jsonl", ROWS, max_tokens=20)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(model), str(rows), str(out)], stderr=subprocess.DEVNULL
    )
    kill_in_work(process, out)
    assert_the_command_resumes(model, rows, out)


def kill_in_work(process: subprocess.Popen[Any], out: Path) -> None:
    journal = out.with_suffix(".job") / "journal"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size > 8_000):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()


def assert_the_command_resumes(model: Path, rows: Path, out: Path) -> None:
    command = [sys.executable, "-m", "moedge", "batch", str(model), str(rows), "-o", str(out), "--ram", "3GiB"]
    resumed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming job" in resumed.stderr
    done = int(resumed.stderr.split("resuming job ")[1].split(": ")[1].split(" row")[0].replace(",", ""))
    assert 0 < done < ROWS
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert ids == [str(index) for index in range(ROWS)]


ON_AN_LLM = """
import sys
from pathlib import Path
from moedge.runtime.jobs import lifecycle
from moedge import LLM

model_folder, rows, first, second, loaded = sys.argv[1:]
load = lifecycle.load_engine

def counted(*given, **named):
    with open(loaded, "a") as file:
        file.write("loaded\\n")
    return load(*given, **named)

lifecycle.load_engine = counted
with LLM(model_folder, ram="3GiB", max_sequences=8, max_model_len=128) as llm:
    print(llm.run_batch(rows, first, max_rows=20, progress=False).rows.ok, flush=True)
    llm.run_batch(rows, second, progress=False)
"""


@pytest.mark.slow
def test_a_job_on_an_llm_is_killed_and_the_command_resumes_it_and_weights_were_loaded_once(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, loaded = checkpoint("llama"), tmp_path / "loads"
    first, out = tmp_path / "first.jsonl", tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "in.jsonl", ROWS, max_tokens=20)
    arguments = [sys.executable, "-c", ON_AN_LLM, *map(str, (model, rows, first, out, loaded))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "20\n"
    kill_in_work(process, out)
    process.stdout.close()
    assert loaded.read_text() == "loaded\n", "once for both jobs"
    assert len((tmp_path / "first.partial.jsonl").read_text().splitlines()) == 20
    assert_the_command_resumes(model, rows, out)
