"""Who imports whom in the product's folders: files and folders as nodes, type-only imports included."""

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

Edges = Mapping[str, set[str]]
# The files of api that hand on names of every floor when they are asked for, or begin a command: nothing imports them.
DOORS = {"api", "api.__main__", "api.ray"}


class ImportGraph:
    """`files` maps a module ("runtime.plan.planner") to the modules it imports; `folders` does the same for folders.

    A folder is the files directly in it: `quant` and `quant.kernels` are two. The files of `api` are those of the
    package moedge itself: `moedge.llm` is `api.llm`. Its DOORS are a folder of their own, `moedge`. Where an
    application imports a public name from `moedge` there is no edge: which module has it is known when it is used.
    """

    def __init__(self, root: Path, floors: tuple[str, ...]) -> None:
        paths = [path for floor in floors for path in sorted((root / floor).rglob("*.py"))]
        self.paths = {_module(path.relative_to(root)): path for path in paths}
        self.files: Edges = {module: set(self._imports(module)) for module in self.paths}

    @cached_property
    def folders(self) -> Edges:
        edges: dict[str, set[str]] = {self.folder(module): set() for module in self.paths}
        for module, imported in self.files.items():
            edges[self.folder(module)] |= {self.folder(other) for other in imported} - {self.folder(module)}
        return edges

    def folder(self, module: str) -> str:
        if module in DOORS:
            return "moedge"
        return module if self.paths[module].name == "__init__.py" else module.rpartition(".")[0]

    def _imports(self, module: str) -> Iterator[str]:
        package = module if self.paths[module].name == "__init__.py" else module.rpartition(".")[0]
        parents = [] if package == "api" else package.split(".")
        for node in ast.walk(ast.parse(self.paths[module].read_text())):
            if isinstance(node, ast.ImportFrom):
                named = [] if node.module is None else node.module.split(".")
                base = parents[: len(parents) - node.level + 1] if node.level else []
                parts = [*base, *named[not node.level and named[:1] == ["moedge"] :]]
                found = [self._ours([*parts, alias.name]) for alias in node.names]
                door = None if module.startswith("apps.") else "api"
                ours = self._ours(parts) if parts else door
                yield from filter(None, (each or ours for each in found))
            elif isinstance(node, ast.Import):
                yield from filter(None, (self._ours(alias.name.split(".")[1:]) for alias in node.names))

    def _ours(self, parts: list[str]) -> str | None:
        """The module of the product that `parts` behind `moedge` name."""
        name = ".".join(parts)
        return next((each for each in (name, f"api.{name}") if each in self.paths), None)


def circles(edges: Edges) -> list[set[str]]:
    """The strongly connected parts of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            part = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            found.extend([part] if len(part) > 1 else [])

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
