"""What moedge makes of a model in some cases, each asked through `moedge.LLM`.

    MOEDGE_ISA=avx2 python -m support.real.measure MODEL < CASES.json

CASES.json is a list of [options of LLM, windows, their tokens, questions]; a line of JSON is printed for each as it
ends. One process has one instruction set; `measure` starts it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.real.cases import Case
from support.real.text import ANSWER, FEW, QUESTIONS, WINDOW, WINDOWS, windows

ROOT = Path(__file__).parents[3]
# One window of so many tokens and so few questions for the interpreter of Triton's kernels, a thousand times slower,
# and a window and some questions for torch's products in bf16, which are slow where a processor has no such products.
FEW_TOKENS, FEW_QUESTIONS, SOME_QUESTIONS = 128, 4, 8


def perplexity(logprobs: Iterable[list[float]]) -> float:
    """Of tokens whose natural log probabilities are given, window by window."""
    every = [each for window in logprobs for each in window]
    return math.exp(-sum(every) / len(every))


@dataclass(frozen=True, slots=True)
class Found:
    """What a case gave: log probabilities of the tokens of each window behind its first, ids of answers, and texts."""

    logprobs: list[list[float]]
    answers: list[list[int]]
    texts: list[str]

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)

    def part(self, other: Found) -> Found:
        """What there is of it for the windows and questions of another one."""
        logprobs = [mine[: len(theirs)] for mine, theirs in zip(self.logprobs, other.logprobs, strict=False)]
        return replace(self, logprobs=logprobs, answers=self.answers[: len(other.answers)])


def ask(llm: Any, num_windows: int, length: int, num_questions: int) -> Found:
    """Perplexity and greedy answers of a loaded `moedge.LLM`."""
    from moedge import SamplingParams

    tokenizer = llm.get_tokenizer()
    texts = windows(tokenizer.encode, num_windows, length)
    scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    logprobs = [
        [each[token].logprob for each, token in zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)]
        for one in scored
    ]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:num_questions]]
    answered = [one.outputs[0] for one in llm.chat(chats, SamplingParams(max_tokens=ANSWER), progress=False)]
    return Found(logprobs, [one.token_ids for one in answered], [one.text for one in answered])


def size(case: Case, num_windows: int, num_questions: int) -> tuple[int, int, int]:
    """Windows, their tokens, and questions of a case."""
    if case.attention == "triton":
        return 1, FEW_TOKENS, FEW_QUESTIONS
    if case.isa == "none" and case.dtype == "bf16":
        return 1, WINDOW, SOME_QUESTIONS
    if case.deterministic and case.kv == "native":
        # In float32 nothing is rounded that a mean over more tokens would have to even out.
        return 1, WINDOW, num_questions
    return num_windows, WINDOW, num_questions


def measure(
    model: Path, cases: Iterable[Case], num_windows: int = WINDOWS, num_questions: int = FEW
) -> Iterator[tuple[Case, Found | str]]:
    """What each case gives, or the error it ends with, as soon as it is there. One process an instruction set."""
    by_isa: dict[str, list[Case]] = {}
    for case in cases:
        by_isa.setdefault(case.isa, []).append(case)
    for isa, left in by_isa.items():
        asked = [[case.options, *size(case, num_windows, num_questions)] for case in left]
        environment = os.environ | {
            "MOEDGE_ISA": isa,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
        }
        command = [sys.executable, "-m", "support.real.measure", str(model)]
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                env=environment, cwd=ROOT,
            ) as process,
        ):  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin as given:
                json.dump(asked, given)
            for text in process.stdout:
                line = json.loads(text)
                yield left.pop(0), line if isinstance(line, str) else Found(*line)
            code = process.wait()
            said.seek(0)
            why = said.read()[-2000:]
        for case in left:
            yield case, f"exit code {code}: {why}"


def main(model: str, asked: Sequence[Sequence[Any]]) -> None:
    # Whatever else prints does so on stderr.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from moedge import LLM
    from moedge.offload.errors import MoedgeError
    from moedge.quant.matmul.matmul import GEMV_MAX_ROWS
    from moedge.runtime.loading import engine_loader

    # A measured time decides up to how many rows kernels read codes: here they always do, or results would differ.
    engine_loader.measure_gemv_max_rows = lambda *_: GEMV_MAX_ROWS  # type: ignore[assignment]
    for options, num_windows, length, num_questions in asked:
        line: Any
        try:
            with LLM(
                model, ram="3GiB", gpu_mem=0, max_model_len=length + 8, rows=max(16, num_questions),
                prompt_tokens=48, output_tokens=ANSWER, **options,
            ) as llm:  # fmt: skip
                found = ask(llm, num_windows, length, num_questions)
                line = [found.logprobs, found.answers, found.texts]
        except MoedgeError as error:
            line = f"{type(error).__name__}: {error}"
        print(json.dumps(line), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
