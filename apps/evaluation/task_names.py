"""Which names cannot be a task of lm-eval, before it is imported and reads thousands of files as YAML. Torch-free."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...face import errors

# What lm-eval takes for a pattern, or for a task's file.
_MORE_THAN_A_NAME = frozenset("*?[]/")


def refuse_unknown_tasks(tasks: Sequence[str], folder: Path | None = None) -> None:
    """Raises BadArgument for one of `tasks` that no YAML file of lm-eval or below `folder` has.

    A name that one of them has may still be no task: lm-eval decides.
    """
    left = {task: task.encode() for task in tasks if _MORE_THAN_A_NAME.isdisjoint(task)}
    for root in (*_own_folders(), *(() if folder is None else (folder,))):
        for file in root.rglob("*.yaml"):
            if not left:
                return
            text = file.read_bytes()
            left = {task: name for task, name in left.items() if name not in text}
    if left:
        raise unknown_tasks(list(left))


def unknown_tasks(tasks: Sequence[str]) -> errors.BadArgument:
    return errors.BadArgument(f"lm-eval has no task {', '.join(tasks)}; `lm-eval ls tasks` lists those that it has")


def _own_folders() -> list[Path]:
    spec = find_spec("lm_eval")
    return [Path(each, "tasks") for each in (spec.submodule_search_locations if spec else None) or ()]
