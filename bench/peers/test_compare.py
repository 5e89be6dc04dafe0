"""bench/compare.py and bench/peers/contenders.py: what the table says was looked up, and moedge streams."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import ROOT, compare
from bench.peers import contenders, step_engines
from moedge.offload.budget import GIB
from moedge.runtime.plan import memory_ledger
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import budget_range
from moedge.runtime.sampling.draw import Draw
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import open_source
from support import memory_ceiling as ceiling
from support import page_cache
from support.memory_ceiling import Outcome

LOADS = {"1": [1, 6, 3, 1], "3": [3, 6, 3, 1]}
SIZES: dict[str, Any] = {"loads": LOADS, "threads": 2}


def task(model: Path, ram: str, **others: Any) -> contenders.Task:
    return contenders.Task(
        **{"contender": "moedge", "model": str(model), "setting": "none", **SIZES, "ram": ram, **others}
    )


@pytest.fixture
def tight(checkpoint: Callable[[str], Path]) -> tuple[Path, str]:
    """A model, and memory in which not all of it can lie."""
    model = checkpoint("qwen3_moe")
    with open_source(str(model)) as source:
        settings = Settings(dtype="auto", quant="none", tokens_per_pass=18, max_sequences=3)
        smallest, whole = budget_range(source.shape, settings, Workload(3, 9))
    return model, f"{(smallest + whole) // 2}B"


def test_moedge_streams(tight: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, ram = tight
    # A contender has a process of its own; this one has more than that in it.
    monkeypatch.setattr(memory_ledger, "host_peak", lambda: int(ram.removesuffix("B")))
    timings = list(contenders.run_moedge(task(model, ram)))
    assert [one.batch for one in timings] == [1, 3]
    assert all(one.prompt_tok_s > 0 < one.decode_tok_s for one in timings)


def test_where_weights_stream_a_pass_takes_no_more_than_all_sequences_need(
    tight: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "STREAMED_PASS_TOKENS", 9)
    (model, ram), loads = tight, {"3": [3, 6, 3, 1]}
    prompts = {contenders.PROMPTS: loads["3"]}
    for cells, within, tokens in ((loads, "4GiB", 18), (loads, ram, 9), (prompts, ram, 18)):
        with contenders.planned(task(model, within, loads=cells, scratch=str(tmp_path))) as (_, plan, _):
            assert plan.streams == (within == ram)
            assert (plan.tokens_per_pass, plan.kv_sequences) == (tokens, 3)


def test_a_sequence_goes_on_from_random_tokens() -> None:
    logits, draws = torch.zeros(64, 50), [Draw(SequenceSampling(3), 0, 0) for _ in range(64)]
    logits[:, 7] = 1
    ids = contenders.RandomTokens(Sampler(), 50).sample(logits, draws).token_ids
    assert set(ids) <= set(range(50))
    assert len(set(ids)) > 20, "the model itself would say 7 for ever"


def test_what_moedge_reads_is_prepared_first(tight: tuple[Path, str], tmp_path: Path) -> None:
    model, ram = tight
    (found,) = contenders.prepare(task(model, ram, scratch=str(tmp_path)))
    assert list(Path(found.reads).glob("layer-*.safetensors"))
    assert tmp_path in Path(found.reads).parents
    (found,) = contenders.prepare(task(model, "4GiB", scratch=str(tmp_path)))
    assert Path(found.reads) == model


def test_a_setting_names_the_weights_their_experts_and_what_computes() -> None:
    said = {"int4": ("int4", "float"), "int4+int8": ("int4", "int8"), "int4+int3": ("int4+int3", "float")}
    said |= {"int4+int3+int8": ("int4+int3", "int8"), "none": ("none", "float")}
    assert {setting: contenders.formats_of(setting) for setting in said} == said


def test_one_new_token_decodes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="new is 1"):
        task(tmp_path, "auto", loads={"1": [1, 6, 1, 1]})


def test_bare_products_are_timed(checkpoint: Callable[[str], Path]) -> None:
    timings = list(contenders.run_products(task(checkpoint("qwen3_moe"), "auto", contender="products")))
    assert [one.batch for one in timings] == [1, 3]


LLAMA = """#!/bin/sh
echo 'a line for people'
echo '{"pl": 1, "speed_pp": 10.0, "speed_tg": 2.0}'
echo 'no room' >&2
exit 5
"""


def test_what_llama_cpp_measured_before_it_failed_counts(tmp_path: Path) -> None:
    binary = tmp_path / "llama-batched-bench"
    binary.write_text(LLAMA)
    binary.chmod(0o755)
    found = contenders.run_llama(task(tmp_path / "a.gguf", "auto", setting="", binaries=str(tmp_path)))
    first = next(found)
    assert (first.batch, first.prompt_tok_s, first.decode_tok_s) == (1, 10.0, 2.0)
    with pytest.raises(RuntimeError, match="ended with 5: no room"):
        next(found)


def test_steps_are_timed_from_the_token_that_ends_the_last_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    # A step a second. The second prompt ends with the third step, when the first sequence has two tokens of four.
    states = iter([{0: 1}, {}, {0: 2, 1: 1}, {0: 3, 1: 2}, {0: 4, 1: 3}, {1: 4}])
    clock, now = itertools.count(1), [0]
    monkeypatch.setattr(step_engines.time, "perf_counter", lambda: now[0])

    def step() -> dict[int, int]:
        now[0] = next(clock)
        return next(states)

    ran = step_engines.timed(contenders.Load(2, 6, 4, 1), step)
    # Five tokens in three seconds, where six would have been wanted had both decoded from their first on.
    assert (ran.prompt_s, ran.decode_s) == (3, 3 * 6 / 5)


def test_packages_run_by_their_own_interpreters() -> None:
    options = compare.parser().parse_args(
        ["--model", "m", "--vllm-python", "v/python", "--openvino-python", "o/python"]
    )
    options.gguf, options.ram = [], "auto"
    found = {one.engine: one.task({}, 2, rates=False) for one in compare.contenders(options)}
    assert (found["vllm"]["python"], found["vllm"]["setting"]) == ("v/python", "bfloat16")
    assert found["openvino"]["python"] == "o/python"
    assert found["moedge"]["python"] == sys.executable


OK = Outcome(0, read_nbytes=5 * GIB, peak_nbytes=3 * GIB - 1)


@pytest.mark.parametrize(
    ("outcome", "weights", "cached", "said"),
    [
        (OK, 7 * GIB, 3 * GIB, ""),
        (OK, 2 * GIB, 2 * GIB, ""),
        (Outcome(0, read_nbytes=5 * GIB, peak_nbytes=3 * GIB + 1), 7 * GIB, 0, "a peak of 3.000 GiB is above"),
        # llama.cpp from pages that somebody else had read: 7.7 GiB resident under 3.
        (Outcome(0, read_nbytes=0, peak_nbytes=GIB), 7 * GIB, 7 * GIB, "7.000 GiB of its files are in the page cache"),
        (Outcome(0, read_nbytes=0, peak_nbytes=GIB), 7 * GIB, GIB, "0.00 GB were read, and 4.29 GB do not fit"),
        (Outcome(0, read_nbytes=4 * GIB - 1, peak_nbytes=GIB), 7 * GIB, GIB, "4.29 GB were read, and 4.29"),
        (Outcome(0, read_nbytes=4 * GIB, peak_nbytes=GIB), 7 * GIB, GIB, ""),
        (Outcome(0, read_nbytes=0, peak_nbytes=GIB), GIB, 0, "0.00 GB were read"),
        # Bare products read no weights, and who was killed may not have come to it.
        (Outcome(0, read_nbytes=0, peak_nbytes=GIB), 0, 0, ""),
        (Outcome(-9, read_nbytes=0, peak_nbytes=3 * GIB, killed=True), 7 * GIB, 0, ""),
        (Outcome(-9, read_nbytes=0, peak_nbytes=3 * GIB + 1, killed=True), 7 * GIB, 0, "above the ceiling"),
    ],
)  # fmt: skip
def test_a_ceiling_that_cannot_have_bound_is_found_out(outcome: Outcome, weights: int, cached: int, said: str) -> None:
    found = compare.doubt(outcome, 3 * GIB, weights, cached)
    assert (said in found) if said else not found


def test_killed_is_what_the_kernel_says() -> None:
    assert compare.verdict(Outcome(1, err="RuntimeError: ended with -9", killed=True)) == "killed"
    assert compare.verdict(Outcome(-9)) == "exit -9: nothing"
    assert compare.verdict(Outcome(-9, late=True)) == "out of time"
    assert compare.verdict(Outcome(1, err="one\nTypeError: a | b\n")) == "exit 1: TypeError: a / b"


def test_a_killed_row_shows_what_was_measured_before() -> None:
    row = compare.Row("peer", {"1": (110.04, 0.037)}, 3 * GIB, 5_000_000_000, 0.5, "killed")
    assert row.valid
    assert row.shown(["1", "8"]) == "| peer | 110 / 0.037 | killed | 3.000 | 5.0 | 0.50 | killed |"


def test_killed_while_a_store_was_made_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "run", lambda *_: Outcome(-9, peak_nbytes=100, killed=True))
    (tmp_path / "model").mkdir()
    model = {"contender": "moedge", "model": str(tmp_path / "model"), "setting": "none"}
    row = compare.Bench(100, 60, tmp_path).measure({**model, "loads": LOADS})
    assert row.valid
    assert row.shown(["1"]) == "| moedge none | killed | 0.000 | 0.0 | - | killed while the store was made |"


class Contender:
    """In place of processes: reads and takes what it is told, and answers as a contender does."""

    def __init__(self, model: Path, outcome: Outcome) -> None:
        self.model, self.outcome = model, outcome
        self.seen: list[tuple[str, int | None, int]] = []

    def __call__(self, command: list[str], limit: int | None, seconds: float | None) -> Outcome:
        wanted = json.loads(command[-1])
        self.seen.append((wanted["contender"], limit, page_cache.resident_nbytes(page_cache.files_in([self.model]))))
        if wanted["contender"] == "prepare":
            return Outcome(0, json.dumps({"reads": str(self.model)}), read_nbytes=9, peak_nbytes=50)
        return self.outcome


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * 100_000)
    try:
        page_cache.drop(page_cache.files_in([folder]))
    except page_cache.StillCached as error:
        pytest.skip(str(error))
    (folder / "weights").read_bytes()
    return folder


TIMING = json.dumps(
    {"batch": 1, "cell": "1", "prompt_tok_s": 30.0, "decode_tok_s": 4.0, "peak_gib": 0.5, "others": 0.25}
)


@pytest.mark.parametrize(("read", "valid"), [(60_000, True), (0, False)])
def test_files_are_dropped_before_every_run(
    read: int, valid: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = Contender(model, Outcome(0, TIMING, read_nbytes=read, peak_nbytes=40_000))
    monkeypatch.setattr(ceiling, "run", contender)
    one = {"contender": "moedge", "model": str(model), "setting": "none", "loads": {"1": [1, 6, 3, 1]}}
    row = compare.Bench(50_000, 60, tmp_path).measure(one)
    assert contender.seen == [("prepare", 50_000, 0), ("moedge", 50_000, 0)]
    assert row.valid is valid
    assert row.verdict.startswith("ok" if valid else "invalid: 0.00 GB were read")
    assert (row.cells, row.peak_nbytes, row.read_nbytes) == ({"1": (30.0, 4.0)}, 40_000, read)


def test_under_a_ceiling_every_cell_has_a_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of llama.cpp: buffers of the most sequences would take the memory of the experts of the fewest."""
    found = {cell: TIMING.replace('"cell": "1"', f'"cell": "{cell}"') for cell in LOADS}

    def run(command: list[str], limit: int | None, seconds: float | None) -> Outcome:
        wanted = json.loads(command[-1])
        (cell,) = wanted["loads"]
        contender.outcome = Outcome(0, found[cell], read_nbytes=60_000, peak_nbytes=40_000)
        return contender(command, limit, seconds)

    contender = Contender(model, OK)
    monkeypatch.setattr(ceiling, "run", run)
    task = {"contender": "moedge", "model": str(model), "setting": "none", "loads": LOADS}
    row = compare.Bench(50_000, 60, tmp_path).measure(task)
    assert [who for who, *_ in contender.seen] == ["prepare", "moedge"] * 2
    assert (list(row.cells), row.read_nbytes) == (list(LOADS), 120_000)


