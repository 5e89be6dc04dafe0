"""The options that commands and Python functions share, in groups: what they are called, take, default to and mean.

Those of one command are declared beside it (cli/), in the same form. Torch-free.
"""

# No annotations as texts here: the table is read at every start.
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ...quant.formats.format import EXPERT_FORMATS, OPTION_DTYPES, QUANT_FORMATS
from ...quant.kv.format import KV_FORMATS
from .option import Option, Panel, Takes

Size = str | int
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_TEMPLATE = "TEXT|FILE"


class StoreFolder(TypedDict, total=False):
    """Where prepared weights are."""

    disk_dir: Annotated[
        str | Path | None,
        Option(
            "Folder for prepared weights; the user's cache by default.",
            panel=Panel.BUDGETS,
            takes=Takes.FOLDER,
            key=True,
            example='"/fast/prepared"',
        ),
    ]


class HostBudgets(StoreFolder, total=False):
    """The budgets of what computes on the CPU alone."""

    ram: Annotated[
        Size,
        Option(
            "RAM budget, never exceeded: 7GiB, 80%, auto.",
            "auto",
            panel=Panel.BUDGETS,
            metavar="SIZE",
            takes=Takes.SIZE,
            key=True,
            common=True,
            example='"20GiB"',
        ),
    ]
    disk: Annotated[
        Size,
        Option(
            "Disk budget for all prepared weights: 60GiB, auto, or 0 for none.",
            "auto",
            panel=Panel.BUDGETS,
            metavar="SIZE",
            takes=Takes.SIZE,
            key=True,
            common=True,
            example='"60GiB"',
        ),
    ]


class BudgetOptions(HostBudgets, total=False):
    """With what memory: bytes, or a text such as "7GiB", "80%" or "auto". `ram` is that of the whole process."""

    gpu_mem: Annotated[
        Size,
        Option(
            "GPU memory budget: 7GiB, 80%, auto, or 0 to run on the CPU.",
            "auto",
            panel=Panel.BUDGETS,
            metavar="SIZE",
            takes=Takes.SIZE,
            key=True,
            common=True,
            example='"7GiB"',
        ),
    ]


# Of `--experts`: they are in the format of all other matrices.
SAME = "same"


class WeightOptions(TypedDict, total=False):
    """What weights are held as."""

    dtype: Annotated[
        str,
        Option(
            "dtype to compute in; auto is the dtype of the checkpoint.",
            "auto",
            panel=Panel.PRECISION,
            choices=("auto", *OPTION_DTYPES),
            key=True,
        ),
    ]
    quant: Annotated[
        str,
        Option(
            "Quantize weights to this format; auto is the most precise one that fits, kept leaves a quantized "
            "checkpoint's codes as they are, and packs those that no format has in a byte a weight.",
            "auto",
            panel=Panel.PRECISION,
            choices=("auto", *QUANT_FORMATS, "kept"),
            key=True,
            common=True,
        ),
    ]
    experts: Annotated[
        str,
        Option(
            "Quantize routed experts to this format, and all else as --quant says; same: experts, too. vq2 is"
            " for weights that were prepared with a text to calibrate them.",
            SAME,
            panel=Panel.PRECISION,
            choices=(SAME, *EXPERT_FORMATS),
            key=True,
        ),
    ]


class PrecisionOptions(WeightOptions, total=False):
    """The formats and the arithmetic that a model is computed in."""

    compute: Annotated[
        Literal["auto", "float", "int8"],
        Option(
            "int8 rounds activations, too, for weights in int8 or 4-bit integers; float does not; auto: int8 where "
            "that is over a tenth faster.",
            "auto",
            panel=Panel.PRECISION,
            file_only=True,
        ),
    ]
    kv: Annotated[
        str,
        Option(
            "KV cache format (keys/values); auto is --dtype where everything fits, else int8.",
            "auto",
            panel=Panel.PRECISION,
            choices=("auto", *KV_FORMATS),
            key=True,
            common=True,
        ),
    ]
    deterministic: Annotated[
        bool,
        Option(
            "Bit-identical results for a row in any batch, on one machine (slower).",
            False,
            panel=Panel.PRECISION,
            key=True,
        ),
    ]


class ComputeOptions(PrecisionOptions, total=False):
    """How a model is computed."""

    attention: Annotated[
        Literal["auto", "torch", "native", "triton"],
        Option("Attention backend; auto is the fastest that works here.", "auto", panel=Panel.TUNING, file_only=True),
    ]
    speculate: Annotated[
        Literal["auto", "mtp", "off"],
        Option(
            "Draft tokens that repeat the prompt, or those of the checkpoint's own head, where weights arrive more "
            "slowly than they compute; mtp: the head's in any case; off: never.",
            "auto",
            panel=Panel.TUNING,
            file_only=True,
        ),
    ]
    host_kv: Annotated[
        str,
        Option(
            "Most RAM for keys and values beyond a GPU's: 8GiB, 50%, auto, off.",
            "auto",
            panel=Panel.TUNING,
            metavar="SIZE|off",
            key=True,
        ),
    ]
    cpu_experts: Annotated[
        Literal["auto", "off"],
        Option(
            "Let the CPU compute some experts beside a GPU where that is faster; off: never.",
            "auto",
            panel=Panel.TUNING,
            key=True,
        ),
    ]
    cpu_attention: Annotated[
        Literal["auto", "off"],
        Option(
            "Let the CPU attend to sequences that --host-kv keeps in host memory where that is faster; off: never.",
            "auto",
            panel=Panel.TUNING,
            key=True,
        ),
    ]


