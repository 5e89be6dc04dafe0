"""`moedge serve`: OpenAI's API, with its batches, on one model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import options
from .options.paths import new_folder

_PACKAGES = ("fastapi", "uvicorn", "python_multipart")
HOST = Annotated[str, typer.Option("--host", help="Address to listen on; any but this machine's own needs an API key.")]
PORT = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 finds a free one.")]
API_KEY = Annotated[
    str | None,
    typer.Option("--api-key", envvar="MOEDGE_API_KEY", show_envvar=False, help="Key that every request must have."),
]
STATE_DIR = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        callback=new_folder,
        help="Folder for files and batches; by default one for the model in your state.",
    ),
]
MAX_MODEL_LEN = Annotated[
    int | None,
    typer.Option("--max-model-len", min=2, help="Tokens of the longest sequence, prompt and answer; 4096 by default."),
]
MAX_UPLOAD = Annotated[str, typer.Option("--max-upload", help="Size of the largest file that may be uploaded.")]


def serve(
    model: options.MODEL,
    host: HOST = "127.0.0.1",
    port: PORT = 8000,
    api_key: API_KEY = None,
    state_dir: STATE_DIR = None,
    max_upload: MAX_UPLOAD = "512MiB",
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    max_model_len: MAX_MODEL_LEN = None,
    deterministic: options.DETERMINISTIC = False,
    attention: options.ATTENTION = options.Attention.AUTO,
    stream: options.STREAM = options.Stream.AUTO,
    max_tokens: options.MAX_TOKENS = 512,
    seed: options.SEED = 0,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
) -> None:
    """Answer OpenAI's API: files, batches, chats and completions, on one engine.

    Code for the hosted API works with its `base_url` set to http://127.0.0.1:8000/v1. A batch is a job: it survives a
    kill of the server, which resumes it. Ctrl-C stops after the current pass.
    """
    from ..runtime.api.options import LLMOptions
    from ..runtime.settings.errors import MissingExtra

    if [name for name in _PACKAGES if find_spec(name) is None]:
        raise MissingExtra("moedge serve needs FastAPI, uvicorn and python-multipart", "serve")
    given = locals()
    engine = {name: given[name] for name in LLMOptions.__annotations__ if given.get(name) is not None}
    options.say_device(gpu_mem)
    _serve(given, engine)


def _serve(given: dict[str, Any], engine: dict[str, Any]) -> None:
    """`engine` are options of an LLM, `given` has those of the server, too."""
    from rich.console import Console

    from ..offload.budget import parse_size
    from ..runtime.serve.listener import refuse_taken
    from ..runtime.settings.stages import stage, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    model = given["model"]
    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(model):
            # A model, or an address, that is refused is refused before torch is imported.
            refuse_taken(given["host"], given["port"])
        with stage("importing torch"):
            from ..runtime.serve.limits import Limits
            from ..runtime.serve.server import ServerSettings, serve
        limits = Limits(upload_nbytes=parse_size(given["max_upload"], 1 << 62, 1 << 62))
        server = {name: given[name] for name in ("host", "port", "max_tokens", "seed")}
        server |= {"key": given["api_key"], "folder": given["state_dir"], "options": engine, "limits": limits}
        serve(ServerSettings(model, **server), options.say)
