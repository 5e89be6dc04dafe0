"""Applications (`apps/`), each of which may be left out: found by name, and asked for what they add to the core."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_APPS = f"{__name__.partition('.')[0]}.apps"


def application(name: str, module: str) -> Any | None:
    """A module of an application; None where the application is left out, or has no such module."""
    package = f"{_APPS}.{name}"
    try:
        return import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        if error.name not in (_APPS, package, f"{package}.{module}"):
            raise
        return None


def hooks(name: str) -> list[Any]:
    """What applications call `name` in their module `hooks`, where the core looks for it."""
    found = [application(each.name, "hooks") for each in iter_modules(import_module(_APPS).__path__)]
    return [getattr(each, name) for each in found if hasattr(each, name)]
