"""Files of standing settings: what is written in them, and on which line. Knows TOML, not what the settings mean."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT_FILE = "moedge.toml"
# A page of settings is a few kilobytes; anything large was not written for this.
_MOST_NBYTES = 1 << 20


class ConfigError(ValueError):
    """A setting is unknown or wrong; the message begins with where it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`command` is "" for a setting that stands above all tables and serves every command; `place` is `FILE:LINE`."""

    command: str
    key: str
    value: Any
    place: str
    folder: Path


def config_paths() -> tuple[Path, Path]:
    """The user's file and the one of the current folder, which counts for more."""
    from platformdirs import user_config_path

    return user_config_path("moedge") / PROJECT_FILE, Path(PROJECT_FILE)


def read_entries(path: Path) -> list[Entry]:
    """Nothing where there is no file. Raises ConfigError."""
    text = _text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    return list(_entries(document, path, _lines(text)))


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG((status := os.stat(path)).st_mode) or status.st_size > _MOST_NBYTES:
            raise ConfigError(f"{path}: a regular file of at most 1 MiB was wanted")
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _entries(document: dict[str, Any], path: Path, lines: dict[tuple[str, str], int]) -> Iterator[Entry]:
    for name, value in document.items():
        command, inner = (name, value) if isinstance(value, dict) else ("", {name: value})
        for key, setting in inner.items():
            line = lines.get((command, key))
            yield Entry(command, key, setting, f"{path}:{line}" if line else f"{path}", path.parent)


def _lines(text: str) -> dict[tuple[str, str], int]:
    """The line of every key by table. TOML's own reader keeps none; a table that is written inline is not found."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[\s*[\"']?([\w-]+)[\"']?\s*\]", line):
            table = header[1]
        elif key := re.match(r"\s*(?:([\w-]+)\s*\.\s*)?[\"']?([\w-]+)[\"']?\s*=", line):
            found.setdefault((key[1] or table, key[2]), number)
    return found
