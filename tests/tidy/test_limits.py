"""Sizes that keep the code readable, and the words it uses."""

import ast
import re

from tests.tidy.sources import EVERYTHING, PRODUCT, ROOT, functions, sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_COLUMNS = 100
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
WRONG_WORDS = re.compile(r"^(page|pages|page_ids?|page_tables?|num_pages|pages_per_\w+)$")


def texts() -> dict[str, list[str]]:
    """Lines of every source file we write by hand, by path."""
    found = {source.path: source.text for source in sources(*EVERYTHING)}
    found |= {path: path.read_text() for path in (ROOT / "proto").rglob("*.proto")}
    found |= {path: path.read_text() for path in (ROOT / "tools").glob("*.sh")}
    return {str(path.relative_to(ROOT)): text.splitlines() for path, text in found.items()}


def test_files_are_short():
    long = {path: len(lines) for path, lines in texts().items() if len(lines) > MAX_FILE_LINES}
    assert not long, f"split these files, at most {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    long = {}
    for source in sources(*EVERYTHING):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long[f"{source.at(node)} {node.name}"] = num_lines
    assert not long, f"split these functions, at most {MAX_FUNCTION_LINES} lines: {long}"


def test_lines_are_short():
    long = [
        f"{path}:{number}"
        for path, lines in texts().items()
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_COLUMNS
    ]
    assert not long, f"more than {MAX_COLUMNS} columns: {long}"


def test_nothing_is_left_for_later():
    marks = [
        f"{path}:{number}"
        for path, lines in texts().items()
        for number, line in enumerate(lines, 1)
        if UNFINISHED.search(line)
    ]
    assert not marks, f"finish these or file an issue: {marks}"


def test_blocks_are_called_blocks():
    wrong = [
        f"{source.at(node)} {name}"
        for source in sources(*PRODUCT)
        for node in ast.walk(source.tree)
        for name in [getattr(node, "id", None) or getattr(node, "arg", None) or ""]
        if WRONG_WORDS.match(name)
    ]
    assert not wrong, f"say block: {wrong}"


def test_public_code_has_docstrings():
    missing = []
    for source in sources(*PRODUCT):
        if not ast.get_docstring(source.tree):
            missing.append(source.at(source.tree))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and is_public(node.name):
                missing += [] if ast.get_docstring(node) else [f"{source.at(node)} {node.name}"]
        for name, function in functions(source.tree):
            if is_public(name) and not ast.get_docstring(function):
                missing.append(f"{source.at(function)} {name}")
    assert not missing, f"public and without a docstring: {missing}"


def test_functions_are_annotated():
    missing = []
    for source in sources(*PRODUCT):
        for name, function in functions(source.tree):
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            starred = [item for item in (arguments.vararg, arguments.kwarg) if item]
            bare = [
                item.arg
                for item in [*named, *starred]
                if item.annotation is None and item.arg not in ("self", "cls")
            ]
            if bare or function.returns is None:
                missing.append(f"{source.at(function)} {name} {bare or 'return'}")
    assert not missing, f"without annotations: {missing}"


def is_public(dotted: str) -> bool:
    """Whether no part of a dotted name starts with an underscore."""
    return not any(part.startswith("_") for part in dotted.split("."))
