"""`run_documents`: the job behind `moedge docs`, which answers a question about every file of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ...face import (
    BatchProgress,
    BatchRequest,
    Ended,
    JobFolder,
    JobObserver,
    JobSeries,
    ModelSource,
    OutputPaths,
    claim_output,
    errors,
    first_state,
    has_chat_template,
    lock_folder,
    now_text,
    open_source,
    option,
    own_name,
    request_of,
    reset_host_peak,
    stage,
    write_atomically,
)
from .iterate import folder_of
from .job import DocumentJob, FolderReport, Listed, TokenCounter, WholeFolder
from .options import DocumentOptions
from .question import Long, Question, make_question
from .reader_process import ReadOptions
from .request import DocumentPaths, DocumentsRequest, settle_question
from .rounds import Round
from .table import Totals

if TYPE_CHECKING:
    # What is refused is refused before torch is imported.
    from ...face import Tokenizer


SCHEMA = "moedge.documents-run/2"


class DocumentsObserver(JobObserver):
    """What follows a job over documents: the reading of the folder, then every round as a job of its own."""

    def found(self, report: FolderReport) -> None:
        """The files of the folder are listed."""

    def reading(self, done: int, total: int) -> None:
        """After each file that was read."""

    def read(self, report: FolderReport) -> None:
        """Every file is read and split."""


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

    The files are read; then rows are answered in rounds, which share one engine.
    """
    with ExitStack() as resources:
        source = resources.enter_context(open_source(request.batch.model))
        _refuse_no_prompt(request, source)
        outputs = _claimed(request, source)
        resources.enter_context(lock_folder(outputs))
        paths = settle_question(outputs, request)
        _note(paths, request)
        listed = Listed.of(request, paths)
        observer.found(listed.report)
        series = resources.enter_context(JobSeries(request.batch, observer))
        if not paths.rounds.exists():
            # A job that has rounds may have all answers.
            series.refuse_too_small(source)
        with stage("reading the tokenizer"):
            from ...face import Tokenizer

            tokenizer = resources.enter_context(Tokenizer.load(source.folder))
        job = DocumentJob(request, paths, _tokens(request, source, tokenizer), listed)
        rounds = _RoundRunner(request.batch, request.question, job, series)
        reason = _run_rounds(job, rounds, observer)
        made_by = rounds.made_by()
        sample: tuple[Mapping[str, Any], ...] = ()
        if request.sample is not None:
            sample = tuple(job.finished_rows(made_by))
        elif reason is None:
            job.publish(made_by)
        else:
            job.publish_partial(made_by)
        whole = None if request.sample is None else job.whole(tuple(each.summary for each in series.ended))
        ended = DocumentsEnded(paths.outputs, job.report, job.totals, tuple(series.ended), reason, sample, whole)
        _note(paths, request, ended)
        return ended


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
    left = list(job.read(observer.reading))
    observer.read(job.report)
    for each in left:
        if reason := rounds.run(each):
            return reason
    return rounds.run_again() or _merge(job, rounds)


def _merge(job: DocumentJob, rounds: _RoundRunner) -> str | None:
    while (current := job.merge()) is not None:
        if reason := rounds.run(current):
            return reason
    return None


def _refuse_no_prompt(request: DocumentsRequest, source: ModelSource) -> None:
    """Raises BadArgument before anything of a job is changed."""
    most, context = request.batch.defaults.max_tokens, source.shape.context
    if most >= context:
        raise errors.BadArgument(f"--max-tokens {most} leaves nothing of the model's context, {context}, to a prompt")


def _claimed(request: DocumentsRequest, source: ModelSource) -> OutputPaths:
    paths = OutputPaths(request.batch.output)
    if DocumentPaths(paths, "").published.exists():
        # What is there is compared with what was written, when it is written again.
        return paths
    return claim_output(request.batch.output, request.batch.input, source.folder)


def _tokens(request: DocumentsRequest, source: ModelSource, tokenizer: Tokenizer) -> TokenCounter:
    system, chat = request.question.system, has_chat_template(source.folder)
    beside = [] if system is None else [{"role": "system", "content": system}]

    def prompt(text: str) -> int:
        if chat:
            return len(tokenizer.encode_chat([*beside, {"role": "user", "content": text}]))
        return len(tokenizer.encode(text))

    limit = source.shape.context - request.batch.defaults.max_tokens
    return TokenCounter(lambda text: len(tokenizer.encode(text)), prompt, limit)


