"""The exactness contract, end to end (`docs/dev/exactness.md`; `runtime/model/`, `runtime/engine/`): `moedge batch
--deterministic` gives transformers' tokens, in any batch.
"""

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.quant.matmul.thread_pool import torch_threads
from moedge.runtime.shape.families import LATENT

# Each costs seconds; tests/matrix/families.py runs every family.
FAMILIES = (
    "qwen3_moe", "gpt_oss", "granitemoe", "gemma3_text", "llama", "llama4_text", "mimo_v2_flash", *sorted(LATENT),
)  # fmt: skip
# Those that tests/isa.py runs under other instruction sets, where every second counts several times.
ISA_FAMILIES = ("qwen3_moe", "gemma3_text")
EXACT = ("--dtype", "fp32", "--quant", "none", "--kv", "fp32", "--deterministic", "-q")
# Tokens per pass, sequences: the two furthest apart, and one family at those between as well.
LIMITS = [(16, 3), (1024, 64)]
MORE_LIMITS = {"gpt_oss": [(16, 64), (1024, 3)]}
LENGTHS = (3, 40, 17, 70, 1, 33)
NEW_TOKENS = 12

under_every_isa = partial(pytest.param, marks=pytest.mark.numerics)

Answer = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 380, (length,), generator=generator).tolist() for length in LENGTHS]


def greedy_rows() -> list[dict[str, Any]]:
    common = {"max_tokens": NEW_TOKENS, "return_token_ids": True}
    return [{"id": f"greedy-{i}", "prompt": ids, **common} for i, ids in enumerate(prompts())]


def sampled_rows() -> list[dict[str, Any]]:
    common = {"max_tokens": NEW_TOKENS, "return_token_ids": True, "temperature": 0.9}
    extras: list[dict[str, Any]] = [
        {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02, "n": 3}, {"seed": 7, "repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.4}, {},
    ]  # fmt: skip
    return [
        {"id": f"sampled-{i}", "prompt": ids, **common, **extra}
        for i, (ids, extra) in enumerate(zip(prompts(), extras, strict=True))
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path], stock: Callable[[Path], Any]) -> Callable[[str], list[list[int]]]:
    """transformers' own greedy tokens, one prompt at a time."""

    @functools.cache
    def generate(family: str) -> list[list[int]]:
        model = stock(checkpoint(family))
        return [
            model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
                0, len(ids) :
            ].tolist()
            for ids in prompts()
        ]

    return generate


