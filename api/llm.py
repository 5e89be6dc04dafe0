"""`LLM`: a model in this process that continues prompts and answers chats, under budgets."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar, Unpack, cast

from .batch import BatchProgress, batch_request, progress_bar, run_job
from .completion import CompletionOutput, RequestOutput, SamplingParams, logprobs_by_id
from .generation import Generation, Request
from .offload.closing import Closing
from .offload.errors import MoedgeError
from .offload.memory import Heap
from .runtime.jobs.encode import RowEncoder
from .runtime.jobs.lifecycle import OpenModel, refuse_over_budget
from .runtime.jobs.order import SpeedOrder
from .runtime.jobs.run import OpenRow, completion_of
from .runtime.jobs.summary import RunSummary
from .runtime.loading.engine_loader import LoadedModel
from .runtime.plan.memory_ledger import MemoryLedger
from .runtime.plan.placement import Plan
from .runtime.plan.planner import SearchSpace
from .runtime.rows.answer_formats import ChoiceScores
from .runtime.rows.fields import choices_setting
from .runtime.rows.row import Defaults, Endpoint, InvalidRow, RowFailure
from .runtime.rows.row_formats import RowBuilder, RowPosition, line_id
from .runtime.sampling.model_defaults import model_defaults
from .runtime.sampling.params import FinishReason
from .runtime.settings.errors import BadArgument, EngineUnavailable, PromptError, shown
from .runtime.settings.option import check, with_options
from .runtime.settings.options import BatchOptions, JobOptions, LLMOptions
from .runtime.text.tokenizer import Tokenizer

T = TypeVar("T")
TokenIds = Items[int]
Prompt = str | TokenIds | Mapping[str, Any]
"""Text, token ids, or vLLM's forms of both: `{"prompt": ...}`, `{"prompt_token_ids": ...}`."""
Conversation = Items[Mapping[str, Any]]
"""Messages, as in OpenAI's API: `[{"role": "user", "content": "Name three rivers."}]`."""
Params = SamplingParams | Items[SamplingParams] | None