def test_without_a_ceiling_nothing_is_dropped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Contender(model, Outcome(0, TIMING))
    monkeypatch.setattr(ceiling, "run", contender)
    row = compare.Bench(None, 60, tmp_path).measure({"contender": "accelerate", "model": str(model), "setting": "x"})
    ((_, limit, cached),) = contender.seen
    assert limit is None
    assert cached >= 100_000
    assert row.peak_nbytes == GIB // 2


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    monkeypatch.setattr(ceiling, "clean_up_when_told_to_end", lambda: None)


def test_where_no_group_can_be_made_nothing_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(limit: int) -> None:
        raise ceiling.NoGroup("no memory controller takes a new group")

    contender = Contender(model, Outcome(0, TIMING))
    monkeypatch.setattr(ceiling, "make_group", refuse)
    monkeypatch.setattr(ceiling, "run", contender)
    arguments(monkeypatch, "--model", str(model), "--ceiling", "3GiB")
    with pytest.raises(SystemExit, match="--ceiling 3GiB cannot be kept, and nothing was run: no memory controller"):
        compare.main()
    assert not contender.seen


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_the_command_runs_to_its_end(limit: str | None, tight: tuple[Path, str], tmp_path: Path) -> None:
    model, ram = tight
    sizes = ["--batches", "1", "3", "--prompt", "6", "--new", "3", "--prompts", "0", "--repeats", "1"]
    options = ["--moedge", "none", "--transformers", "--ram", ram, *(["--ceiling", limit] if limit else [])]
    command = [
        "env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-m",
        "bench.compare",
        "--model",
        str(model),
        *sizes,
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    if "no memory controller" in done.stderr or "stay in the page cache" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    *_, header, _, row, _ = done.stdout.splitlines()
    peak = "group's peak GiB" if limit else "peak GiB"
    assert header == f"| prompt / decode, tok/s | 1 | 3 | {peak} | read GB | others' CPU | verdict |"
    assert row.startswith("| moedge none | ")
    assert row.endswith(" | ok |")
    assert " - " not in row
    assert 0 < float(row.split(" | ")[3]) <= 1
    assert not list(tmp_path.glob("tmp*")), "stores were left behind"
