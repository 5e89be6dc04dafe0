"""Who imports whom in the product's folders: files and folders as nodes, type-only imports included."""

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

Edges = Mapping[str, set[str]]


class ImportGraph:
    """`files` maps a module ("runtime.plan.planner") to the modules it imports; `folders` does the same for folders.

    A folder is the files directly in it: `quant` and `quant.kernels` are two. `api` is the package moedge itself, so
    its relative imports begin at the root.
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
        return module if self.paths[module].name == "__init__.py" else module.rpartition(".")[0]

    def _imports(self, module: str) -> Iterator[str]:
        package = [part for part in self.folder(module).split(".") if part != "api" or module.startswith("runtime.")]
        for node in ast.walk(ast.parse(self.paths[module].read_text())):
            if isinstance(node, ast.ImportFrom):
                absolute = (node.module or "").removeprefix("moedge").strip(".").split(".")
                base = package[: len(package) - node.level + 1] + (node.module or "").split(".") * bool(node.module)
                parts = base if node.level else absolute
                candidates = [".".join([*parts, alias.name]) for alias in node.names]
                yield from (name if name in self.paths else ".".join(parts) for name in candidates if self._ours(parts))
            elif isinstance(node, ast.Import):
                names = [alias.name.removeprefix("moedge.") for alias in node.names]
                yield from (name for name in names if name in self.paths)

    def _ours(self, parts: list[str]) -> bool:
        return ".".join(parts) in self.paths


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
