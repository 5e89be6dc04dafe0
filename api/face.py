"""What applications may use of the core: the names below, by what they are for. Importing this file loads no torch.

An application (`apps/`) imports these names, those of `moedge` and, in its command, those of `cli/face.py`, and nothing
else (tests/house/test_apps.py). A name is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .offload.memory import gc_paused

if TYPE_CHECKING:
    from .batch import BatchProgress, JobObserver, JobSeries, batch_request, first_state
    from .computing import TorchBuild, dotted, find_torch, settle, unusable_torch
    from .formatting import clock, duration, escape_controls, formats_line, short_duration
    from .offload.atomic_file import AtomicFile, own_name, write_atomically
    from .offload.budget import GIB, auto_host, gib, parse_size
    from .offload.device import Device, find_device
    from .offload.errors import ExitCode, is_exhausted
    from .offload.machine.hardware import (
        Driver,
        GpuState,
        PcieLink,
        find_driver,
        find_gpu_states,
        shows_gpu,
    )
    from .offload.machine.profile import SCHEMA, FlopRates, Machine, saved_path
    from .offload.memory import Heap, MemoryGroup, host_available, host_total, memory_groups, reset_host_peak
    from .offload.store.stores import default_root, disk_free, disk_of, stores
    from .quant.formats.format import QUANT_FORMATS
    from .runtime.calibration.machine_profile import machine_profile, measure_cache_reads, saved_profile
    from .runtime.engine.engine import Engine, Metrics
    from .runtime.engine.scheduler import Draft, Scheduler
    from .runtime.engine.sequence import Sequence
    from .runtime.jobs.folder import JobFolder, JobLock, now_text
    from .runtime.jobs.job import Measured, Planned, Running
    from .runtime.jobs.journal.state import Counts, CutChoice, Done, Suspicion
    from .runtime.jobs.lifecycle import OpenModel, refuse_over_budget
    from .runtime.jobs.outputs import (
        OutputPaths,
        claim_output,
        file_sha256,
        is_table,
        keep_example,
        schema_fields,
        write_table,
    )
    from .runtime.jobs.report import merge_summaries, summarise
    from .runtime.jobs.request import BatchRequest, model_facts, request_of
    from .runtime.jobs.run import OpenRow, RowReader, RowRunner, RowSource
    from .runtime.jobs.session import CANCELLED, Checked, Ended, JobSession, lock_folder
    from .runtime.jobs.status import (
        WINDOW,
        JobPhase,
        JobStatus,
        RoundsJob,
        cancel,
        export_now,
        find_job,
        find_rounds,
        job_id_folders,
        openai_batch,
    )
    from .runtime.jobs.stop import CrashMarker, StallGuard, memory_kills
    from .runtime.jobs.summary import RunSummary, Seconds, WorkerRun
    from .runtime.loading.engine_loader import LoadedModel
    from .runtime.loading.selftest import bitsandbytes_speed, cpu_kernels, gpu_kernels, product_error
    from .runtime.plan.fallback import Fallback, FallbackPolicy
    from .runtime.plan.memory_ledger import TierLedger
    from .runtime.plan.placement import Workload
    from .runtime.plan.plan_file import PastRun, last_runs
    from .runtime.plan.planner import PlanResult, reads_integers
    from .runtime.rows.answer_formats import with_own
    from .runtime.rows.fields import MAX_STOP
    from .runtime.rows.row import CONTINUE_CUT, Endpoint, ErrorCode, InvalidRow, Row, RowFailure, parse_object
    from .runtime.rows.row_formats import Template, read_schema, text_or_file
    from .runtime.rows.tables import guessed_encoding
    from .runtime.sampling.grammar import SchemaError, compile_schema
    from .runtime.settings import errors, option, options
    from .runtime.settings.errors import counted
    from .runtime.settings.stages import stage, watching
    from .runtime.source.model_source import ModelSource, open_source, public_name
    from .runtime.text.confinement import lacking, shut_in
    from .runtime.text.folder import has_chat_template
    from .runtime.text.template import Child, pack, read_body, unpack
    from .runtime.text.tokenizer import Tokenizer
    from .runtime.weights.key_offsets import KeyOffsets


_MODULES = {
    # Jobs as they are on disk.
    "Counts": ".runtime.jobs.journal.state",
    "JobFolder": ".runtime.jobs.folder",
    "JobLock": ".runtime.jobs.folder",
    "JobPhase": ".runtime.jobs.status",
    "JobStatus": ".runtime.jobs.status",
    "OutputPaths": ".runtime.jobs.outputs",
    "RoundsJob": ".runtime.jobs.status",
    "WINDOW": ".runtime.jobs.status",
    "cancel": ".runtime.jobs.status",
    "claim_output": ".runtime.jobs.outputs",
    "export_now": ".runtime.jobs.status",
    "file_sha256": ".runtime.jobs.outputs",
    "find_job": ".runtime.jobs.status",
    "find_rounds": ".runtime.jobs.status",
    "is_table": ".runtime.jobs.outputs",
    "job_id_folders": ".runtime.jobs.status",
    "keep_example": ".runtime.jobs.outputs",
    "now_text": ".runtime.jobs.folder",
    "openai_batch": ".runtime.jobs.status",
    "schema_fields": ".runtime.jobs.outputs",
    "write_table": ".runtime.jobs.outputs",
    # The machine: what it has, what is free, and what was measured of it.
    "Device": ".offload.device",
    "Driver": ".offload.machine.hardware",
    "FlopRates": ".offload.machine.profile",
    "GpuState": ".offload.machine.hardware",
    "Machine": ".offload.machine.profile",
    "MemoryGroup": ".offload.memory",
    "PcieLink": ".offload.machine.hardware",
    "SCHEMA": ".offload.machine.profile",
    "auto_host": ".offload.budget",
    "find_device": ".offload.device",
    "find_driver": ".offload.machine.hardware",
    "find_gpu_states": ".offload.machine.hardware",
    "host_available": ".offload.memory",
    "host_total": ".offload.memory",
    "lacking": ".runtime.text.confinement",
    "machine_profile": ".runtime.calibration.machine_profile",
    "measure_cache_reads": ".runtime.calibration.machine_profile",
    "memory_groups": ".offload.memory",
    "saved_path": ".offload.machine.profile",
    "saved_profile": ".runtime.calibration.machine_profile",
    "shows_gpu": ".offload.machine.hardware",
    # What computes here: torch and the kernels, tried.
    "QUANT_FORMATS": ".quant.formats.format",
    "TorchBuild": ".computing",
    "bitsandbytes_speed": ".runtime.loading.selftest",
    "cpu_kernels": ".runtime.loading.selftest",
    "dotted": ".computing",
    "find_torch": ".computing",
    "gpu_kernels": ".runtime.loading.selftest",
    "product_error": ".runtime.loading.selftest",
    "reads_integers": ".runtime.plan.planner",
    "unusable_torch": ".computing",
    # Prepared weights on disk, and how well past runs were predicted.
    "PastRun": ".runtime.plan.plan_file",
    "default_root": ".offload.store.stores",
    "disk_free": ".offload.store.stores",
    "disk_of": ".offload.store.stores",
    "last_runs": ".runtime.plan.plan_file",
    "stores": ".offload.store.stores",
    # Options, as every command and function declares them: `option` is how, `options` are the kinds that several share.
    "option": ".runtime.settings.option",
    "options": ".runtime.settings.options",
    "parse_size": ".offload.budget",
    # Errors and exit codes: `errors` is the family.
    "ExitCode": ".offload.errors",
    "counted": ".runtime.settings.errors",
    "errors": ".runtime.settings.errors",
    "is_exhausted": ".offload.errors",
    # Words and numbers as the command line writes them.
    "GIB": ".offload.budget",
    "clock": ".formatting",
    "duration": ".formatting",
    "escape_controls": ".formatting",
    "formats_line": ".formatting",
    "gib": ".offload.budget",
    "short_duration": ".formatting",
    # A model by path or hub name, and the stages of slow work.
    "MAX_STOP": ".runtime.rows.fields",
    "ModelSource": ".runtime.source.model_source",
    "Tokenizer": ".runtime.text.tokenizer",
    "has_chat_template": ".runtime.text.folder",
    "open_source": ".runtime.source.model_source",
    "public_name": ".runtime.source.model_source",
    "stage": ".runtime.settings.stages",
    "watching": ".runtime.settings.stages",
    # A job, by its states: rows to take, answers to give, rows to add.
    "BatchProgress": ".batch",
    "BatchRequest": ".runtime.jobs.request",
    "CANCELLED": ".runtime.jobs.session",
    "CONTINUE_CUT": ".runtime.rows.row",
    "Checked": ".runtime.jobs.session",
    "Ended": ".runtime.jobs.session",
    "ErrorCode": ".runtime.rows.row",
    "guessed_encoding": ".runtime.rows.tables",
    "JobObserver": ".batch",
    "JobSeries": ".batch",
    "JobSession": ".runtime.jobs.session",
    "KeyOffsets": ".runtime.weights.key_offsets",
    "Measured": ".runtime.jobs.job",
    "PlanResult": ".runtime.plan.planner",
    "Planned": ".runtime.jobs.job",
    "Row": ".runtime.rows.row",
    "RowFailure": ".runtime.rows.row",
    "RowSource": ".runtime.jobs.run",
    "Running": ".runtime.jobs.job",
    "SchemaError": ".runtime.sampling.grammar",
    "Suspicion": ".runtime.jobs.journal.state",
    "Template": ".runtime.rows.row_formats",
    "batch_request": ".batch",
    "compile_schema": ".runtime.sampling.grammar",
    "first_state": ".batch",
    "lock_folder": ".runtime.jobs.session",
    "read_schema": ".runtime.rows.row_formats",
    "refuse_over_budget": ".runtime.jobs.lifecycle",
    "request_of": ".runtime.jobs.request",
    "text_or_file": ".runtime.rows.row_formats",
    "with_own": ".runtime.rows.answer_formats",
    # A loaded model: sequences to add, step and abort, and who comes first; rows to open and their answers.
    "Draft": ".runtime.engine.scheduler",
    "Endpoint": ".runtime.rows.row",
    "Engine": ".runtime.engine.engine",
    "Heap": ".offload.memory",
    "InvalidRow": ".runtime.rows.row",
    "LoadedModel": ".runtime.loading.engine_loader",
    "OpenModel": ".runtime.jobs.lifecycle",
    "OpenRow": ".runtime.jobs.run",
    "RowReader": ".runtime.jobs.run",
    "Scheduler": ".runtime.engine.scheduler",
    "Sequence": ".runtime.engine.sequence",
    "parse_object": ".runtime.rows.row",
    # Processes that are shut in, for what strangers wrote.
    "Child": ".runtime.text.template",
    "pack": ".runtime.text.template",
    "read_body": ".runtime.text.template",
    "reset_host_peak": ".offload.memory",
    "shut_in": ".runtime.text.confinement",
    "unpack": ".runtime.text.template",
    # An engine elsewhere, which computes rows of a job: what runs them, guards them, and says what came of it.
    "CrashMarker": ".runtime.jobs.stop",
    "CutChoice": ".runtime.jobs.journal.state",
    "Done": ".runtime.jobs.journal.state",
    "RowRunner": ".runtime.jobs.run",
    "StallGuard": ".runtime.jobs.stop",
    "Workload": ".runtime.plan.placement",
    "memory_kills": ".runtime.jobs.stop",
    "model_facts": ".runtime.jobs.request",
    "settle": ".computing",
    # What a run came to: counters, and summaries that can be merged.
    "Fallback": ".runtime.plan.fallback",
    "FallbackPolicy": ".runtime.plan.fallback",
    "Metrics": ".runtime.engine.engine",
    "RunSummary": ".runtime.jobs.summary",
    "Seconds": ".runtime.jobs.summary",
    "TierLedger": ".runtime.plan.memory_ledger",
    "WorkerRun": ".runtime.jobs.summary",
    "merge_summaries": ".runtime.jobs.report",
    "summarise": ".runtime.jobs.report",
    # Files that are whole or not there.
    "AtomicFile": ".offload.atomic_file",
    "own_name": ".offload.atomic_file",
    "write_atomically": ".offload.atomic_file",
}
# Modules whose names are all public.
_WHOLE = ("errors", "option", "options")

__all__ = [
    "AtomicFile",
    "BatchProgress",
    "BatchRequest",
    "CANCELLED",
    "CONTINUE_CUT",
    "Checked",
    "Child",
    "Counts",
    "CrashMarker",
    "CutChoice",
    "Device",
    "Done",
    "Draft",
    "Driver",
    "Ended",
    "Endpoint",
    "Engine",
    "ErrorCode",
    "ExitCode",
    "Fallback",
    "FallbackPolicy",
    "FlopRates",
    "GIB",
    "GpuState",
    "Heap",
    "InvalidRow",
    "JobFolder",
    "JobLock",
    "JobObserver",
    "JobPhase",
    "JobSeries",
    "JobSession",
    "JobStatus",
    "KeyOffsets",
    "LoadedModel",
    "MAX_STOP",
    "Machine",
    "Measured",
    "MemoryGroup",
    "Metrics",
    "ModelSource",
    "OpenModel",
    "OpenRow",
    "OutputPaths",
    "PastRun",
    "PcieLink",
    "PlanResult",
    "Planned",
    "QUANT_FORMATS",
    "RoundsJob",
    "Row",
    "RowFailure",
    "RowReader",
    "RowRunner",
    "RowSource",
    "RunSummary",
    "Running",
    "SCHEMA",
    "Scheduler",
    "SchemaError",
    "Seconds",
    "Sequence",
    "StallGuard",
    "Suspicion",
    "Template",
    "TierLedger",
    "Tokenizer",
    "TorchBuild",
    "WINDOW",
    "WorkerRun",
    "Workload",
    "auto_host",
    "batch_request",
    "bitsandbytes_speed",
    "cancel",
    "claim_output",
    "clock",
    "compile_schema",
    "counted",
    "cpu_kernels",
    "default_root",
    "disk_free",
    "disk_of",
    "dotted",
    "duration",
    "errors",
    "escape_controls",
    "export_now",
    "file_sha256",
    "find_device",
    "find_driver",
    "find_gpu_states",
    "find_job",
    "find_rounds",
    "find_torch",
    "first_state",
    "formats_line",
    "gib",
    "gpu_kernels",
    "guessed_encoding",
    "has_chat_template",
    "host_available",
    "host_total",
    "is_exhausted",
    "is_table",
    "job_id_folders",
    "keep_example",
    "lacking",
    "last_runs",
    "lock_folder",
    "machine_profile",
    "measure_cache_reads",
    "memory_groups",
    "memory_kills",
    "merge_summaries",
    "model_facts",
    "now_text",
    "open_source",
    "openai_batch",
    "option",
    "options",
    "own_name",
    "pack",
    "parse_object",
    "parse_size",
    "product_error",
    "public_name",
    "read_body",
    "read_schema",
    "reads_integers",
    "refuse_over_budget",
    "request_of",
    "reset_host_peak",
    "saved_path",
    "saved_profile",
    "schema_fields",
    "settle",
    "short_duration",
    "shows_gpu",
    "shut_in",
    "stage",
    "stores",
    "summarise",
    "text_or_file",
    "unpack",
    "unusable_torch",
    "watching",
    "with_own",
    "write_atomically",
    "write_table",
]


if not TYPE_CHECKING:
    # To type checkers a module with this function has every name.
    def __getattr__(name: str) -> Any:
        """Imports what was asked for: most of it needs no torch."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with gc_paused():
            module = import_module(_MODULES[name], __package__)
        return module if name in _WHOLE else getattr(module, name)
