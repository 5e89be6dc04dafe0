"""Hub ids, against a small hub on 127.0.0.1: what is fetched, what is sent, what happens when replies are bad."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SHA = {"main": "a" * 40, "v2": "b" * 40}
WEIGHTS = bytes(range(256)) * 8192
WANTED = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"m",
    "chat_template.jinja": b"{{ x }}",
    "merges.txt": b"#",
}
UNWANTED = {
    "pytorch_model.bin": b"\x80\x04.",
    "modeling_evil.py": b"raise SystemExit(1)",
    "model.gguf": b"GGUF",
    "consolidated.safetensors": WEIGHTS,
    "original/model.safetensors": WEIGHTS,
}


@dataclass
class Hub:
    """`cut` says after how many bytes of a file the connection ends, once; `replace` what is sent for it."""

    files: dict[str, bytes] = field(default_factory=lambda: {**WANTED, **UNWANTED})
    cut: dict[str, int] = field(default_factory=dict)
    replace: dict[str, bytes] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> set[str]:
        return {path.split("/")[-1] for method, path, _ in self.seen if method == "GET" and "/resolve/" in path}

    def answer(self, path: str) -> bytes | None:
        if "/resolve/" in path:
            return self.files.get(path.split("/resolve/")[1].partition("/")[2])
        if "/tree/" in path:
            return json.dumps([self._entry(name, data) for name, data in self.files.items()]).encode()
        revision = path.partition("/revision/")[2]
        if path.startswith("/api/models/") and revision in SHA:
            names = [{"rfilename": name} for name in self.files]
            return json.dumps({"id": "some/model", "sha": SHA[revision], "siblings": names}).encode()
        return None

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": etag(data)}


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.reply(with_body=False)

        def do_GET(self) -> None:
            self.reply(with_body=True)

        def reply(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.seen.append((self.command, path, {key.lower(): value for key, value in self.headers.items()}))
            name = path.split("/")[-1]
            data, status = hub.answer(path), hub.status.get(name, 200)
            if data is None:
                data, status = b"{}", 404
            body = hub.replace.get(name, data) if with_body else data
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            self.send_response(206 if begin and status == 200 else status)
            self.send_header("Content-Length", str(len(body) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
            self.send_header("ETag", f'"{etag(data)}"')
            self.send_header("X-Repo-Commit", next((sha for sha in SHA.values() if sha in path), SHA["main"]))
            self.end_headers()
            if with_body:
                self.close_connection = name in hub.cut
                self.wfile.write(body[begin : hub.cut.pop(name, len(body))])

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


FIND = """
import sys
from moedge.runtime.settings.errors import ModelNotFound
from moedge.runtime.source.hub import find_model
try:
    print(find_model(sys.argv[1]))
except ModelNotFound as error:
    print("refused:", error)
assert "torch" not in sys.modules
"""


def find(hub: Hub, cache: Path, name: str = "some/model", **environment: str) -> str:
    """What a person is told: the folder, or the refusal. The library reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    command = [sys.executable, "-c", FIND, name]
    run = subprocess.run(command, env={**kept, **settings}, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "Retrying" not in run.stderr, "the library tries for half a minute where nothing listens"
    return run.stdout.strip()


def test_only_weights_configuration_and_tokenizer_are_fetched(hub: Hub, tmp_path: Path) -> None:
    folder = Path(find(hub, tmp_path))
    assert {path.name for path in folder.rglob("*")} == set(WANTED) == hub.fetched()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not any("authorization" in headers for _, _, headers in hub.seen)


def test_a_revision_and_a_token_are_respected(hub: Hub, tmp_path: Path) -> None:
    folder = Path(find(hub, tmp_path, "some/model@v2", HF_TOKEN="hf_secret"))
    assert folder.name == SHA["v2"]
    assert {headers.get("authorization") for _, _, headers in hub.seen} == {"Bearer hf_secret"}
    refusal = find(hub, tmp_path, "some/model@v3", HF_TOKEN="hf_secret")
    assert refusal.startswith("refused: 'some/model@v3'")
    assert "hf_secret" not in refusal


def test_a_cached_model_is_found_without_a_hub(hub: Hub, tmp_path: Path) -> None:
    folder = find(hub, tmp_path)
    hub.seen.clear()
    assert find(hub, tmp_path, HF_HUB_OFFLINE="1") == folder
    assert not hub.seen
    assert find(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == folder
    refusal = find(hub, tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert refusal.startswith("refused: 'some/model' is not a local folder")
    assert not hub.seen


def test_a_second_look_fetches_nothing_again(hub: Hub, tmp_path: Path) -> None:
    find(hub, tmp_path)
    hub.seen.clear()
    find(hub, tmp_path)
    assert not hub.fetched()


def test_a_download_that_broke_off_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    """huggingface_hub writes pieces of 10 MiB, so what is resumed must be larger."""
    hub.files["model.safetensors"] = WEIGHTS * 6
    hub.cut["model.safetensors"] = len(WEIGHTS) * 11 // 2
    folder = Path(find(hub, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS * 6
    assert [headers["range"] for _, _, headers in hub.seen if "range" in headers] == [f"bytes={10 << 20}-"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_body_shorter_than_announced_never_becomes_a_file(file: str, hub: Hub, tmp_path: Path) -> None:
    hub.replace[file] = WANTED[file][:-1]
    refusal = find(hub, tmp_path)
    assert refusal.startswith("refused: 'some/model' is not a local folder")
    assert not list((tmp_path / "hub").rglob(f"snapshots/*/{file}"))


@pytest.mark.parametrize("reply", [b"", b"{", b"[]", b"<html>", b"\xff"])
def test_a_hub_that_answers_nonsense_is_a_refusal(reply: bytes, hub: Hub, tmp_path: Path) -> None:
    hub.replace["main"] = reply
    assert find(hub, tmp_path).startswith("refused: 'some/model' is not a local folder")


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_hub_that_refuses_is_named_in_the_refusal(status: int, hub: Hub, tmp_path: Path) -> None:
    hub.status["main"] = status
    assert find(hub, tmp_path).startswith("refused: 'some/model' is not a local folder")


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "../up", "./here", "~/x", "/abs", "-x/--y", "a b/c", ""])
def test_a_name_that_is_no_hub_id_asks_no_hub(name: str, hub: Hub, tmp_path: Path) -> None:
    if name:
        assert find(hub, tmp_path, name).startswith("refused:")
    assert not hub.seen


def test_why_a_hub_gives_nothing_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    refused = "refused: 'some/model' is not a local folder, and could not be downloaded from the hub: "
    found = find(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert found == f"{refused}it is not in the model cache, and HF_HUB_OFFLINE is set"
    found = find(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert found == f"{refused}it is not in the model cache, and the hub cannot be reached; check the connection"
    hub.status["main"] = 404
    assert not set(find(hub, tmp_path).removeprefix(refused)) & set("\n_("), "no text of the library's"
