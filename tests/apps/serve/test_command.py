"""`moedge serve` before anything is loaded: what is refused, and what reaches the server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.apps.serve import command
from moedge.runtime.settings.errors import install_line

Cli = Callable[..., int]


def test_a_missing_package_names_its_install_line(
    checkpoint: Callable[[str], Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert cli("serve", checkpoint("llama")) == 6
    refused = " ".join(capsys.readouterr().err.split())
    needed = "moedge serve needs FastAPI, uvicorn and python-multipart, which is not installed: "
    assert needed + install_line("serve") in refused


def test_an_address_that_others_reach_needs_a_key(
    checkpoint: Callable[[str], Path], cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("serve", checkpoint("llama"), "--host", "0.0.0.0") == 2
    assert "--host 0.0.0.0 is open to others and needs --api-key" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_loading(
    checkpoint: Callable[[str], Path], cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli("serve", checkpoint("llama"), "--port", port, "--state-dir", tmp_path / "served") == 2
    assert "choose another --port" in capsys.readouterr().err


SERVE: dict[str, tuple[str | None, Callable[[Any], object], object]] = {
    "--host": ("::1", lambda settings: settings.host, "::1"),
    "--port": ("9000", lambda settings: settings.port, 9000),
    "--api-key": ("0123456789abcdef", lambda settings: settings.key, "0123456789abcdef"),
    "--state-dir": ("/one/folder", lambda settings: settings.folder, Path("/one/folder")),
    "--max-upload": ("1MiB", lambda settings: settings.limits.upload_nbytes, 1 << 20),
    "--max-tokens": ("9", lambda settings: settings.max_tokens, 9),
    "--seed": ("4", lambda settings: settings.seed, 4),
    "--max-model-len": ("90", lambda settings: settings.options.get("max_model_len"), 90),
    "--quant": ("int4", lambda settings: settings.options["quant"], "int4"),
    "--ram": ("3GiB", lambda settings: settings.options["ram"], "3GiB"),
    "--deterministic": (None, lambda settings: settings.options["deterministic"], True),
}


@pytest.mark.parametrize("flag", SERVE)
def test_the_server_gets_what_was_typed(
    flag: str, checkpoint: Callable[[str], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedge.apps.serve import listener, server

    seen: list[Any] = []
    monkeypatch.setattr(listener, "refuse_taken", lambda host, port: None)
    monkeypatch.setattr(server, "serve", lambda settings, say: seen.append(settings))
    value, arrived, wanted = SERVE[flag]
    assert cli("serve", checkpoint("llama")) == 0
    assert cli("serve", checkpoint("llama"), flag, *([] if value is None else [value])) == 0
    plain, asked = map(arrived, seen)
    assert asked == wanted != plain


def test_a_key_from_the_environment_is_not_printed(
    checkpoint: Callable[[str], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moedge.apps.serve import server

    seen: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda settings, say: seen.append(settings))
    monkeypatch.setenv("MOEDGE_API_KEY", "a key that is secret")
    assert cli("serve", checkpoint("llama")) == 0
    assert cli("config", "show") == 0
    assert cli("config", "show", "--json") == 0
    printed = capsys.readouterr()
    assert seen[0].key == "a key that is secret"
    assert "api-key ***" in printed.err
    assert "is secret" not in printed.out + printed.err
