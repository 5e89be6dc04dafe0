"""Several callers of one model: threads wait for each other, tasks run together, and each has the tokens that it would
have alone (`api/llm.py`).
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from moedge import LLM, AsyncLLM, SamplingParams
from moedge.runtime.settings.errors import EngineUnavailable, PromptError

EXACT: dict[str, Any] = {
    "ram": "3GiB", "gpu_mem": 0, "dtype": "fp32", "quant": "none", "kv": "fp32", "deterministic": True,
}  # fmt: skip
PROMPTS = [f"{'The river ' * number}ends in" for number in range(1, 9)]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """The tokens of each prompt in a call of its own."""
    with LLM(model, rows=4, max_model_len=128, **EXACT) as llm:
        return [list(llm.generate(each, SAMPLED, progress=False)[0].outputs[0].token_ids) for each in PROMPTS]


def test_threads_wait_for_each_other(model: Path, alone: list[list[int]]) -> None:
    found: dict[int, list[int]] = {}
    with LLM(model, rows=4, max_model_len=128, **EXACT) as llm:

        def call(number: int) -> None:
            (output,) = llm.generate(PROMPTS[number], SAMPLED, progress=False)
            found[number] = list(output.outputs[0].token_ids)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(len(PROMPTS))]
        with closing(llm.stream("Hello", SamplingParams(max_tokens=20, ignore_eos=True))) as pieces:
            next(pieces)
            for each in threads:
                each.start()
            threads[0].join(0.3)
            assert not found, "the stream has the model"
        for each in threads:
            each.join()
    assert [found[number] for number in range(len(PROMPTS))] == alone


def test_who_waits_for_a_model_that_is_closed_is_told(model: Path) -> None:
    errors: list[BaseException] = []
    llm = LLM(model, rows=4, max_model_len=128, **EXACT)

    def call() -> None:
        try:
            llm.generate("Hello", SAMPLED, progress=False)
        except EngineUnavailable as error:
            errors.append(error)

    pieces = llm.stream("Hello", SamplingParams(max_tokens=20, ignore_eos=True))
    next(pieces)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.2)
    llm.close()
    with pytest.raises(EngineUnavailable):
        list(pieces)
    thread.join()
    assert "is closed" in str(errors[0])


def test_tasks_run_together_and_have_the_tokens_that_each_has_alone(model: Path, alone: list[list[int]]) -> None:
    async def ask() -> tuple[list[list[int]], int]:
        async with AsyncLLM(model, rows=4, max_model_len=128, **EXACT) as llm:
            outputs = await asyncio.gather(*(llm.generate(each, SAMPLED) for each in PROMPTS))
            passes = llm._llm._engine.engine.engine.metrics.passes
            with pytest.raises(PromptError, match="prompt"):
                await llm.generate("x " * 500, SAMPLED)
            (again,) = (await llm.generate(PROMPTS[0], SAMPLED)).outputs
            assert list(again.token_ids) == alone[0]
        with pytest.raises(EngineUnavailable, match="closed"):
            await llm.generate("x")
        return [list(each.outputs[0].token_ids) for each in outputs], passes

    found, passes = asyncio.run(ask())
    assert found == alone
    assert passes < 12 * len(PROMPTS) / 2, "they share passes"


def test_a_task_that_is_cancelled_leaves_the_passes(model: Path, alone: list[list[int]]) -> None:
    async def ask() -> None:
        async with AsyncLLM(model, rows=4, max_model_len=128, **EXACT) as llm:
            long = SamplingParams(max_tokens=100, ignore_eos=True)
            task = asyncio.create_task(llm.generate("Hello", long))
            beside = asyncio.create_task(llm.generate(PROMPTS[0], SAMPLED))
            scheduler = llm._llm._engine.engine.engine.scheduler
            while not scheduler.running:
                await asyncio.sleep(0.001)
            task.cancel()
            assert list((await beside).outputs[0].token_ids) == alone[0]
            with pytest.raises(asyncio.CancelledError):
                await task
            while scheduler.running:
                await asyncio.sleep(0.001)
            assert not llm._running
            assert scheduler.cache.groups[0].allocator.num_available == llm._llm.plan.kv_blocks[0]

    asyncio.run(ask())


def test_what_waits_when_it_is_closed_fails(model: Path) -> None:
    async def ask() -> None:
        llm = AsyncLLM(model, rows=2, max_model_len=128, **EXACT)
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        tasks = [asyncio.create_task(llm.generate("Hello", long)) for _ in range(5)]
        await asyncio.sleep(0.01)
        await llm.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, EngineUnavailable) for each in found)

    asyncio.run(ask())


def test_a_request_that_is_taken_while_it_is_closed_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        llm = AsyncLLM(model, rows=2, max_model_len=128, **EXACT)
        generating = llm._llm._generating

        def closed_meanwhile() -> Any:
            llm._ended = True
            return generating()

        monkeypatch.setattr(llm._llm, "_generating", closed_meanwhile)
        with pytest.raises(EngineUnavailable, match="closed"):
            await asyncio.wait_for(llm.generate("Hello"), 60)
        await llm.close()

    asyncio.run(ask())


def test_an_error_within_a_pass_reaches_everyone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with AsyncLLM(model, rows=4, max_model_len=128, **EXACT) as llm:
            engine = llm._llm._engine.engine.engine

            def broken() -> None:
                engine.in_pass = True
                raise RuntimeError("a broken pass")

            monkeypatch.setattr(engine, "step", broken)
            found = await asyncio.gather(*(llm.generate(each, SAMPLED) for each in PROMPTS), return_exceptions=True)
            assert all(isinstance(each, RuntimeError | EngineUnavailable) for each in found)
            with pytest.raises(EngineUnavailable):
                await llm.generate("x")

    asyncio.run(ask())