class StreamingOptions(TypedDict, total=False):
    """Which experts are read in a pass."""

    stream: Annotated[
        Literal["auto", "all", "wanted", "wanted+forecast"],
        Option(
            "Experts to read: all, those routed to, or also a forecast.", "auto", panel=Panel.TUNING, file_only=True
        ),
    ]


class EngineOptions(BudgetOptions, ComputeOptions, total=False):
    """How a model is computed, and with what memory."""

    tokens_per_pass: Annotated[
        int | None,
        Option(
            "Most tokens per forward pass; chosen from the job and the memory by default.",
            panel=Panel.TUNING,
            low=1,
            key=True,
            example="4096",
        ),
    ]
    max_sequences: Annotated[
        int | None,
        Option(
            "Most sequences in a batch; chosen from the job and the memory by default.",
            panel=Panel.TUNING,
            low=1,
            key=True,
            example="256",
        ),
    ]


class ClusterOptions(TypedDict, total=False):
    """A job on a Ray cluster."""

    ray: Annotated[
        str | None,
        Option(
            "Compute on the workers of this Ray cluster; budgets are those of each worker.",
            panel=Panel.BUDGETS,
            metavar="ADDRESS|local",
        ),
    ]
    ray_workers: Annotated[
        int | None,
        Option(
            "Engines on the Ray cluster; by default one per GPU, or per node.",
            panel=Panel.BUDGETS,
            low=1,
            file_only=True,
            example="4",
        ),
    ]


class AnswerLength(TypedDict, total=False):
    """How long answers are."""

    max_tokens: Annotated[
        int,
        Option(
            "max_tokens for rows that do not set it.", 256, panel=Panel.SAMPLING, low=1, key=True, common=True,
            example="1024",
        ),
    ]  # fmt: skip


class SeedOptions(TypedDict, total=False):
    """What sampling draws from."""

    seed: Annotated[int, Option("Seed for rows that do not set one.", 0, panel=Panel.SAMPLING, low=0, key=True)]


class SamplingOptions(SeedOptions, total=False):
    """How answers are drawn where rows do not say; temperatures of None are the model's."""

    temperature: Annotated[
        float | None,
        Option(
            "Temperature for rows that do not set it; 0 is greedy. By default the model's generation_config.json "
            "says it, else 0.",
            panel=Panel.SAMPLING,
            low=0.0,
            key=True,
            common=True,
            example="0.7",
        ),
    ]
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Option(
            "reasoning_effort of the chat template, for rows that do not set it.",
            panel=Panel.SAMPLING,
            key=True,
            example='"low"',
        ),
    ]
    max_thinking_tokens: Annotated[
        int | None,
        Option(
            "Most tokens of reasoning before a chat answer, for rows that do not set it.",
            panel=Panel.SAMPLING,
            low=0,
            key=True,
            example="2048",
        ),
    ]
    chat_template_kwargs: Annotated[
        str | Mapping[str, Any] | None,
        Option(
            "Variables of the chat template as a JSON object, for rows that do not set them: "
            "'{\"enable_thinking\": false}'.",
            panel=Panel.SAMPLING,
            metavar="JSON",
            takes=Takes.JSON,
            key=True,
            example="'{\"enable_thinking\": false}'",
        ),
    ]


class RowOptions(TypedDict, total=False):
    """What rows are read from the input file, and what their prompts are made of (docs/batches.md)."""

    input_format: Annotated[
        Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "txt"],
        Option("Format of INPUT; auto goes by its suffix, and takes a pipe as JSON lines.", "auto", panel=Panel.ROWS),
    ]
    prompt_column: Annotated[
        str | None,
        Option("The column, or field, that holds the prompt.", panel=Panel.ROWS, metavar="NAME", common=True),
    ]
    id_column: Annotated[
        str | None, Option("The column, or field, that holds the id.", panel=Panel.ROWS, metavar="NAME", common=True)
    ]
    prompt: Annotated[
        str | Path | None,
        Option(
            "Template of every prompt; {{ NAME }} is a column of the row.",
            panel=Panel.ROWS,
            metavar=_TEMPLATE,
            common=True,
        ),
    ]
    system: Annotated[
        str | Path | None,
        Option("Template of a system message before every prompt.", panel=Panel.ROWS, metavar=_TEMPLATE),
    ]
    schema: Annotated[
        str | Path | None,
        Option(
            "JSON schema of every answer, unless a row has its own.",
            panel=Panel.ROWS,
            metavar="FILE",
            takes=Takes.INPUT,
            common=True,
        ),
    ]
    choices: Annotated[
        str | Sequence[str] | None,
        Option(
            "Score these answers instead of generating one, unless a row has its own: 'invoice, letter, contract'.",
            panel=Panel.ROWS,
            metavar="A,B,...",
        ),
    ]
    chat: Annotated[
        bool | None,
        Option(
            "Prompts become messages of a user; by default those from columns do, if the model has a chat template.",
            panel=Panel.ROWS,
            flags=("--chat/--no-chat",),
        ),
    ]


