"""`LLM` in this process: tokens, texts and logprobs, what is refused before anything runs, and what closing frees."""

import json
import math
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge import LLM, MoedgeError, RequestOutput, SamplingParams, run_batch
from moedge.runtime.jobs.session import JobSession
from moedge.runtime.plan.placement import Workload
from moedge.runtime.settings.errors import BadArgument, DoesNotFit, EngineUnavailable, PromptError, SettingError
from moedge.runtime.settings.options import LLMOptions

# Whatever else the machine is doing: "auto" is what is free.
EXACT: LLMOptions = {
    "ram": "3GiB", "gpu_mem": 0, "dtype": "fp32", "quant": "none", "kv": "fp32", "deterministic": True,
}  # fmt: skip
LENGTHS = (3, 40, 17, 70, 1)
GREEDY = SamplingParams(max_tokens=12)


def token_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 380, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, rows=20, prompt_tokens=40, output_tokens=20, max_model_len=200, **EXACT) as opened:
        yield opened


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_tokens_are_those_of_transformers_in_the_order_of_the_prompts(
    model: Path, llm: LLM, stock: Callable[[Path], Any]
) -> None:
    outputs = llm.generate(token_prompts(), GREEDY, progress=False)
    expected = [
        stock(model).generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :]
        for ids in token_prompts()
    ]
    assert tokens(outputs) == [each.tolist() for each in expected]
    assert [output.prompt_token_ids for output in outputs] == token_prompts()
    assert {output.prompt for output in outputs} == {None}
    one_by_one = [llm.generate(ids, GREEDY, progress=False)[0] for ids in token_prompts()]
    assert one_by_one == outputs


def test_a_list_and_a_file_of_the_same_prompts_get_the_same_samples(model: Path, llm: LLM, tmp_path: Path) -> None:
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    common = {"max_tokens": 8, "temperature": 0.9, "n": 2, "return_token_ids": True}
    rows.write_text("".join(json.dumps({"prompt": ids, **common}) + "\n" for ids in token_prompts()))
    summary = run_batch(
        model, rows, out, progress=False, ram="3GiB", dtype="fp32", quant="none", kv="fp32", deterministic=True
    )
    assert (summary.rows.ok, summary.rows.failed) == (len(LENGTHS), 0)
    answers = [json.loads(line)["choices"] for line in out.read_text().splitlines()]
    outputs = llm.generate(token_prompts(), SamplingParams(max_tokens=8, temperature=0.9, n=2), progress=False)
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [
        [choice["token_ids"] for choice in choices] for choices in answers
    ]