class _RoundRunner:
    """Runs rounds, each as a batch job of one series."""

    def __init__(self, request: BatchRequest, question: Question, job: DocumentJob, series: JobSeries) -> None:
        self._request = request
        self._question = question
        self._job = job
        self._series = series

    def run(self, current: Round, retry: bool = False) -> str | None:
        """Why the round stopped early; None where all of its rows have answers. With `retry`, those that failed run
        again."""
        return self._run(current, retry, self._cut_rows(current))

    def _run(self, current: Round, retry: bool, cut_rows: frozenset[int]) -> str | None:
        return self._series.run(self._series.open(self._round_request(current, retry, cut_rows), self._first))

    def run_again(self) -> str | None:
        """Runs failed rows of all rounds again and continues cut ones, where the request says so; why that stopped
        early, else None."""
        for each in self._job.rounds.all:
            failed = self._request.resume.failed and each.outputs.errors.exists()
            if (cut_rows := self._cut_rows(each)) or failed:
                # A round without its answers is one that the next run continues.
                each.outputs.out.unlink(missing_ok=True)
                if reason := self._run(each, failed, cut_rows):
                    return reason
        return None

    def _cut_rows(self, current: Round) -> frozenset[int]:
        """The rows of a round that are to be continued."""
        state, longest = first_state(JobFolder(current.outputs.job)), self._request.resume.cut_to
        cut = () if state is None or longest is None else state.cut_rows(longest)
        return self._job.in_use(current.ids(set(cut))) if cut else frozenset()

    def made_by(self) -> dict[str, Any]:
        """The columns that every row of the output has."""
        state = first_state(self._first)
        if state is None:
            return {"model": self._request.model, "quant": None}
        return {"model": state.opened["model_name"], "quant": state.opened["identity"]["quant"]}

    @property
    def _first(self) -> JobFolder | None:
        first = self._job.rounds.first
        return None if first is None else JobFolder(first.outputs.job)

    def _round_request(self, current: Round, retry: bool, cut_rows: frozenset[int]) -> BatchRequest:
        request = self._request
        defaults = replace(
            request.defaults, prompt_column="prompt", system=self._question.system, schema=self._question.grammar
        )
        return replace(
            request,
            input=current.rows,
            output=current.answers,
            defaults=defaults,
            resume=replace(request.resume, failed=retry, cut_rows=cut_rows),
            # Rows that templates spoiled are errors of their documents.
            lenient=True,
        )


class _Progress(BatchProgress, DocumentsObserver):
    """A bar for every round."""


@option.with_options(DocumentOptions)
def run_documents(
    model: str | Path,
    folder: str | Path,
    output: str | Path,
    *,
    progress: bool = True,
    **options: Unpack[DocumentOptions],
) -> DocumentsEnded:
    """Answers a question about every file of `folder`, or about the file that it is: the same job as `moedge docs
    model folder -o output`.

    Every file gives one row of `output`, or of its `.errors.jsonl`; with `each="chunk"`, every chunk. The same call
    resumes a job that was stopped or killed, and adds files that are new or changed. docs/documents.md has the options.

    Returns the counts of files and rows; `reason` says why a run stopped early, `rounds` have the numbers of its jobs.

    Raises what the command exits with: SettingError, InputUnreadable, DoesNotFit, JobMismatch, OutputExists and others,
    all of them MoedgeErrors. Ctrl-C stops after the pass, keeps all answers, and raises KeyboardInterrupt.
    """
    option.check(options, DocumentOptions)
    reset_host_peak()
    ended = run_documents_job(documents_request(model, folder, output, options), _Progress(progress))
    from ...face import refuse_over_budget

    for each in ended.rounds:
        refuse_over_budget(each.over_budget, each.summary)
    return ended


def documents_request(
    model: str | Path, folder: str | Path, output: str | Path, options: Mapping[str, Any]
) -> DocumentsRequest:
    """The request that these of `DocumentOptions` make. Raises BadArgument, SettingError, InputUnreadable."""
    if not Path(folder).exists():
        raise errors.BadArgument(f"{folder} does not exist; give a folder of documents, or one document")
    each, long = options.get("each") or "document", options.get("long")
    if each == "chunk" and long not in (None, Long.SPLIT):
        raise errors.BadArgument(f"--each chunk gives a row for every chunk, and --long {long} merges or refuses them")
    if options.get("cut") and options.get("sample"):
        raise errors.BadArgument("--cut continues the answers of a job, and --try answers a sample; give one of them")
    question = make_question({**options, "long": Long.SPLIT if each == "chunk" else long})
    # Prompts and schemas are the question's; nothing is sampled unless it is asked for.
    rest = {name: value for name, value in options.items() if name not in ("prompt", "system", "schema")}
    rest.setdefault("csv_safe", True)
    batch = replace(request_of(model, folder, output, rest), unset=frozenset(), follow=False)
    # Rounds may differ in it: what a job over documents allows is settled for all of them.
    resume = replace(batch.resume, drift=(*batch.resume.drift, "max_tokens"))
    if options.get("cut"):
        resume = replace(resume, cut_to=batch.defaults.max_tokens)
    cache = options.get("cache")
    return DocumentsRequest(
        batch=replace(batch, resume=resume),
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
    found, documents = Path(mirror).resolve(), folder_of(folder).resolve()
    if found.is_relative_to(documents) or documents.is_relative_to(found):
        raise errors.BadArgument(
            f"--mirror {mirror} and the folder of the documents, {folder}, must lie beside each other"
        )
    return found