class LLM(Closing):
    """A model that is planned and loaded once, within its budgets; weights that do not fit are streamed.

    `model` is a checkpoint folder, prepared weights, or a hub id; docs/python.md lists the options (`LLMOptions`).

        with LLM("Qwen/Qwen3-30B-A3B", ram="24GiB") as llm:
            outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=100))

    Leaving the context, or `close`, frees every tier. One call runs at a time; those of other threads wait for it.
    `AsyncLLM` runs requests of asyncio together.

    Raises BadArgument for options that are none, ModelNotFound, UnsupportedModel, and DoesNotFit, SettingError and
    MemoryGaveOut as a job does; all of them are MoedgeErrors.
    """

    @with_options(LLMOptions)
    def __init__(self, model: str | Path, **options: Unpack[LLMOptions]) -> None:
        check(options, LLMOptions)
        self._options = options
        self._builder = RowBuilder(Defaults(seed=options.get("seed", 0)))
        self._opened = OpenModel(str(model))
        # The model, as it was asked for.
        self.name = str(model)
        self._loaded: LoadedModel | None = None
        self._turn, self._caller = threading.Lock(), 0
        try:
            source = self._opened.source
            self._default_params = SamplingParams(**model_defaults(source.folder).values)
            self._encoder = RowEncoder(self._opened.tokenizer, source.shape.vocab, source.shape.context)
            self._heap: Heap
            self._loaded, self._heap = self._opened.load_for_prompts(options)
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        """Formats, sizes and budgets that the model was loaded by, less what memory has taken since."""
        return self._engine.policy.plan

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and answer: what was asked for, or less where memory is short."""
        return self._engine.longest

    def get_tokenizer(self) -> Tokenizer:
        """What turns texts into token ids and back: `encode`, `encode_chat`, `decode`."""
        return self._opened.tokenizer

    @property
    def memory(self) -> MemoryLedger:
        """Planned and allocated bytes of every arena by tier, each tier's budget, and its peak since loading began."""
        return self._engine.engine.ledger.measure()

    def generate(
        self, prompts: Prompt | Items[Prompt], sampling_params: Params = None, *, progress: bool = True
    ) -> list[RequestOutput]:
        """Continues one prompt or any number of them, and returns their outputs in the order of the prompts.

        A list of ints is one prompt of token ids. `sampling_params` are for all prompts, or one for each; without any,
        the model's generation_config.json sets temperature, filters and repetition penalty, as in vLLM. Prompt i
        draws the random numbers that line i + 1 of an input file would. `progress` shows a bar on stderr.

        Raises PromptError, naming its index, for a prompt that cannot run, before any has; OverBudget, whose `result`
        has the outputs, where more memory was used than the budget. After Ctrl-C the current pass ends and the LLM is
        ready for other calls; a second Ctrl-C, or an error within a pass, closes it.
        """
        bodies = [_prompt_body(prompt, f"prompts[{index}]") for index, prompt in enumerate(_several(prompts))]
        return self._run(bodies, Endpoint.COMPLETION, sampling_params, "prompts", progress)

    def chat(
        self,
        messages: Conversation | Items[Conversation],
        sampling_params: Params = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The model's next message in one conversation, or in each of several; otherwise as `generate`.

        Messages go through the model's chat template. Reasoning of a thinking model is not in the text of an answer
        but in its `reasoning_content`. Raises PromptError for a model without a chat template.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        bodies = [{"messages": list(cast(Conversation, each))} for each in several]
        return self._run(bodies, Endpoint.CHAT, sampling_params, "conversations", progress)

    def answer(
        self, prompts: Items[Prompt | Conversation], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """As `generate` and `chat`, for a column of rows: what cannot run has no outputs and an `error`."""
        params = sampling_params or self._default_params
        found: list[Request | RequestOutput] = []
        with self._generating() as generation:
            for index, prompt in enumerate(prompts):
                try:
                    found.append(self._request(*_body_of_either(prompt, "prompt"), params, index, "prompt"))
                except PromptError as error:
                    found.append(RequestOutput(None, [], [], error=str(error)))
            runnable = [each for each in found if isinstance(each, Request)]
            outputs = iter(self._answers(generation, runnable, [params] * len(found), progress=False))
        return [next(outputs) if isinstance(each, Request) else each for each in found]

    def score(
        self, prompts: Items[Prompt | Conversation], choices: Items[str], *, progress: bool = True
    ) -> list[ChoiceScores]:
        """How likely each of `choices` is as the answer to each prompt, or as the next message of each conversation.

        To classify with a confidence: nothing is generated, and the tokens that the choices of a prompt begin with
        alike are computed once. A text and a choice are tokenized together, so a choice that is to follow a word begins
        with a space; to a conversation, and to token ids, the tokens of the choice are appended.

        Raises BadArgument for choices that are none, and what `generate` raises.
        """
        if isinstance(choices, str):
            raise BadArgument(f"choices must be a list of texts; found {shown(choices)}")
        scored, params = list(choices_setting(choices)), SamplingParams(max_tokens=1)
        requests: list[Request] = []
        with self._generating() as generation:
            for index, prompt in enumerate(prompts):
                where = f"prompts[{index}]"
                body = {**_body_of_either(prompt, where)[0], "choices": scored}
                requests.append(self._request(body, Endpoint.SHORT, params, index, where))
            return self._finished(generation, requests, _scores, progress)

    def stream(self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt, or to one conversation, in pieces of text as it is generated.

        Pieces never change, and are the answer together; to a conversation a thinking model's reasoning and an empty
        line come first. The LLM is in use until the iterator ends or is closed.
        Raises as `generate`; `n` must be 1.
        """
        params = sampling_params or self._default_params
        if params.n != 1:
            raise BadArgument(f"n must be 1 for a stream of text; found {params.n}")
        with self._in_use_by_one_call() as loaded:
            request = self._request(*_body_of_either(prompt, "prompt"), params, 0, "prompt")
        return self._stream(loaded, request)

    @with_options(JobOptions)
    def run_batch(
        self, input_file: str | Path, output: str | Path, *, progress: bool = True, **options: Unpack[JobOptions]
    ) -> RunSummary:
        """Answers a file of prompts on this engine: the job of `run_batch` and `moedge batch`, without loading again.

        Rows, journal, output files and options (`JobOptions`) are those of `run_batch`; each resumes what another has
        begun, if the model and the formats that this LLM was loaded with are those of the job. A row that could become
        longer than `max_model_len` is a failed row. The bytes of `memory` in the summary are those since loading.

        Raises what `run_batch` raises, EngineUnavailable, and JobMismatch where this LLM would answer in another way
        than the job was begun. An error or a stop between two passes leaves the LLM ready for other calls.
        """
        check(options, JobOptions)
        shared = {name: value for name, value in self._options.items() if name in BatchOptions.__annotations__}
        request = batch_request(self.name, input_file, output, **cast(BatchOptions, {**shared, **options}))
        with self._in_use_by_one_call() as loaded:
            ended = run_job(request, BatchProgress(progress), loaded)
        refuse_over_budget(ended.over_budget, ended.summary)
        return ended.summary

    def close(self) -> None:
        """Frees memory on every tier and ends all processes and threads. Closing twice does nothing."""
        self._loaded = None
        self._opened.close()

    @property
    def _engine(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineUnavailable("this LLM is closed, by `close` or by an error within a pass; make another one")
        return self._loaded

    def _run(
        self, bodies: list[dict[str, Any]], endpoint: Endpoint, sampling_params: Params, what: str, progress: bool
    ) -> list[RequestOutput]:
        params = self._params_of_each(sampling_params, len(bodies))
        with self._generating() as generation:
            requests = [
                self._request(body, endpoint, each, index, f"{what}[{index}]")
                for index, (body, each) in enumerate(zip(bodies, params, strict=True))
            ]
            return self._answers(generation, requests, params, progress)

    def _answers(
        self, generation: Generation, requests: list[Request], params: Items[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        """Those of the requests, in their order; a request's row has the index of its `params`."""

        def output(request: Request, opened: OpenRow) -> RequestOutput:
            return self._output(request, opened, params[opened.row.index])

        return self._finished(generation, requests, output, progress)

    def _finished(
        self, generation: Generation, requests: list[Request], result: Callable[[Request, OpenRow], T], progress: bool
    ) -> list[T]:
        """What `result` makes of the requests, in their order."""
        loaded, outputs = self._engine, [cast(T, None)] * len(requests)
        numbers = {request.row.index: number for number, request in enumerate(requests)}
        mixture = self._opened.source.shape.num_experts > 0
        waiting = iter(_fastest_order(requests, mixture))
        loaded.engine.start_counting()
        with progress_bar(len(requests), progress and bool(requests)) as advance:
            for finished in generation.passes(lambda: next(waiting, None)):
                for opened in finished:
                    number = numbers[opened.row.index]
                    outputs[number] = result(requests[number], opened)
                self._heap.after_pass()
                advance(len(finished), loaded.engine.engine.metrics)
        refuse_over_budget(loaded.engine.ledger.measure().over_budget, outputs)
        return outputs

    def _stream(self, loaded: LoadedModel, request: Request) -> Iterator[str]:
        opened = OpenRow.start(request.row, request.choices, self._encoder)
        with self._generating() as generation:
            loaded.engine.start_counting()
            for piece in generation.text(opened.sequences[0], opened.texts[0]):
                yield piece
                # It may have been closed meanwhile.
                loaded = self._engine
        if opened.sequences[0].finish_reason is FinishReason.ERROR:
            raise PromptError(opened.sequences[0].error)
        refuse_over_budget(loaded.engine.ledger.measure().over_budget, opened.texts[0].text)

    def _params_of_each(self, params: Params, count: int) -> Items[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self._default_params] * count
        if len(params) != count:
            raise BadArgument(
                f"sampling_params must be one, or one for each of {count:,} prompts; found {len(params):,}"
            )
        return params

    @contextmanager
    def _generating(self) -> Iterator[Generation]:
        with self._in_use_by_one_call() as loaded:
            yield Generation(loaded.engine.engine, self._encoder)

    @contextmanager
    def _in_use_by_one_call(self) -> Iterator[LoadedModel]:
        """Waits for calls of other threads.

        What breaks off between two passes leaves the engine empty and ready; within a pass, the LLM is closed.
        """
        if self._caller == threading.get_ident():
            raise EngineUnavailable("another call uses this LLM; read its stream to the end, or close it")
        with self._turn:
            loaded = self._engine
            engine, self._caller = loaded.engine.engine, threading.get_ident()
            try:
                yield loaded
            finally:
                self._caller = 0
                if engine.in_pass:
                    self.close()
                else:
                    # A job that a limit stopped leaves sequences behind.
                    engine.scheduler.abort()

    def _request(
        self, body: Mapping[str, Any], endpoint: Endpoint, params: SamplingParams, index: int, where: str
    ) -> Request:
        """A prompt, checked and tokenized. Raises PromptError, which names it by `where`, if it cannot run."""
        body = {**params.body(endpoint), **body}
        try:
            row = self._builder.build(body, endpoint, RowPosition(index, index + 1, line_id(index + 1)))
        except InvalidRow as error:
            raise PromptError(f"{where}: {error}") from None
        choices = self._encoder.encode(row)
        if isinstance(choices, RowFailure):
            raise PromptError(f"{where}: {choices.message}")
        longest = max(len(token_ids) for token_ids, _ in choices)
        if longest + row.params.max_tokens > self.max_model_len:
            raise PromptError(f"{where}: {self._too_long(longest, row.params.max_tokens)}")
        text = body.get("prompt")
        if endpoint is Endpoint.CHAT:
            text = self._opened.tokenizer.decode(choices[0][0], skip_special_tokens=False)
        return Request(row, choices, text if isinstance(text, str) else None)

    def _too_long(self, num_prompt: int, max_tokens: int) -> str:
        request, longest = self._engine.chosen.request, num_prompt + max_tokens
        found = f"{num_prompt:,} prompt tokens and {max_tokens:,} to generate are {longest:,}"
        if self.max_model_len < request.workload.longest:
            option, size = SearchSpace(request).for_every_row.removeprefix("--").split()
            return (
                f"{found}, and {self.max_model_len:,} fit into the memory that was granted; lower max_tokens, or give "
                f'the LLM {option.replace("-", "_")}="{size}" for {request.workload.longest:,}'
            )
        return f"{found}, and max_model_len is {self.max_model_len:,}; give the LLM max_model_len={longest}"

    def _output(self, request: Request, opened: OpenRow, params: SamplingParams) -> RequestOutput:
        token_text, outputs = self._opened.tokenizer.token_text, []
        for index, (sequence, text) in enumerate(zip(opened.sequences, opened.texts, strict=True)):
            found, answer = None, completion_of(request.row, sequence, text)
            if params.logprobs is not None:
                found = logprobs_by_id(sequence.logprobs, params.logprobs, token_text)
            outputs.append(
                CompletionOutput(
                    index,
                    answer.text,
                    sequence.output_ids,
                    str(answer.finish_reason),
                    found,
                    sequence.error or None,
                    answer.reasoning,
                )
            )
        scores = opened.sequences[0].prompt_logprobs
        if params.prompt_logprobs is None or scores is None:
            return RequestOutput(request.prompt, request.choices[0][0], outputs)
        scored = logprobs_by_id(scores.tokens, params.prompt_logprobs, token_text)
        before = [None] * min(scores.start, len(request.choices[0][0]))
        return RequestOutput(request.prompt, request.choices[0][0], outputs, [*before, *scored])


_CLOSED = "this AsyncLLM is closed; make another one"


class AsyncLLM:
    """An `LLM` for asyncio: a request joins the passes that run as soon as it comes, and its answer is awaited.

        async with AsyncLLM("Qwen/Qwen3-30B-A3B", ram="24GiB") as llm:
            outputs = await asyncio.gather(*(llm.chat(each) for each in conversations))

    Loading, options and errors are those of `LLM`; each answer is that of a call of `LLM` with this prompt alone, with
    `deterministic` to the token. A task that is cancelled takes its request out of the passes.
    """

    @with_options(LLMOptions)
    def __init__(self, model: str | Path, **options: Unpack[LLMOptions]) -> None:
        self._llm = LLM(model, **options)
        self._arrived: SimpleQueue[_Asked | None] = SimpleQueue()
        self._running: dict[int, tuple[_Asked, Request]] = {}
        self._changing, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._work, name="AsyncLLM", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Continues one prompt. Raises PromptError, OverBudget, and EngineUnavailable for one that is closed."""
        return await self._ask(_prompt_body(prompt, "prompt"), Endpoint.COMPLETION, sampling_params)

    async def chat(self, messages: Conversation, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The model's next message in one conversation; otherwise as `generate`."""
        return await self._ask({"messages": list(messages)}, Endpoint.CHAT, sampling_params)

    async def close(self) -> None:
        """Ends after the current pass, and frees every tier. Requests that are not answered fail."""
        with self._changing:
            self._ended = True
            self._arrived.put(None)
        await asyncio.to_thread(self._thread.join)
        self._llm.close()

    async def _ask(self, body: dict[str, Any], endpoint: Endpoint, params: SamplingParams | None) -> RequestOutput:
        asked = _Asked(body, endpoint, params or self._llm._default_params)
        with self._changing:
            if self._ended:
                raise EngineUnavailable(_CLOSED)
            self._arrived.put(asked)
        return await asyncio.wrap_future(asked.answer)

    def _work(self) -> None:
        while not self._ended and (first := self._arrived.get()) is not None:
            try:
                with self._llm._generating() as generation:
                    self._run(generation, first)
            except BaseException as error:
                self._fail_all(error, first)
        self._fail_all(EngineUnavailable(_CLOSED))

    def _run(self, generation: Generation, first: _Asked) -> None:
        """All passes from `first` on until no request is left."""
        llm, ahead = self._llm, deque([first])
        llm._engine.engine.start_counting()
        for finished in generation.passes(lambda: self._next(ahead)):
            llm._heap.after_pass()
            for opened in finished:
                asked, request = self._running.pop(id(opened.row))
                output = llm._output(request, opened, asked.params)
                try:
                    refuse_over_budget(llm._engine.engine.ledger.measure().over_budget, output)
                except MoedgeError as error:
                    asked.fail(error)
                else:
                    asked.succeed(output)
            self._drop_unwanted(generation)

    def _drop_unwanted(self, generation: Generation) -> None:
        cancelled = {number for number, (asked, _) in self._running.items() if asked.answer.cancelled()}
        if self._ended or cancelled:
            generation.drop(lambda row: self._ended or id(row) in cancelled)
        for number in cancelled:
            del self._running[number]

    def _next(self, ahead: deque[_Asked]) -> Request | None:
        """The next request that can run; those that cannot are answered."""
        while (asked := _taken(ahead, self._arrived)) is not None:
            try:
                if self._ended:
                    raise EngineUnavailable(_CLOSED)
                request = self._llm._request(asked.body, asked.endpoint, asked.params, 0, "prompt")
            except BaseException as error:
                asked.fail(error)
                continue
            self._running[id(request.row)] = asked, request
            return request
        return None

    def _fail_all(self, error: BaseException, *others: _Asked) -> None:
        running = [asked for asked, _ in self._running.values()]
        self._running.clear()
        while not self._arrived.empty():
            if (asked := self._arrived.get()) is not None:
                running.append(asked)
        for each in (*running, *others):
            each.fail(error)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of a task, whose answer another thread gives."""

    body: dict[str, Any]
    endpoint: Endpoint
    params: SamplingParams
    answer: Future[RequestOutput] = field(default_factory=Future)

    def succeed(self, output: RequestOutput) -> None:
        # It may have been cancelled meanwhile.
        with suppress(InvalidStateError):
            self.answer.set_result(output)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


def _taken(ahead: deque[_Asked], arrived: SimpleQueue[_Asked | None]) -> _Asked | None:
    return ahead.popleft() if ahead else None if arrived.empty() else arrived.get()


def _several(prompts: Prompt | Items[Prompt]) -> Items[Prompt]:
    """A list of prompts: one prompt alone becomes a list of it."""
    alone = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast(Items[Prompt], [prompts] if alone else prompts)


def _prompt_body(prompt: Prompt, where: str) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        if len(found := [name for name in ("prompt", "prompt_token_ids") if name in prompt]) != 1:
            raise PromptError(f"{where}: a dict must have prompt or prompt_token_ids; found {', '.join(prompt)}")
        prompt = prompt[found[0]]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Items) or not all(type(each) is int for each in prompt):
        raise PromptError(f"{where} must be text or a list of token ids; found {shown(prompt)}")
    return {"prompt": list(prompt)}


def _body_of_either(prompt: Prompt | Conversation, where: str) -> tuple[dict[str, Any], Endpoint]:
    """A prompt, or a conversation, as the body of a row. Raises PromptError."""
    if not isinstance(prompt, str | Mapping) and bool(prompt) and isinstance(prompt[0], Mapping):
        return {"messages": list(prompt)}, Endpoint.CHAT
    return _prompt_body(cast(Prompt, prompt), where), Endpoint.COMPLETION


def _scores(request: Request, opened: OpenRow) -> ChoiceScores:
    completions = opened.completions()
    if isinstance(completions, RowFailure):
        raise PromptError(f"prompts[{request.row.index}]: {completions.message}")
    return ChoiceScores.from_completions(request.row, completions)


def _fastest_order(requests: Items[Request], mixture: bool) -> Iterable[Request]:
    """Prompts in the order in which a job runs its rows."""
    order = SpeedOrder(mixture)
    for request in requests:
        prompt_ids = request.choices[0][0]
        order.add(request.row.index, prompt_ids, len(prompt_ids) + request.row.params.max_tokens)
    by_row = {request.row.index: request for request in requests}
    return [by_row[index] for index in order.rows()] if requests else []
