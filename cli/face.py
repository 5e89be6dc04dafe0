"""What commands of applications may use of the command line. Torch-free, and each name is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options.options import MODEL, ViewOptions, command, own_file, say, say_device
    from .options.signals import Stopped
    from .views.job_view import JobView, prefix_cache, summary_table
    from .views.progress import stages_on

_MODULES = {
    # A command: the argument MODEL, parameters from declared options, checks of paths, lines on stderr.
    "MODEL": ".options.options",
    "command": ".options.options",
    "own_file": ".options.options",
    "say": ".options.options",
    "say_device": ".options.options",
    # What a person sees while it works.
    "JobView": ".views.job_view",
    "Stopped": ".options.signals",
    "ViewOptions": ".options.options",
    "prefix_cache": ".views.job_view",
    "stages_on": ".views.progress",
    "summary_table": ".views.job_view",
}

__all__ = [
    "JobView",
    "MODEL",
    "Stopped",
    "ViewOptions",
    "command",
    "own_file",
    "prefix_cache",
    "say",
    "say_device",
    "stages_on",
    "summary_table",
]


if not TYPE_CHECKING:
    # To type checkers a module with this function has every name.
    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name], __package__), name)
