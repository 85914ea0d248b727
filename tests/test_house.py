"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncache
from asyncache.core import VERSION

ROOT = Path(asyncache.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).parts)


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield f"{dotted(path)}:{node.lineno} {node.name}", node


def num_public_methods(node: ast.ClassDef) -> int:
    return sum(
        isinstance(part, FUNCTIONS) and not part.name.startswith("_")
        for part in node.body
    )


def run_alone(code: str) -> None:
    """Run code in an interpreter of its own, which must end without a word."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_has_at_most_400_lines():
    lines = {dotted(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_a_function_has_at_most_50_lines():
    lines = {
        name: node.end_lineno - node.lineno + 1 for name, node in nodes(*FUNCTIONS)
    }
    assert {name: count for name, count in lines.items() if count > 50} == {}


def test_a_class_has_at_most_15_public_methods():
    methods = {name: num_public_methods(node) for name, node in nodes(ast.ClassDef)}
    assert {name: count for name, count in methods.items() if count > 15} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=dotted)
def test_a_door_lists_in_order_what_it_has(package):
    module = importlib.import_module(dotted(package))
    names = getattr(module, "__all__", [])
    # Constants, then classes, then functions: the order that ruff keeps.
    in_order = sorted(
        names, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert names == in_order
    assert [name for name in names if not hasattr(module, name)] == []


def test_the_front_door_says_the_same_to_a_type_checker():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: line.module.removeprefix("asyncache.")
        for line in block.body
        for alias in line.names
    }
    assert seen == asyncache._ROOM_OF


def test_the_front_door_knows_its_names_and_no_others():
    assert set(asyncache.__all__) <= set(dir(asyncache))
    with pytest.raises(AttributeError, match="'asyncache' has no attribute 'Cache'"):
        _ = asyncache.Cache


def test_the_core_can_be_imported_where_there_is_no_torch():
    run_alone("""
import sys
sys.modules.update(dict.fromkeys(["torch", "anyio", "aiofiles", "cuda", "xxhash"]))
import asyncache.core
""")


def test_importing_asyncache_starts_no_thread_and_loads_no_torch():
    run_alone("""
import sys, threading
import asyncache
assert threading.active_count() == 1, threading.enumerate()
heavy = {"torch", "anyio", "asyncio", "aiofiles", "cuda", "sqlite3"} & set(sys.modules)
assert not heavy, heavy
""")


def test_ranks_compare_the_version_that_is_released():
    project = tomllib.loads(
        (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert project["project"]["version"] == VERSION