def test_files_are_answered_on_the_engine_that_is_loaded(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("load_engine", "open_memory", "store_for"):
        again = f"moedge.runtime.jobs.lifecycle.{name}"
        monkeypatch.setattr(again, lambda *_, **__: pytest.fail("something is loaded again"))
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    common = {"max_tokens": 12, "return_token_ids": True}
    lines = [{"prompt": ids, **common} for ids in token_prompts()] + [{"prompt": "Hello", "max_tokens": 300}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stopped = llm.run_batch(rows, out, max_rows=3, progress=False)
    assert (stopped.rows.total, out.exists()) == (3, False)
    expected = tokens(llm.generate(token_prompts(), GREEDY, progress=False))
    summary = llm.run_batch(rows, out, progress=False)
    assert (summary.rows.ok, summary.rows.failed) == (len(LENGTHS), 1)
    assert summary.tokens.generated == sum(map(len, expected))
    assert (summary.seconds.load, summary.predicted.sequences is not None) == (0.0, True)
    assert summary.memory.host is not None
    assert 0 < (summary.memory.host.peak or 0) <= 3 << 30 == summary.memory.host.budget
    assert [json.loads(line)["token_ids"] for line in out.read_text().splitlines()] == expected
    [error] = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert "to generate are more than the KV cache holds (200); give the job more memory (an LLM: a larger" in str(
        error
    )
    assert llm.run_batch(rows, out, progress=False).rows.ok == len(LENGTHS), "a finished job is not run again"
    assert tokens(llm.generate(token_prompts(), GREEDY, progress=False)) == expected
    with pytest.raises(BadArgument, match="quant is not an option"):
        llm.run_batch(rows, out, quant="int8")  # type: ignore[call-arg]


def test_ctrl_c_in_a_job_leaves_the_llm_ready(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, out, why = tmp_path / "in.jsonl", tmp_path / "out.jsonl", JobSession.cancelled
    rows.write_text("".join(json.dumps({"prompt": ids, "max_tokens": 4}) + "\n" for ids in token_prompts()))

    def press(session: JobSession) -> str | None:
        os.kill(os.getpid(), signal.SIGINT)
        return why(session)

    with monkeypatch.context() as patch:
        patch.setattr(JobSession, "cancelled", press)
        with pytest.raises(KeyboardInterrupt):
            llm.run_batch(rows, out, progress=False)
    assert not out.exists()
    assert llm.run_batch(rows, out, progress=False).rows.ok == len(LENGTHS)
    with closing(llm.stream("Hello there", GREEDY)) as pieces:
        next(pieces)
        with pytest.raises(EngineUnavailable, match="another call uses this LLM"):
            llm.run_batch(rows, tmp_path / "other.jsonl")


def test_n_answers_differ_and_are_counted(llm: LLM) -> None:
    params = SamplingParams(n=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    [output] = llm.generate("Hello there", params, progress=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 5
    assert {(answer.finish_reason, len(answer.token_ids), answer.logprobs) for answer in output.outputs} == {
        ("length", 6, None)
    }
    seeded = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
    first, second = llm.generate(["Hello there"] * 2, seeded, progress=False)
    assert first.outputs == second.outputs


def test_logprobs_are_those_of_the_models_softmax(model: Path, llm: LLM, stock: Callable[[Path], Any]) -> None:
    prompt = token_prompts()[1]
    params = SamplingParams(max_tokens=5, temperature=1.0, logprobs=3, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": prompt}, params, progress=False)
    [answer] = output.outputs
    assert answer.logprobs is not None
    with torch.no_grad():
        logits = stock(model)(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.float().log_softmax(-1)
    for token_id, found, row in zip(answer.token_ids, answer.logprobs, wanted, strict=True):
        assert set(found) == {token_id, *row.topk(3).indices.tolist()}
        for each, entry in found.items():
            assert entry.logprob == pytest.approx(float(row[each]), abs=1e-3)
            assert entry.rank == int((row > row[each]).sum()) + 1
    assert answer.cumulative_logprob == pytest.approx(
        sum(float(row[token_id]) for token_id, row in zip(answer.token_ids, wanted, strict=True)), abs=5e-3
    )


def scored_prompts() -> list[list[int]]:
    """Two begin with the same three blocks, and one comes twice."""
    prompts = token_prompts()
    return [*prompts, [*prompts[3], 9, 8, 7], prompts[1]]


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_the_models_softmax(model: Path, stock: Callable[[Path], Any]) -> None:
    """In chunks, with shared beginnings, beside rows that want none, and for several answers to a prompt."""
    score, plain = SamplingParams(max_tokens=3, prompt_logprobs=2, n=2), SamplingParams(max_tokens=3)
    params = [plain if index == 1 else score for index in range(7)]
    with LLM(model, rows=20, max_model_len=120, tokens_per_pass=24, max_sequences=5, **EXACT) as llm:
        outputs = llm.generate(scored_prompts(), params, progress=False)
        again = llm.generate(scored_prompts(), params, progress=False)
    assert again == outputs, "whatever the cache still has of them"
    assert outputs[1].prompt_logprobs is None
    for output in (*outputs[:1], *outputs[2:]):
        ids = output.prompt_token_ids
        assert output.prompt_logprobs is not None
        first, *found = output.prompt_logprobs
        assert (first, len(found)) == (None, len(ids) - 1)
        with torch.no_grad():
            wanted = stock(model)(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        for token_id, by_id, row in zip(ids[1:], found, wanted, strict=True):
            assert by_id is not None
            assert set(by_id) == {token_id, *row.topk(2).indices.tolist()}
            for each, entry in by_id.items():
                assert entry.logprob == pytest.approx(float(row[each]), abs=1e-4)
    with pytest.raises(BadArgument, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)


def test_a_prompt_is_scored_from_the_position_that_is_asked_for(llm: LLM) -> None:
    """With positions before the first token, within the prompt, and behind it."""
    prompt = token_prompts()[3]
    starts = (0, 1, 41, 69, 70, 500)
    params = [SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_start_len=start) for start in starts]
    whole, *others = (each.prompt_logprobs for each in llm.generate([prompt] * 6, params, progress=False))
    assert whole is not None
    assert others[0] == whole
    for start, found in zip(starts[1:], others, strict=True):
        assert found == [*[None] * min(start, 70), *whole[start:]]


def likelihood(model: Any, ids: list[int], start: int) -> float:
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
    return float(sum(row[token] for row, token in zip(rows, ids[start:], strict=True)))


def test_choices_are_as_likely_as_in_transformers(model: Path, llm: LLM, stock: Callable[[Path], Any]) -> None:
    """Behind a text, a chat and token ids; one choice begins as another one, and one is longer."""
    text, ids = "The invoice says", token_prompts()[3]
    chat = [{"role": "user", "content": "Is it a letter, or an invoice?"}]
    choices = [" letter", " letters of", " invoice and more"]
    scores = llm.score([text, chat, ids], choices, progress=False)
    tokenizer, reference = llm.get_tokenizer(), stock(model)
    wanted = []
    for choice in choices:
        whole, more = tokenizer.encode(text + choice), tokenizer.encode_verbatim(choice, add_special_tokens=False)
        same = [one == other for one, other in zip(tokenizer.encode(text), whole, strict=False)]
        start = [*same, False].index(False)
        behind = [(begun, len(begun)) for begun in (tokenizer.encode_chat(chat), ids)]
        wanted.append([(whole, start), *(([*begun, *more], length) for begun, length in behind)])
    for found, cases in zip(scores, zip(*wanted, strict=True), strict=True):
        assert found.choices == tuple(choices)
        assert found.logprobs == pytest.approx([likelihood(reference, *case) for case in cases], abs=1e-3)
        shares = torch.tensor(found.logprobs, dtype=torch.float64).softmax(0).tolist()
        assert found.probabilities == pytest.approx(shares)
        assert found.best == choices[shares.index(max(shares))]


def test_a_prompt_is_computed_once_for_all_of_its_choices(llm: LLM) -> None:
    prompt = [token_prompts()[3] + token_prompts()[1]]
    llm.score(prompt, [" a", " b", " c", " d", " e", " f"], progress=False)
    computed = llm._engine.engine.engine.metrics.prompt_tokens
    assert computed < 2.2 * len(prompt[0]), "but for the last block of the cache, which is not shared"


@pytest.mark.parametrize("choices", [[], ["yes", ""], "yes", ["yes", 3], ["yes", "yes"]])
def test_what_is_no_list_of_choices_is_refused(choices: Any, llm: LLM) -> None:
    with pytest.raises(BadArgument, match="choices must be"):
        llm.score(["Is it?"], choices)


def test_a_prompt_that_is_too_long_with_a_choice_is_named(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"prompts\[1\]: 2\d\d prompt tokens"):
        llm.score(["Short", [7] * 198], [" many words indeed"], progress=False)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    [free] = llm.generate("Hello there", SamplingParams(max_tokens=12, ignore_eos=True), progress=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    [output] = llm.generate("Hello there", SamplingParams(max_tokens=12, ignore_eos=True, stop=stop), progress=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text[: text.index(stop)], "stop")
    assert free.outputs[0].finish_reason == "length"
    last = free.outputs[0].token_ids[3]
    [output] = llm.generate(
        "Hello there", SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[last]), progress=False
    )
    assert output.outputs[0].token_ids[-1] == last


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    question = [{"role": "user", "content": "Name three rivers."}]
    [asked] = llm.chat(question, GREEDY, progress=False)
    assert asked.prompt is not None
    assert "Name three rivers." in asked.prompt != "Name three rivers."
    both = llm.chat([question, [{"role": "user", "content": "Hi"}]], GREEDY, progress=False)
    assert both[0] == asked
    assert "".join(llm.stream(question, GREEDY)) == asked.outputs[0].text
    [plain] = llm.generate("Name three rivers.", GREEDY, progress=False)
    assert plain.prompt_token_ids != asked.prompt_token_ids
    assert plain.prompt == "Name three rivers."


def test_an_answer_is_held_to_a_schema(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    [output] = llm.generate("x", SamplingParams(max_tokens=60, response_format=form), progress=False)
    assert json.loads(output.outputs[0].text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["fine", ""], r"prompts\[1\]: prompt must be not empty"),
        (["fine", [9999]], r"prompts\[1\]: token id 9999"),
        (["fine", 3.5], r"prompts\[1\] must be text or a list of token ids; found 3\.5"),
        (["fine", {"text": "x"}], r"prompts\[1\]: a dict must have prompt or prompt_token_ids; found text"),
        (["fine", [7] * 190], r"prompts\[1\]: 190 .* max_model_len is 200; give the LLM max_model_len=202"),
        (["fine", [7] * 600], r"prompts\[1\]: 600 prompt tokens .* the context has 512"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_before_any_has(llm: LLM, prompts: list[Any], message: str) -> None:
    llm.generate("fine", GREEDY, progress=False)
    passes = llm._engine.engine.engine.metrics.passes
    with pytest.raises(PromptError, match=message):
        llm.generate(prompts, GREEDY, progress=False)
    assert llm._engine.engine.engine.metrics.passes == passes > 0


def test_other_arguments_that_make_no_sense_are_refused(model: Path, llm: LLM) -> None:
    with pytest.raises(BadArgument, match="one for each of 2 prompts; found 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(BadArgument, match="n must be 1"):
        llm.stream("a", SamplingParams(n=2))
    with pytest.raises(PromptError, match=r"conversations\[0\]: messages\[0\]\.role must be one of"):
        llm.chat([{"role": "robot", "content": "x"}])
    with pytest.raises(BadArgument, match="did you mean ram"):
        LLM(model, rams="1GiB")  # type: ignore[call-arg]
    with pytest.raises(
        BadArgument, match="quant must be one of auto, none, int8, int4, nf4, mxfp4, kept; found 'int3'"
    ):
        LLM(model, quant="int3")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="ram must be a number of bytes"):
        LLM(model, ram=1.5)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="max_model_len 9,999 is more than the context of 512"):
        LLM(model, max_model_len=9999)
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, found -1"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1"),
        ({"max_tokens": "many"}, "max_tokens must be a whole number, found 'many'"),
        ({"n": 129}, "n must be at least 1 and at most 128"),
        ({"stop": ["a", ""]}, "stop must be at most 16 strings, none of them empty"),
        ({"logprobs": 21}, "logprobs must be at least 0 and at most 20"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of text, json_object, json_schema"),
    ],
)
def test_sampling_params_say_what_was_found_and_wanted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        SamplingParams(**values)
    assert isinstance(raised.value, MoedgeError)


def test_a_budget_that_is_too_small_is_the_error_of_a_job(model: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"the smallest that works is --ram \d+MiB"):
        LLM(model, ram="100MiB", gpu_mem=0)


def test_where_memory_is_short_longer_prompts_get_the_budget_that_they_take(model: Path, llm: LLM) -> None:
    """As a plan for rows of 10,000 tokens would be that holds no more than 200."""
    plan, request = llm.plan, llm._engine.chosen.request
    before = plan.kv_tokens, request.workload
    object.__setattr__(plan, "kv_tokens", 200)
    object.__setattr__(request, "workload", Workload(1, 10_000, 10))
    try:
        with pytest.raises(PromptError, match=r'200 fit into the memory .* or give the LLM ram="\d+MiB" for 10,000'):
            llm.generate([[7] * 250], GREEDY, progress=False)
    finally:
        object.__setattr__(plan, "kv_tokens", before[0])
        object.__setattr__(request, "workload", before[1])


def test_leaving_the_context_frees_every_arena(model: Path) -> None:
    with LLM(model, rows=4, max_model_len=64, **EXACT) as opened:
        engine = opened._engine.engine
        arenas = [
            weakref.ref(each)
            for each in (engine.streamed.memory, engine.parking, engine.model, *engine.engine.scheduler.cache.pools)
        ]
        tensors = [weakref.ref(tensor) for tensor in engine.streamed.memory.held.values() if hasattr(tensor, "shape")]
        opened.generate("Hello", GREEDY, progress=False)
        del engine
    assert [each() for each in (*arenas, *tensors)] == [None] * len(arenas + tensors)
    opened.close()
    with pytest.raises(EngineUnavailable, match="is closed"):
        opened.generate("x")


def test_a_call_that_breaks_off_between_passes_leaves_the_llm_ready(llm: LLM) -> None:
    [before] = llm.generate("Hello there", GREEDY, progress=False)
    stream = llm.stream("Hello there", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(EngineUnavailable, match="another call uses this LLM"):
        llm.generate("x", GREEDY, progress=False)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    cache = llm._engine.engine.engine.scheduler.cache
    assert [group.allocator.num_available for group in cache.groups] == list(llm.plan.kv_blocks)
    assert llm.generate("Hello there", GREEDY, progress=False) == [before]


def test_a_stream_ends_with_its_llm(model: Path) -> None:
    with LLM(model, rows=2, max_model_len=64, **EXACT) as opened:
        stream = opened.stream("Hello", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
    with pytest.raises(EngineUnavailable, match="is closed"):
        list(stream)


def interrupting(llm: LLM, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The third pass gets Ctrl-C this many times; returns the list that counts the passes that were completed."""
    retry, passes = llm._engine.engine.engine.split_retry, []
    run = retry.run

    def interrupted(batch: Any) -> Any:
        if len(passes) == 2:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        samples = run(batch)
        passes.append(1)
        return samples

    monkeypatch.setattr(retry, "run", interrupted)
    return passes


def test_ctrl_c_ends_a_call_after_the_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        passes = interrupting(llm, patch, times=1)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", SamplingParams(max_tokens=50, ignore_eos=True), progress=False)
        assert len(passes) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate("Hello", GREEDY, progress=False)) == 1


def test_ctrl_c_twice_closes_the_llm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, rows=2, max_model_len=64, **EXACT) as opened:
        passes = interrupting(opened, monkeypatch, times=2)
        with pytest.raises(KeyboardInterrupt):
            opened.generate("Hello", SamplingParams(max_tokens=50, ignore_eos=True), progress=False)
        assert len(passes) == 2
        with pytest.raises(EngineUnavailable, match="is closed"):
            opened.generate("Hello")


def test_the_progress_bar_is_on_stderr_alone(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Hello"] * 3, GREEDY)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "3/3 prompts" in shown.err
    llm.generate(["Hello"] * 3, GREEDY, progress=False)
    assert capfd.readouterr() == ("", "")


def test_an_answer_that_has_no_next_token_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm._engine.engine.engine.model
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, batch: forward(self, batch) * math.nan)
    [output] = llm.generate([[7, 8, 9, 10, 11]], GREEDY, progress=False)
    assert output.outputs[0].finish_reason == "error"
    assert "not finite" in (output.outputs[0].error or "")
