"""The one thread that loads the model and runs every pass: requests join it between two passes, and one job feeds it.

A job's own passes are its generator (`Running.passes`), a pass at a time; requests are sequences beside its rows.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...face import Engine, Heap, LoadedModel, Metrics, OpenModel, Planned, Running
from .counts import ServerCounts
from .errors import ApiError
from .live import LiveRequest
from .policy import interactive_first

STOPPING = "the server was stopped"


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Counters since the start, which only grow."""

    passes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def plus(self, now: Metrics, before: ServerTotals) -> ServerTotals:
        """With what `now` counts beyond `before`."""
        return ServerTotals(
            self.passes + now.passes - before.passes,
            self.prompt_tokens + now.prompt_tokens - before.prompt_tokens,
            self.generated_tokens + now.generated_tokens - before.generated_tokens,
        )


@dataclass(eq=False, slots=True)
class _Job:
    planned: Planned
    watch: Callable[[Running], None]
    ended: Future[tuple[Running, str | None]] = field(default_factory=Future)
    running: Running | None = None
    passes: Iterator[None] | None = None


class EngineThread:
    """`ready` has the model once it is loaded, `died` why no pass runs any more, None after an ordinary stop."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """`options` are those of an LLM. `start` loads the model."""
        self.ready: Future[LoadedModel] = Future()
        self.died: Future[BaseException | None] = Future()
        self.totals = ServerTotals()
        self.counts = ServerCounts()
        # Whether an error has ended a pass: the engine cannot be used any more.
        self.broken = False
        self._model = model
        self._options = options
        self._changed = threading.Condition()
        self._arrived: list[LiveRequest] = []
        self._live: list[LiveRequest] = []
        self._job: _Job | None = None
        self._stopping = False
        self._unused = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_live(self) -> int:
        """Requests that run or wait."""
        return len(self._live) + len(self._arrived)

    def submit(self, request: LiveRequest) -> None:
        """The request takes part from the next pass on. Raises ApiError where no pass comes."""
        with self._changed:
            if self._stopping:
                raise ApiError(503, STOPPING, code="stopping")
            self._arrived.append(request)
            self._changed.notify()

    def run_job(self, planned: Planned, watch: Callable[[Running], None]) -> tuple[Running, str | None]:
        """Runs all passes of a job; returns it, and why it was stopped, None where it was not by this server.

        `watch` is called on the engine's thread when it begins and after each pass. One job at a time. Raises what its
        passes raise.
        """
        job = _Job(planned, watch)
        with self._changed:
            if self._stopping:
                raise ApiError(503, STOPPING, code="stopping")
            self._job = job
            self._changed.notify()
        return job.ended.result()

    def stop(self) -> None:
        """Ends after the current pass; a job is left to be resumed. Returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Frees the model, once nobody uses it any more."""
        self.stop()
        self._unused.set()
        if self.ready.done():
            # One that is still loading ends with the process.
            self._thread.join()

    def _run(self) -> None:
        try:
            with OpenModel(self._model) as opened:
                loaded, heap = opened.load_for_prompts(self._options)
                loaded.engine.start_counting()
                loaded.engine.engine.scheduler.policy = interactive_first
                self.ready.set_result(loaded)
                self._leave(self._error_of_passes(loaded.engine.engine, heap))
                self._unused.wait()
        except BaseException as error:
            if not self.died.done():
                self._leave(error)

    def _error_of_passes(self, engine: Engine, heap: Heap) -> BaseException | None:
        try:
            self._run_passes(engine, heap)
        except BaseException as error:
            return error
        return None

    def _run_passes(self, engine: Engine, heap: Heap) -> None:
        counting, counted = engine.metrics, ServerTotals()
        while self._wait_for_work(engine):
            if self._job is not None:
                self._step_job(self._job, engine)
            elif engine.busy:
                engine.step()
            if engine.metrics is not counting:
                # A job counts from its beginning.
                counting, counted = engine.metrics, ServerTotals()
            self.totals = self.totals.plus(counting, counted)
            counted = ServerTotals(counting.passes, counting.prompt_tokens, counting.generated_tokens)
            heap.after_pass()
            self._live = [request for request in self._live if not self._ends(request, engine)]

    def _ends(self, request: LiveRequest, engine: Engine) -> bool:
        """Hands out what the pass brought. An error of one answer is not one of the engine."""
        try:
            ended = request.advance()
        except Exception as error:
            traceback.print_exc()
            request.emit(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))
            engine.abort(lambda sequence: sequence in request.opened.sequences)
            return True
        if request.answered:
            self.counts.answered(request.row.endpoint.value, request.arrived, request.opened.sequences)
        return ended

    def _wait_for_work(self, engine: Engine) -> bool:
        """Lets requests join and leave; False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._arrived or self._live or self._job)
            arrived, self._arrived = self._arrived, []
            if self._stopping:
                self._arrived = arrived
                return False
        self._live += [request for request in arrived if _joins(request, engine)]
        if gone := {request for request in self._live if request.cancelled}:
            dropped = {sequence for request in gone for sequence in request.opened.sequences}
            engine.abort(lambda sequence: sequence in dropped)
            self._live = [request for request in self._live if request not in gone]
        return True

    def _step_job(self, job: _Job, engine: Engine) -> None:
        """One pass of the job and of all requests beside it."""
        try:
            if job.passes is None:
                job.running = Running(job.planned.load())
                job.passes = job.running.passes()
                job.watch(job.running)
            next(job.passes)
            assert job.running is not None
            job.watch(job.running)
        except StopIteration:
            assert job.running is not None
            self._job = None
            # A job that a limit stopped leaves sequences behind.
            engine.abort(lambda sequence: not sequence.urgent)
            job.ended.set_result((job.running, None))
        except BaseException as error:
            self._job, self.broken = None, engine.in_pass
            job.ended.set_exception(error)
            if self.broken:
                raise
            engine.abort(lambda sequence: not sequence.urgent)

    def _leave(self, error: BaseException | None) -> None:
        """Everyone who waits gets an answer."""
        self.stop()
        failure = ApiError(503, STOPPING if error is None else f"the engine failed: {error}", code="stopping")
        for request in (*self._live, *self._arrived):
            request.emit(failure)
        job, self._job = self._job, None
        if job is not None and not job.ended.done():
            if job.running is None or error is not None:
                job.ended.set_exception(error or failure)
            else:
                # Ends what the passes hold: the watcher of stalls, the marker of a crash.
                with suppress(Exception):
                    job.passes.close()  # type: ignore[union-attr]
                job.ended.set_result((job.running, STOPPING))
        if not self.ready.done():
            self.ready.set_exception(error or failure)
        self.died.set_result(error)


def _joins(request: LiveRequest, engine: Engine) -> bool:
    """Adds its sequences; one that could never be stored gets an error."""
    if not all(engine.scheduler.cache.fits(sequence.max_tokens) for sequence in request.opened.sequences):
        request.emit(ApiError(400, "the request does not fit into the KV cache", code="context_length_exceeded"))
        return False
    for sequence in request.opened.first:
        engine.add(sequence)
    return True
