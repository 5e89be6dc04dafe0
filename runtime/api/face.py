"""What applications may use of the core: the names below, by what they are for. Importing this file loads no torch.

An application (`apps/`) imports these names, those of `moedge` and, in its command, those of `cli/face.py`, and nothing
else (tests/house/test_apps.py). A name is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...offload.atomic_file import AtomicFile, own_name, write_atomically
    from ...offload.budget import GIB, auto_host, gib, parse_size
    from ...offload.device import Device, find_device
    from ...offload.errors import ExitCode, is_exhausted
    from ...offload.machine.hardware import (
        Driver,
        GpuState,
        PcieLink,
        find_driver,
        find_gpu_states,
        nearest_existing,
        shows_gpu,
    )
    from ...offload.machine.profile import SCHEMA, Disk, FlopRates, Link, Machine, PinLimit, saved_path
    from ...offload.memory import Heap, MemoryGroup, host_available, host_total, memory_groups, reset_host_peak
    from ...offload.store.stores import default_root, disk_of, stores
    from ...quant.formats.format import QUANT_FORMATS
    from ..calibration.machine_profile import machine_profile, measure_cache_reads, saved_profile
    from ..engine.engine import Engine, Metrics
    from ..jobs.folder import JobFolder, JobLock, is_locked, now_text
    from ..jobs.job import Measured, Planned, Running
    from ..jobs.journal.run_log import LoggedRun
    from ..jobs.journal.state import Counts, Suspicion
    from ..jobs.outputs import OutputPaths, claim_output, file_sha256
    from ..jobs.request import BatchRequest
    from ..jobs.row_reader import RowReader
    from ..jobs.run import OpenRow, RowSource
    from ..jobs.session import CANCELLED, Checked, Ended, JobSession, lock_folder
    from ..jobs.status import (
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
    from ..jobs.stop import memory_kills
    from ..jobs.summary import RunSummary, Seconds, WorkerRun
    from ..jobs.table_files import is_table, schema_fields, write_table
    from ..jobs.totals import merge_summaries
    from ..jobs.worker import (
        JobFacts,
        LeasedRow,
        LoadOrder,
        LoadReport,
        Worker,
        WorkerInfo,
        WorkReport,
        same_everywhere,
    )
    from ..loading.engine_loader import LoadedModel
    from ..loading.selftest import bitsandbytes_speed, cpu_kernels, gpu_kernels, product_error
    from ..plan.fallback import Fallback, FallbackPolicy
    from ..plan.memory_ledger import TierLedger
    from ..plan.plan_file import RunRecord, last_runs
    from ..plan.planner import PlanResult, reads_integers
    from ..rows.answer_formats import with_own
    from ..rows.columns import Template, read_schema, text_or_file
    from ..rows.failure import CONTINUE_CUT, ErrorCode, InvalidRow, RowFailure
    from ..rows.fields import MAX_STOP
    from ..rows.row import Endpoint, Row
    from ..rows.strict_json import parse_object
    from ..rows.tables import InputFormat
    from ..sampling.grammar import SchemaError, compile_schema
    from ..settings import errors, option, options
    from ..settings.computing import TorchBuild, dotted, find_torch, unusable_torch
    from ..settings.errors import counted
    from ..settings.formatting import clock, duration, escape_controls, formats_line, short_duration
    from ..settings.process import settle
    from ..settings.stages import stage, watching
    from ..source.model_source import ModelSource, open_source
    from ..text.confinement import lacking, shut_in
    from ..text.folder import has_chat_template
    from ..text.template import Child, pack, read_body, unpack
    from ..text.tokenizer import Tokenizer
    from ..weights.key_offsets import KeyOffsets
    from .batch import BatchProgress, JobObserver, batch_request, request_of
    from .job_series import JobSeries, first_state
    from .model import OpenModel, refuse_over_budget

_MODULES = {
    # Jobs as they are on disk.
    "Counts": "..jobs.journal.state",
    "JobFolder": "..jobs.folder",
    "JobLock": "..jobs.folder",
    "JobPhase": "..jobs.status",
    "JobStatus": "..jobs.status",
    "LoggedRun": "..jobs.journal.run_log",
    "OutputPaths": "..jobs.outputs",
    "RoundsJob": "..jobs.status",
    "WINDOW": "..jobs.status",
    "cancel": "..jobs.status",
    "claim_output": "..jobs.outputs",
    "export_now": "..jobs.status",
    "file_sha256": "..jobs.outputs",
    "find_job": "..jobs.status",
    "find_rounds": "..jobs.status",
    "is_locked": "..jobs.folder",
    "is_table": "..jobs.table_files",
    "job_id_folders": "..jobs.status",
    "now_text": "..jobs.folder",
    "openai_batch": "..jobs.status",
    "schema_fields": "..jobs.table_files",
    "write_table": "..jobs.table_files",
    # The machine: what it has, what is free, and what was measured of it.
    "Device": "...offload.device",
    "Disk": "...offload.machine.profile",
    "Driver": "...offload.machine.hardware",
    "FlopRates": "...offload.machine.profile",
    "GpuState": "...offload.machine.hardware",
    "Link": "...offload.machine.profile",
    "Machine": "...offload.machine.profile",
    "MemoryGroup": "...offload.memory",
    "PcieLink": "...offload.machine.hardware",
    "PinLimit": "...offload.machine.profile",
    "SCHEMA": "...offload.machine.profile",
    "auto_host": "...offload.budget",
    "find_device": "...offload.device",
    "find_driver": "...offload.machine.hardware",
    "find_gpu_states": "...offload.machine.hardware",
    "host_available": "...offload.memory",
    "host_total": "...offload.memory",
    "lacking": "..text.confinement",
    "machine_profile": "..calibration.machine_profile",
    "measure_cache_reads": "..calibration.machine_profile",
    "memory_groups": "...offload.memory",
    "nearest_existing": "...offload.machine.hardware",
    "saved_path": "...offload.machine.profile",
    "saved_profile": "..calibration.machine_profile",
    "shows_gpu": "...offload.machine.hardware",
    # What computes here: torch and the kernels, tried.
    "QUANT_FORMATS": "...quant.formats.format",
    "TorchBuild": "..settings.computing",
    "bitsandbytes_speed": "..loading.selftest",
    "cpu_kernels": "..loading.selftest",
    "dotted": "..settings.computing",
    "find_torch": "..settings.computing",
    "gpu_kernels": "..loading.selftest",
    "product_error": "..loading.selftest",
    "reads_integers": "..plan.planner",
    "unusable_torch": "..settings.computing",
    # Prepared weights on disk, and how well past runs were predicted.
    "RunRecord": "..plan.plan_file",
    "default_root": "...offload.store.stores",
    "disk_of": "...offload.store.stores",
    "last_runs": "..plan.plan_file",
    "stores": "...offload.store.stores",
    # Options, as every command and function declares them: `option` is how, `options` are the kinds that several share.
    "option": "..settings.option",
    "options": "..settings.options",
    "parse_size": "...offload.budget",
    # Errors and exit codes: `errors` is the family.
    "ExitCode": "...offload.errors",
    "counted": "..settings.errors",
    "errors": "..settings.errors",
    "is_exhausted": "...offload.errors",
    # Words and numbers as the command line writes them.
    "GIB": "...offload.budget",
    "clock": "..settings.formatting",
    "duration": "..settings.formatting",
    "escape_controls": "..settings.formatting",
    "formats_line": "..settings.formatting",
    "gib": "...offload.budget",
    "short_duration": "..settings.formatting",
    # A model by path or hub name, and the stages of slow work.
    "MAX_STOP": "..rows.fields",
    "ModelSource": "..source.model_source",
    "Tokenizer": "..text.tokenizer",
    "has_chat_template": "..text.folder",
    "open_source": "..source.model_source",
    "stage": "..settings.stages",
    "watching": "..settings.stages",
    # A job, by its states: rows to take, answers to give, rows to add.
    "BatchProgress": ".batch",
    "BatchRequest": "..jobs.request",
    "CANCELLED": "..jobs.session",
    "CONTINUE_CUT": "..rows.failure",
    "Checked": "..jobs.session",
    "Ended": "..jobs.session",
    "ErrorCode": "..rows.failure",
    "InputFormat": "..rows.tables",
    "JobObserver": ".batch",
    "JobSeries": ".job_series",
    "JobSession": "..jobs.session",
    "KeyOffsets": "..weights.key_offsets",
    "Measured": "..jobs.job",
    "PlanResult": "..plan.planner",
    "Planned": "..jobs.job",
    "Row": "..rows.row",
    "RowFailure": "..rows.failure",
    "RowSource": "..jobs.run",
    "Running": "..jobs.job",
    "SchemaError": "..sampling.grammar",
    "Suspicion": "..jobs.journal.state",
    "Template": "..rows.columns",
    "batch_request": ".batch",
    "compile_schema": "..sampling.grammar",
    "first_state": ".job_series",
    "lock_folder": "..jobs.session",
    "read_schema": "..rows.columns",
    "refuse_over_budget": ".model",
    "request_of": ".batch",
    "text_or_file": "..rows.columns",
    "with_own": "..rows.answer_formats",
    # A loaded model: sequences to add, step and abort; rows to open and their answers.
    "Endpoint": "..rows.row",
    "Engine": "..engine.engine",
    "Heap": "...offload.memory",
    "InvalidRow": "..rows.failure",
    "LoadedModel": "..loading.engine_loader",
    "OpenModel": ".model",
    "OpenRow": "..jobs.run",
    "RowReader": "..jobs.row_reader",
    "parse_object": "..rows.strict_json",
    # Processes that are shut in, for what strangers wrote.
    "Child": "..text.template",
    "pack": "..text.template",
    "read_body": "..text.template",
    "reset_host_peak": "...offload.memory",
    "shut_in": "..text.confinement",
    "unpack": "..text.template",
    # A worker: an engine elsewhere, which computes rows that a job leases to it.
    "JobFacts": "..jobs.worker",
    "LeasedRow": "..jobs.worker",
    "LoadOrder": "..jobs.worker",
    "LoadReport": "..jobs.worker",
    "WorkReport": "..jobs.worker",
    "Worker": "..jobs.worker",
    "WorkerInfo": "..jobs.worker",
    "memory_kills": "..jobs.stop",
    "same_everywhere": "..jobs.worker",
    "settle": "..settings.process",
    # What a run came to: counters, and summaries that can be merged.
    "Fallback": "..plan.fallback",
    "FallbackPolicy": "..plan.fallback",
    "Metrics": "..engine.engine",
    "RunSummary": "..jobs.summary",
    "Seconds": "..jobs.summary",
    "TierLedger": "..plan.memory_ledger",
    "WorkerRun": "..jobs.summary",
    "merge_summaries": "..jobs.totals",
    # Files that are whole or not there.
    "AtomicFile": "...offload.atomic_file",
    "own_name": "...offload.atomic_file",
    "write_atomically": "...offload.atomic_file",
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
    "Device",
    "Disk",
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
    "InputFormat",
    "InvalidRow",
    "JobFacts",
    "JobFolder",
    "JobLock",
    "JobObserver",
    "JobPhase",
    "JobSeries",
    "JobSession",
    "JobStatus",
    "KeyOffsets",
    "LeasedRow",
    "Link",
    "LoadOrder",
    "LoadReport",
    "LoadedModel",
    "LoggedRun",
    "MAX_STOP",
    "Machine",
    "Measured",
    "MemoryGroup",
    "Metrics",
    "ModelSource",
    "OpenModel",
    "OpenRow",
    "OutputPaths",
    "PcieLink",
    "PinLimit",
    "PlanResult",
    "Planned",
    "QUANT_FORMATS",
    "RoundsJob",
    "Row",
    "RowFailure",
    "RowReader",
    "RowSource",
    "RunRecord",
    "RunSummary",
    "Running",
    "SCHEMA",
    "SchemaError",
    "Seconds",
    "Suspicion",
    "Template",
    "TierLedger",
    "Tokenizer",
    "TorchBuild",
    "WINDOW",
    "WorkReport",
    "Worker",
    "WorkerInfo",
    "WorkerRun",
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
    "has_chat_template",
    "host_available",
    "host_total",
    "is_exhausted",
    "is_locked",
    "is_table",
    "job_id_folders",
    "lacking",
    "last_runs",
    "lock_folder",
    "machine_profile",
    "measure_cache_reads",
    "memory_groups",
    "memory_kills",
    "merge_summaries",
    "nearest_existing",
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
    "read_body",
    "read_schema",
    "reads_integers",
    "refuse_over_budget",
    "request_of",
    "reset_host_peak",
    "same_everywhere",
    "saved_path",
    "saved_profile",
    "schema_fields",
    "settle",
    "short_duration",
    "shows_gpu",
    "shut_in",
    "stage",
    "stores",
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
        module = import_module(_MODULES[name], __package__)
        return module if name in _WHOLE else getattr(module, name)