@pytest.fixture
def answer(
    cli: Callable[..., int],
    rows_file: Callable[[Path, list[dict[str, Any]]], Path],
    rows_of: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> Answer:
    """`answer(model, limits, *options)` is what a batch of greedy and sampled rows gives within those limits."""
    rows = rows_file(tmp_path / "in.jsonl", greedy_rows() + sampled_rows())

    def run(model: Path, limits: tuple[int, int], *options: object) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        out, summary = tmp_path / "{}-{}.jsonl".format(*limits), tmp_path / "summary.json"
        limited = ("--tokens-per-pass", limits[0], "--max-sequences", limits[1])
        assert cli("batch", model, rows, "-o", out, *options, *limited, "--summary", summary) == 0
        return rows_of(out), json.loads(summary.read_text())

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", [under_every_isa(name) if name in ISA_FAMILIES else name for name in FAMILIES])
def test_tokens_are_those_of_transformers_in_any_batch(
    family: str,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
    answer: Answer,
) -> None:
    limits = LIMITS + MORE_LIMITS.get(family, [])
    answers, told = zip(*(answer(checkpoint(family), each, *EXACT) for each in limits), strict=True)
    assert [row["token_ids"] for row in answers[0][: len(LENGTHS)]] == expected(family)
    assert all(other == answers[0] for other in answers)
    passes = {each["passes"]["count"] for each in told}
    assert len(passes) == len(limits), "the limits changed nothing, so equality shows nothing"
    assert len({token for row in expected(family) for token in row}) > 20, "degenerate tokens show nothing"


def test_sampled_rows_differ_from_greedy_ones_and_by_seed(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    rows_file: Callable[[Path, list[dict[str, Any]]], Path],
    rows_of: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """Negative control: the settings of the sampled rows do something."""
    rows = rows_file(tmp_path / "in.jsonl", greedy_rows()[:1] + sampled_rows()[:3])
    texts = []
    for seed in (0, 1):
        out = tmp_path / f"{seed}.jsonl"
        assert cli("batch", checkpoint("qwen3_moe"), rows, "-o", out, *EXACT, "--seed", seed) == 0
        texts.append([json.dumps(row) for row in rows_of(out)])
    assert texts[0][0] == texts[1][0]
    assert all(a != b for a, b in zip(texts[0][1:], texts[1][1:], strict=True))
    choices = rows_of(tmp_path / "0.jsonl")[3]["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "quant",
    [under_every_isa(["none"]), under_every_isa(["int4"]), ["nf4"], under_every_isa(["int8", "MOEDGE_COMPUTE=int8"])],
    ids="-".join,
)
def test_low_precision_is_exact_across_batches_too(
    quant: list[str], checkpoint: Callable[[str], Path], answer: Answer
) -> None:
    """In bf16 two logits are often equal to the last bit: a row count that shows in the bits flips tokens."""
    settings = ("--dtype", "bf16", "--quant", *quant, "--deterministic", "-q")
    first, second = (answer(checkpoint("qwen3_moe"), limits, *settings)[0] for limits in LIMITS)
    assert first == second


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "kv"),
    [("qwen3_moe", kv) for kv in ("int8", "int8/int4", "int4")]
    + [under_every_isa("gpt_oss", "int4"), ("gemma3_text", "int8"), ("deepseek_v3", "int4")],
)
def test_quantized_caches_are_exact_across_batches(
    family: str, kv: str, checkpoint: Callable[[str], Path], answer: Answer
) -> None:
    """Prompts attend over keys and values as stored, so that neither chunks nor neighbours change a code."""
    settings = ("--dtype", "fp32", "--quant", "none", "--deterministic", "-q", "--kv", kv)
    first, second = (answer(checkpoint(family), limits, *settings) for limits in LIMITS)
    assert first[0] == second[0]
    for _, told in (first, second):
        assert told["kv"]["format"] == kv
        assert len(told["plan"]["key_offsets"]) == 16


@pytest.mark.numerics
def test_a_job_that_goes_on_with_other_threads_gives_the_same_bits(
    checkpoint: Callable[..., Path],
    cli: Callable[..., int],
    rows_file: Callable[[Path, list[dict[str, Any]]], Path],
    rows_of: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of threads is not among the settings that a job is begun with: log probabilities show every bit."""
    body = {"model": "m", "max_tokens": NEW_TOKENS, "logprobs": 3}
    rows = [
        {"custom_id": f"r-{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": ids}}
        for i, ids in enumerate(prompts())
    ]
    source = rows_file(tmp_path / "in.jsonl", rows)
    model = checkpoint("gpt_oss", intermediate_size=100, vocab_size=388)
    command = ["batch", model, source, *EXACT, "--max-sequences", 3, "-o"]

    def run(out: str, num_threads: int, *options: object) -> int:
        with torch_threads(num_threads):
            monkeypatch.setenv("OMP_NUM_THREADS", str(num_threads))
            return cli(*command, tmp_path / out, *options)

    def answers_of(out: Path) -> list[Any]:
        return [row["response"]["body"]["choices"] for row in rows_of(out)]

    assert run("undisturbed.jsonl", 1) == 0
    assert all(
        len(choices[0]["logprobs"]["token_logprobs"]) > 1 for choices in answers_of(tmp_path / "undisturbed.jsonl")
    )
    assert [run("out.jsonl", 4, "--max-rows", 3), run("out.jsonl", 3, "--max-rows", 2)] == [75, 75]
    assert run("out.jsonl", 1) == 0
    assert answers_of(tmp_path / "out.jsonl") == answers_of(tmp_path / "undisturbed.jsonl")