class StoppingOptions(TypedDict, total=False):
    """When a job stops early, and what it may be resumed with. It can always be resumed."""

    until: Annotated[
        str | None,
        Option(
            "Stop at this time of day (resumable).",
            panel=Panel.STOPPING,
            metavar="HH:MM",
            key=True,
            common=True,
            example='"07:00"',
        ),
    ]
    max_rows: Annotated[
        int | None,
        Option("Stop after N rows of this run (resumable).", panel=Panel.STOPPING, metavar="N", low=1, common=True),
    ]
    max_failures: Annotated[
        str | int | None,
        Option(
            "Stop when more rows of the job than this have failed: a number, or a percentage.",
            panel=Panel.STOPPING,
            metavar="N|P%",
            key=True,
            example='"5%"',
        ),
    ]
    accept_drift: Annotated[
        str | list[str] | None,
        Option(
            "Continue although this setting differs from the original job (repeatable).",
            panel=Panel.STOPPING,
            metavar="NAME",
        ),
    ]


class TableOptions(TypedDict, total=False):
    """How tables are written."""

    csv_bom: Annotated[
        bool,
        Option("Begin CSV with a byte order mark, by which Excel knows UTF-8.", False, panel=Panel.OUTPUT, key=True),
    ]


class JobOptions(RowOptions, AnswerLength, SamplingOptions, StoppingOptions, TableOptions, total=False):
    """What a job over a file of rows does, on whatever engine."""

    lenient: Annotated[
        bool,
        Option(
            "Write malformed lines as error rows instead of refusing the input.",
            False,
            panel=Panel.ROWS,
            key=True,
            common=True,
        ),
    ]
    csv_safe: Annotated[
        bool,
        Option(
            "In CSV, no cell is a formula of a spreadsheet: text that begins like one gets a ' in front.",
            False,
            flags=("--csv-safe/--no-csv-safe",),
            panel=Panel.OUTPUT,
            key=True,
        ),
    ]
    overwrite: Annotated[
        bool,
        Option(
            "Start over: remove the job of this output and its files first.", False, panel=Panel.OUTPUT, common=True
        ),
    ]


class PlanFile(TypedDict, total=False):
    """A plan that was made before."""

    plan: Annotated[
        str | Path | None,
        Option("Run a plan written by `moedge plan --save` on this machine.", panel=Panel.BUDGETS, takes=Takes.INPUT),
    ]


class BatchOptions(EngineOptions, StreamingOptions, JobOptions, ClusterOptions, PlanFile, total=False):
    """The options of `moedge batch` and `run_batch`: a job that loads an engine of its own."""


class WorkloadOptions(TypedDict, total=False):
    """What is planned for where no rows are known."""

    rows: Annotated[int, Option("Number of rows, without INPUT.", 1000, low=1, common=True)]
    prompt_tokens: Annotated[int, Option("Tokens per prompt, without INPUT.", 512, low=1, common=True)]


class LLMOptions(EngineOptions, StreamingOptions, WorkloadOptions, SeedOptions, total=False):
    """The options of an `LLM`. Its plan is made once, for `rows` prompts of `prompt_tokens` and `output_tokens`; any
    other number works, too."""

    output_tokens: Annotated[int, Option("Tokens per answer.", 256, low=1)]
    max_model_len: Annotated[
        int | None, Option("Tokens of the longest sequence, prompt and answer; 4096 if the context allows.", low=2)
    ]


class EnergyOptions(TypedDict, total=False):
    """What a job's energy is counted with."""

    watts: Annotated[
        float | None,
        Option(
            "What the whole machine takes while it computes: says the energy of the job.",
            panel=Panel.OUTPUT,
            low=1,
            key=True,
            example="180",
        ),
    ]
    price: Annotated[
        str | None,
        Option(
            "What a kWh costs, with --watts: says what the energy costs.",
            panel=Panel.OUTPUT,
            metavar="0.30/kWh",
            key=True,
            example='"0.30/kWh"',
        ),
    ]
    hosted: Annotated[
        str | None,
        Option(
            "A hosted price of a million tokens, of prompts and generated, to compare.",
            panel=Panel.OUTPUT,
            metavar="0.10,0.40",
            key=True,
            example='"0.10,0.40"',
        ),
    ]


class PlanOptions(EngineOptions, WorkloadOptions, AnswerLength, RowOptions, EnergyOptions, total=False):
    """The options of `moedge plan` and `plan`."""

    machine: Annotated[
        str | Path | None,
        Option("Plan for the machine that `moedge doctor --json` wrote to this file.", takes=Takes.INPUT, common=True),
    ]
    gpu: Annotated[
        str | None,
        Option('Plan for a GPU that is not here, by its data sheet: "RTX 3060 12GB".', metavar="NAME", common=True),
    ]
