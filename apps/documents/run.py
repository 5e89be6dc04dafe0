"""`run_documents`: the job behind `moedge docs`, which answers a question about every file of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from ...runtime.api.face import (
    BadArgument,
    BatchProgress,
    BatchRequest,
    Checked,
    Cluster,
    DocumentOptions,
    Ended,
    InputFormat,
    JobFolder,
    JobObserver,
    JobState,
    ModelSource,
    OutputPaths,
    StopRule,
    Workload,
    check,
    claim_output,
    cluster_of,
    has_chat_template,
    identity,
    lock_folder,
    now_text,
    open_source,
    own_name,
    pin_settings,
    read_state,
    refuse_unreachable,
    request_of,
    reset_host_peak,
    run_loaded,
    stage,
    with_options,
    write_atomically,
)
from .feed import Reading
from .job import DocumentJob, FolderReport, Listed, Tokens, WholeFolder
from .question import Long, Question, make_question
from .reader_process import ReadOptions
from .request import DocumentPaths, DocumentsRequest, facts_digest, settle_question
from .rounds import Round
from .table import Totals

if TYPE_CHECKING:
    # What is refused is refused before torch is imported.
    from ...runtime.api.face import Executor, Loaded, LoadedModel, Measured, Tokenizer


SCHEMA = "moedge.documents-run/1"


class DocumentsObserver(JobObserver):
    """What follows a job over documents: the reading of the folder, then every round as a job of its own."""

    def found(self, report: FolderReport) -> None:
        """The files of the folder are listed."""

    def reading(self, done: int, total: int) -> None:
        """Now and then, while files are read and no row runs yet."""

    def read(self, report: FolderReport) -> None:
        """Every file is read and split, and every chunk has its answer."""


@dataclass(frozen=True, slots=True)
class DocumentsEnded:
    """The result of a run: `reason` is None where every document has its row, else it says why not.

    `rounds` are the jobs that this run did, `sample` the rows of documents that were only tried, and `whole` what all
    of the folder comes to by them.
    """

    paths: OutputPaths
    report: FolderReport
    totals: Totals
    rounds: tuple[Ended, ...] = ()
    reason: str | None = None
    sample: tuple[Mapping[str, Any], ...] = ()
    whole: WholeFolder | None = None

    def as_dict(self) -> dict[str, Any]:
        """What docs/documents.md says of the summary, without the rounds."""
        return {"reason": self.reason, "totals": _plain(self.totals), "report": _plain(self.report)}

    def write(self, path: Path) -> None:
        """Replaces the file: the folder and the totals, and of each round the numbers of its run."""
        rounds = [each.summary.as_dict() for each in self.rounds]
        found = {"schema": SCHEMA, "output": str(self.paths.out), **self.as_dict(), "rounds": rounds}
        write_atomically(path, json.dumps(found, indent=2, allow_nan=False).encode() + b"\n", own_name(path))


def run_documents_job(request: DocumentsRequest, observer: DocumentsObserver) -> DocumentsEnded:
    """The whole job: begun or resumed, run as far as its limits and `observer` let it, and published.

    Rows are answered in rounds, which share one engine; the first one begins while files are still being read.
    """
    with ExitStack() as resources:
        source = resources.enter_context(open_source(request.batch.model))
        paths = DocumentPaths(_claimed(request, source), facts_digest(request.facts))
        resources.enter_context(lock_folder(paths.outputs))
        settle_question(paths, request)
        _note(paths, request)
        listed = Listed.of(request, paths.outputs)
        observer.found(listed.report)
        _refuse_too_small(request, source, paths)
        with stage("reading the tokenizer"):
            from ...runtime.api.face import Tokenizer

            tokenizer = resources.enter_context(Tokenizer.load(source.folder))
        job = DocumentJob(request, paths, _tokens(request, source, tokenizer), listed)
        resources.callback(job.close)
        rounds = resources.enter_context(_RoundRunner(request.batch, request.question, job, observer))
        reason = _run_rounds(job, rounds, observer)
        made_by = rounds.made_by()
        sample: tuple[Mapping[str, Any], ...] = ()
        if request.sample is not None:
            sample = tuple(job.finished_rows(made_by))
        elif reason is None:
            job.publish(made_by)
        else:
            job.publish_partial(made_by)
        whole = None if request.sample is None else job.whole(tuple(each.summary for each in rounds.ended))
        ended = DocumentsEnded(paths.outputs, job.report, job.totals, tuple(rounds.ended), reason, sample, whole)
        _note(paths, request, ended)
        return ended


def _refuse_too_small(request: DocumentsRequest, source: ModelSource, paths: DocumentPaths) -> None:
    """Raises DoesNotFit where no row would fit. A job that has rounds may have all answers, and workers have budgets of
    their own."""
    if request.batch.cluster is None and not paths.rounds.exists():
        from ...runtime.api.face import refuse_too_small

        refuse_too_small(source, request.batch.settings, request.batch.budgets)


def _note(paths: DocumentPaths, request: DocumentsRequest, ended: DocumentsEnded | None = None) -> None:
    """For reports and lists of jobs: whose folder it is, and what the run came to, once it has ended."""
    found: dict[str, Any] = {
        "output": str(paths.outputs.out.resolve()), "folder": str(request.batch.input.resolve()), "at": now_text(),
        "sample": request.sample, **({} if ended is None else ended.as_dict()),
    }  # fmt: skip
    write_atomically(paths.summary, json.dumps(found, indent=1).encode())


def _plain(counts: Totals | FolderReport) -> dict[str, Any]:
    """`asdict` makes no counter of a counter."""
    return {each.name: getattr(counts, each.name) for each in fields(counts)}


def _run_rounds(job: DocumentJob, rounds: _RoundRunner, observer: DocumentsObserver) -> str | None:
    """Why the rounds ended before the last row; None where they did not."""
    files, left = job.files, True
    while left:
        with job.reading(files, rounds.longest_prompt) as reading:
            reason = _run_while_reading(reading, rounds, observer)
        if not reading.complete:
            job.keep_read()
            return reason
        job.count()
        if reason:
            return reason
        left = reading.deferred > 0
        rounds.reread = True
    observer.read(job.report)
    return rounds.run_failed() or _merge(job, rounds)


def _merge(job: DocumentJob, rounds: _RoundRunner) -> str | None:
    while (current := job.merge()) is not None:
        if reason := rounds.run(current):
            return reason
    return None


def _run_while_reading(reading: Reading, rounds: _RoundRunner, observer: DocumentsObserver) -> str | None:
    """The rows of a reading; those of the second one are all known before the engine gets memory for the longest."""
    while (current := reading.next_round(observer.reading, every=rounds.reread)) is not None:
        if reason := rounds.run(current, reading):
            return reason
        reading.close_round(current)
    return None


def _claimed(request: DocumentsRequest, source: ModelSource) -> OutputPaths:
    paths = OutputPaths(request.batch.output)
    if DocumentPaths(paths, "").published.exists():
        # What is there is compared with what was written, when it is written again.
        return paths
    return claim_output(request.batch.output, request.batch.input, source.folder)


def _tokens(request: DocumentsRequest, source: ModelSource, tokenizer: Tokenizer) -> Tokens:
    system, chat = request.question.system, has_chat_template(source.folder)
    beside = [] if system is None else [{"role": "system", "content": system}]

    def prompt(text: str) -> int:
        if chat:
            return len(tokenizer.encode_chat([*beside, {"role": "user", "content": text}]))
        return len(tokenizer.encode(text))

    limit = source.shape.context - request.batch.defaults.max_tokens
    return Tokens(lambda text: len(tokenizer.encode(text)), prompt, limit)


class _RoundRunner:
    """Runs rounds, each as a batch job, on an engine that stays loaded between them."""

    def __init__(
        self, request: BatchRequest, question: Question, job: DocumentJob, observer: DocumentsObserver
    ) -> None:
        self._request = request
        self._question = question
        self._max_tokens = request.defaults.max_tokens
        self._job = job
        self._observer = observer
        self._held = ExitStack()
        self._model: LoadedModel | None = None
        self._cluster: Cluster | None = None
        self._stop_rule = StopRule(request.limits)
        self._rows_left = request.limits.max_rows
        self.reread = False
        self._retry = False
        self._expected: Workload | None = None
        self.ended: list[Ended] = []

    @property
    def longest_prompt(self) -> int | None:
        """The longest that the engine has memory for; None where it is still to be loaded, or loaded again."""
        if self._cluster is not None and self._cluster.longest is not None and not self.reread:
            return self._cluster.longest - self._max_tokens
        if self._model is None or self.reread:
            return None
        return self._model.longest - self._max_tokens

    def run(self, current: Round, reading: Reading | None = None, retry: bool = False) -> str | None:
        """Why the round stopped early; None where all of its rows have answers. `reading` adds rows meanwhile.

        With `retry`, rows that failed run again.
        """
        self._retry = retry
        with ExitStack() as resources:
            opened = self._open(current, reading)
            resources.callback(opened.resources.close)
            checked = replace(opened, stop_rule=self._stop_rule)
            self._refuse_other(checked)
            done = checked.claim.num_done
            if checked.finished:
                with self._observer.working():
                    ended = checked.publish()
            else:
                loaded = self._load(checked)
                if self._model is None and checked.request.cluster is None:
                    # The first job of an engine stays open as long as the engine is in use.
                    self._hold(cast("Loaded", loaded), resources.pop_all())
                ended = run_loaded(loaded, self._observer, reading)
        self.ended.append(ended)
        if self._rows_left is not None:
            self._rows_left -= ended.session.journal.state.counts.rows - done
            if self._rows_left <= 0 and ended.reason is None:
                return f"--max-rows {self._request.limits.max_rows:,} reached"
        return ended.reason

    def run_failed(self) -> str | None:
        """Runs failed rows of all rounds again, where the request says so; why that stopped early, else None."""
        every = self._job.rounds.all if self._request.resume.failed else ()
        for each in [each for each in every if each.outputs.errors.exists()]:
            # A round without its answers is one that the next run continues.
            each.outputs.out.unlink(missing_ok=True)
            if reason := self.run(each, retry=True):
                return reason
        return None

    def made_by(self) -> dict[str, Any]:
        """The columns that every row of the output has."""
        opened = self._opened()
        if opened is None:
            return {"model": self._request.model, "quant": None}
        return {"model": opened["model_name"], "quant": opened["identity"]["quant"]}

    def __enter__(self) -> _RoundRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _hold(self, loaded: Loaded, resources: ExitStack) -> None:
        self._held.push(resources)
        planned, plan = loaded.planned, loaded.policy.plan
        # Rows of later rounds may be as long as the cache allows.
        longest = replace(planned.workload, longest=plan.kv_tokens)
        from ...runtime.api.face import with_workload

        self._model = replace(loaded.model, chosen=with_workload(planned.chosen, plan, longest))

    def _open(self, current: Round, reading: Reading | None) -> Checked:
        self._expected = None
        if reading is None:
            return Checked.open(self._round_request(current))
        with reading.paused():
            opened = Checked.open(self._round_request(current))
            if opened.finished:
                # It is published as it is.
                reading.close_round(current)
            elif not reading.done and self._model is None and self.longest_prompt is None:
                # What is longer is for a later round: this one is planned before it is known.
                expected = reading.expected
                reading.longest = expected.longest_of(self._job.longest_prompt(expected.longest))
                self._expected = expected.workload(self._max_tokens, reading.longest)
            reading.note_in(opened.preflight.index)
            return opened

    def _load(self, checked: Checked) -> Executor:
        """On the engine of the rounds before, unless this one has a longer row than it has memory for."""
        observer, given = self._observer, self._model
        observer.checked(checked)
        if self._cluster is None:
            refuse_unreachable(checked)
        with stage("importing torch"):
            from ...runtime.api.face import Measured
        measured = Measured.of(replace(checked, given=given))
        observer.measured(measured)
        if checked.request.cluster is not None:
            return self._load_workers(measured)
        if given is not None and not measured.size.longer_than(given.longest):
            return measured.plan().load()
        self._held.close()
        self._model = None
        expected = None if self._expected is None else _more(measured.size.shape(), self._expected)
        planned = replace(measured, checked=checked).plan(expected)
        observer.planned(planned)
        loaded = planned.load()
        observer.loaded(loaded)
        return loaded

    def _load_workers(self, measured: Measured) -> Executor:
        """On the workers of the rounds before; the first round starts them."""
        if self._cluster is None:
            self._cluster = self._held.enter_context(cluster_of(measured))
        expected = None if self._expected is None else _more(measured.size.shape(), self._expected)
        planned = self._cluster.plan(measured, expected)
        self._observer.planned(planned)
        loaded = self._cluster.load(planned)
        self._observer.loaded(loaded)
        return loaded

    def _round_request(self, current: Round) -> BatchRequest:
        request, opened = self._request, self._opened()
        defaults = replace(
            request.defaults, prompt_column="prompt", system=self._question.system, schema=self._question.grammar
        )
        return replace(
            request,
            input=current.rows,
            input_format=InputFormat.JSONL,
            output=current.answers,
            defaults=defaults,
            settings=request.settings if opened is None else pin_settings(request.settings, opened),
            limits=replace(request.limits, max_rows=self._rows_left),
            resume=replace(request.resume, failed=self._retry),
            # Rows that templates spoiled are errors of their documents.
            lenient=True,
        )

    def _refuse_other(self, checked: Checked) -> None:
        """Raises JobMismatch where the first round was answered by another model, or under other settings."""
        if (state := self._state()) is not None:
            facts = identity(checked.source, checked.request.defaults, checked.request.lenient)
            settings, accepted = self._request.settings, self._request.resume.drift
            facts.refuse_other(state, settings, accepted, checked.paths, to_do=not checked.finished)

    def _opened(self) -> Mapping[str, Any] | None:
        """The first record of the first round, where it has begun."""
        state = self._state()
        return None if state is None else state.opened

    def _state(self) -> JobState | None:
        first = self._job.rounds.first
        folder = None if first is None else JobFolder(first.outputs.job)
        return read_state(folder.journal) if folder is not None and folder.begun else None


def _more(known: Workload, expected: Workload) -> Workload:
    """What a job comes to whose rows are known in part."""
    return Workload(
        max(known.sequences, expected.sequences),
        max(known.longest, expected.longest),
        known.shortest,
        max(known.prompt_tokens or 0, expected.prompt_tokens or 0),
        max(known.generated_tokens or 0, expected.generated_tokens or 0),
    )


class _Progress(BatchProgress, DocumentsObserver):
    """A bar for every round."""


@with_options(DocumentOptions)
def run_documents(
    model: str | Path,
    folder: str | Path,
    output: str | Path,
    *,
    progress: bool = True,
    **options: Unpack[DocumentOptions],
) -> DocumentsEnded:
    """Answers a question about every file of `folder`: the same job as `moedge docs model folder -o output`.

    Every file gives one row of `output`, or of its `.errors.jsonl`; with `each="chunk"`, every chunk. The same call
    resumes a job that was stopped or killed, and adds files that are new or changed. docs/documents.md has the options.

    Returns the counts of files and rows; `reason` says why a run stopped early, `rounds` have the numbers of its jobs.

    Raises what the command exits with: SettingError, InputUnreadable, DoesNotFit, JobMismatch, OutputExists and others,
    all of them MoedgeErrors. Ctrl-C stops after the pass, keeps all answers, and raises KeyboardInterrupt.
    """
    check(options, DocumentOptions)
    reset_host_peak()
    ended = run_documents_job(documents_request(model, folder, output, options), _Progress(progress))
    from ...runtime.api.face import refuse_over_budget

    for each in ended.rounds:
        refuse_over_budget(each.over_budget, each.summary)
    return ended


def documents_request(
    model: str | Path, folder: str | Path, output: str | Path, options: Mapping[str, Any]
) -> DocumentsRequest:
    """The request that these of `DocumentOptions` make. Raises BadArgument, SettingError, InputUnreadable."""
    if not Path(folder).is_dir():
        raise BadArgument(f"{folder} is not a folder; give the folder that holds the documents")
    each, long = options.get("each") or "document", options.get("long")
    if each == "chunk" and long not in (None, Long.SPLIT):
        raise BadArgument(f"--each chunk gives a row for every chunk, and --long {long} merges or refuses them")
    question = make_question({**options, "long": Long.SPLIT if each == "chunk" else long})
    # Prompts and schemas are the question's; nothing is sampled unless it is asked for.
    rest = {name: value for name, value in options.items() if name not in ("prompt", "system", "schema")}
    rest.setdefault("csv_safe", True)
    batch = replace(request_of(model, folder, output, rest), unset=frozenset(), follow=False)
    cache = options.get("cache")
    return DocumentsRequest(
        batch=batch,
        question=question,
        include=tuple(options.get("include") or ()),
        exclude=tuple(options.get("exclude") or ()),
        reading=ReadOptions(options.get("reader"), options.get("ocr", "eng")),
        cache=None if cache is None else Path(cache),
        workers=options.get("workers"),
        sample=options.get("sample"),
        mirror=_mirror(folder, options.get("mirror")),
    )


def _mirror(folder: str | Path, mirror: str | Path | None) -> Path | None:
    """Raises BadArgument for a folder whose files would be read as documents."""
    if mirror is None:
        return None
    found, documents = Path(mirror).resolve(), Path(folder).resolve()
    if found.is_relative_to(documents) or documents.is_relative_to(found):
        raise BadArgument(f"--mirror {mirror} and the folder of the documents, {folder}, must lie beside each other")
    return found
