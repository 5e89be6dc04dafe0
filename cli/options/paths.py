"""Checks options that take a path before any work begins, so that no job fails at its end for a typing error."""

from __future__ import annotations

import os
from pathlib import Path

import typer

# What the files that commands write begin with, as far as their own layouts go.
_OURS = (b'"schema": "moedge.', b"<!-- a report of moedge -->")
_HEAD_NBYTES = 256


def writable_file(path: Path | None) -> Path | None:
    """Refuses a name in a folder that is not there or not writable, and the name of a folder."""
    if path is None or str(path) == "-":
        return path
    try:
        folder = path.parent
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; give a file name in it")
        if not folder.is_dir():
            raise typer.BadParameter(f"the folder {folder} does not exist; create it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"the folder {folder} is not writable; choose another file")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be written ({error}); choose another file") from None
    return path


def new_file(path: Path | None) -> Path | None:
    """The same, and refuses every file that exists."""
    if writable_file(path) is not None and os.path.lexists(path or ""):
        raise typer.BadParameter(f"{path} exists and is not overwritten; move it away or choose another file")
    return path


def own_file(path: Path | None) -> Path | None:
    """The same, but a file that moedge wrote is replaced."""
    if writable_file(path) is None or path is None or not os.path.lexists(path):
        return path
    if not path.is_file() or not any(mark in _head(path) for mark in _OURS):
        raise typer.BadParameter(
            f"{path} exists and was not written by moedge: it is not overwritten; move it away or choose another file"
        )
    return path


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_NBYTES)
    except OSError:
        return b""


def new_folder(path: Path | None) -> Path | None:
    """Refuses a file; the folder may exist, and its nearest existing parent must be writable."""
    if path is None:
        return None
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not existing.is_dir():
            raise typer.BadParameter(f"{existing} is a file, wanted a folder; choose another name")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"the folder {existing} is not writable; choose another one")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be a folder ({error}); choose another name") from None
    return path


def readable_file(path: Path | None) -> Path | None:
    """Refuses what is missing, a folder, or not readable."""
    if path is None:
        return None
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder, wanted a file")
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{path} cannot be read: {reason}") from None
