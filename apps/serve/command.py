"""`moedge serve`: OpenAI's API, with its batches, on one model."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Unpack

from ...cli.face import MODEL, command, say, say_device
from ...face import option, options

_PACKAGES = ("fastapi", "uvicorn", "python_multipart")


class ServeCommand(
    options.EngineOptions, options.StreamingOptions, options.AnswerLength, options.SeedOptions, total=False
):
    """The options of `moedge serve`."""

    host: Annotated[
        str,
        option.Option("Address to listen on; any but this machine's own needs an API key.", "127.0.0.1", common=True),
    ]
    port: Annotated[int, option.Option("Port to listen on; 0 finds a free one.", 8000, low=0, high=65535, common=True)]
    api_key: Annotated[
        str | None, option.Option("Key that every request must have.", key=True, common=True, example='"..."')
    ]
    state_dir: Annotated[
        Path | None,
        option.Option(
            "Folder for files and batches; by default one for the model in your state.",
            takes=option.Takes.FOLDER,
            common=True,
        ),
    ]
    max_upload: Annotated[str, option.Option("Size of the largest file that may be uploaded.", "512MiB", common=True)]
    max_model_len: Annotated[
        int | None,
        option.Option("Tokens of the longest sequence, prompt and answer; 4096 by default.", low=2, common=True),
    ]


@command(ServeCommand, max_tokens={"default": 512})
def serve(model: MODEL, **given: Unpack[ServeCommand]) -> None:
    """Answer OpenAI's API: files, batches, chats and completions, on one engine.

    Code for the hosted API works with its `base_url` set to http://127.0.0.1:8000/v1. A batch is a job: it survives a
    kill of the server, which resumes it. Ctrl-C stops after the current pass.
    """
    from ...face import errors

    if [name for name in _PACKAGES if find_spec(name) is None]:
        raise errors.MissingExtra("moedge serve needs FastAPI, uvicorn and python-multipart", "serve")
    say_device(given["gpu_mem"])
    _serve(model, given)


def _serve(model: str, given: ServeCommand) -> None:
    from rich.console import Console

    from ...cli.face import stages_on
    from ...face import open_source, parse_size, stage, watching
    from .listener import refuse_taken

    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(model):
            # A model, or an address, that is refused is refused before torch is imported.
            refuse_taken(given["host"], given["port"])
        with stage("importing torch"):
            from .limits import ServerLimits, ServerSettings
            from .server import serve
        limits = ServerLimits(upload_nbytes=parse_size(given["max_upload"], 1 << 62, 1 << 62))
        settings = ServerSettings(
            model,
            host=given["host"],
            port=given["port"],
            max_tokens=given["max_tokens"],
            seed=given["seed"],
            key=given["api_key"],
            folder=given["state_dir"],
            options=given,
            limits=limits,
        )
        serve(settings, say)
