"""`moedge serve`: the engine, the batches and the HTTP server from start to stop."""

import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import FrameType

import uvicorn

from ...face import JobFolder, JobLock, public_name
from .app import Service, Turns, make_app
from .batches import BatchQueue
from .engine_thread import EngineThread
from .files import FileStore
from .gate import RequestGate, bounded_protocol
from .limits import ServerLimits, ServerSettings
from .listener import listen
from .live import RequestReader

_ANSWERS_END_SECONDS = 10
_WANTED_FILES = 4096
# Connections that are taken at once, before any of them is counted.
_BACKLOG = 128


class _Server(uvicorn.Server):
    """Ends passes as soon as a signal comes: open answers would hold the stop otherwise."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.stop()
        super().handle_exit(sig, frame)


class RunningServer:
    """A server whose model is loaded: `run` answers until `stop` or a signal."""

    def __init__(self, server: _Server, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._server = server
        self._listener = listener

    def run(self) -> None:
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """From any thread."""
        self._server.should_exit = True


@contextmanager
def open_server(settings: ServerSettings) -> Iterator[RunningServer]:
    """Loads the model; after the context unfinished batches stay to be resumed.

    Raises what loading a model raises, BadArgument for an address that cannot be listened on, JobInUse for a folder
    that another server uses, and in the end what has ended the engine.
    """
    settings.check()
    settings = replace(settings, limits=replace(settings.limits, connections=_most_connections(settings.limits)))
    folder, limits, failed = settings.open_folder(), settings.limits, list[BaseException]()
    with ExitStack() as resources:
        listener = resources.enter_context(listen(settings.host, settings.port))
        resources.enter_context(closing(JobLock(JobFolder(folder))))
        files, engine = FileStore(folder, limits), EngineThread(settings.model, settings.options)
        batches = BatchQueue(folder, files, engine, settings)
        resources.callback(engine.close)
        resources.callback(batches.close)
        resources.callback(engine.stop)
        engine.start()
        loaded = engine.ready.result()
        name = public_name(settings.model)
        reader = RequestReader(loaded, name, settings.max_tokens, settings.seed)
        turns = Turns(limits.waiting_nbytes)
        service = Service(name, int(time.time()), loaded, engine, reader, files, batches, limits, turns)
        server = _Server(_config(settings, service), engine)
        running = RunningServer(server, listener)

        def end(error: BaseException | None) -> None:
            if error is not None:
                failed.append(error)
            running.stop()

        engine.died.add_done_callback(lambda died: end(died.result()))
        batches.died = end
        batches.start()
        yield running
    if failed:
        raise failed[0]


def serve(settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Answers until a signal comes. Raises as `open_server`."""
    with open_server(settings) as server:
        say(f"listening on {server.url}; Ctrl-C stops after the pass")
        server.run()


def _most_connections(limits: ServerLimits) -> int:
    """Half of the files that this process may open: the other half is for batches."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < _WANTED_FILES:
        most = _WANTED_FILES if hard == resource.RLIM_INFINITY else max(most, min(hard, _WANTED_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return min(limits.connections, most // 2)


def _config(settings: ServerSettings, service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        RequestGate(make_app(service), settings.key, settings.limits, service.engine.counts),
        http=bounded_protocol(settings.limits),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        # The gate answers in the API's shape before this one is reached.
        limit_concurrency=2 * settings.limits.requests,
        timeout_graceful_shutdown=_ANSWERS_END_SECONDS,
    )
