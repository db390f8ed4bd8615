"""What the tidy tests look at: the repository's own Python files, as text and as syntax trees."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("radixkv", "kernels", "clients")
EVERYTHING = (*PRODUCT, "tests", "bench", "tools")
GENERATED = ROOT / "radixkv" / "v1"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """Where `node` is, for a failure's message: "radixkv/core/tree.py:12"."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files below `folders` of the repository, without generated or downloaded ones."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = []
    for path in paths:
        hidden = any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        if GENERATED not in path.parents and not hidden:
            text = path.read_text()
            found.append(Source(path, text, ast.parse(text)))
    return tuple(found)


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods with their dotted names, without those nested in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from functions(node, owner)


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Classes of a module, also those inside classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield node
            yield from classes(node)


def imported_modules(source: Source) -> Iterator[tuple[str, ast.stmt]]:
    """Absolute names of the modules that a file imports anywhere, with the import."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.at(node)}: write imports in full"
            yield node.module or "", node


def dotted_name(node: ast.AST) -> str:
    """The text of an expression like a.b.c, "" for what is not a plain dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
