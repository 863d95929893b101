"""The import graph of the package, read from its sources, and what importing `monarch.actor` brings in."""

from __future__ import annotations

import ast
import gc
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import define

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "monarch"
EXAMPLES = ROOT / "examples"

# From the bottom up: a module may import from its own layer and from those before it.
LAYERS = ("base", "verbs", "transports", "core", "launch", "supervision", "onesided", "mesh", "facade", "tools")
BASE = ("_compiled", "compiled", "errors", "log", "sealed", "version", "wake")
TOOLS = ("cli", "__main__", "testing", "examples")

# What core may know of the transports: the Protocols, the ways to find one, memory and rings, and names of files; never
# a concrete transport.
TRANSPORTS_FOR_CORE = {"base", "certificates", "memory", "ring", "url", "registry"}

# Which modules may import what; "lazily" means inside a function, so that importing the module does not load it.
OWNERS: dict[str, dict[str, str]] = {
    "pynng": {"transports/nng.py": "anywhere"},
    "ibverbs": {"verbs/with_ibverbs.py": "lazily"},
    "torch": {
        "core/tensors.py": "lazily",
        "mesh/rdma.py": "lazily",
        "mesh/tensor/": "anywhere",
        "examples/parallel_training.py": "anywhere",
        "examples/fault_tolerant_training.py": "anywhere",
    },
    "cloudpickle": {"core/codec.py": "anywhere", "core/exceptions.py": "anywhere"},
    "pytest": {"testing/": "anywhere", "config.py": "lazily"},
    "numpy": {"": "lazily"},
    "rich": {"": "lazily", "cli.py": "anywhere", "examples/": "anywhere"},
}


@define(frozen=True)
class Import:
    """One imported name of one module."""

    path: str  # of the importing module, relative to the package: "core/router.py"
    line: int
    target: str  # dotted: "monarch.transports.base", "torch.utils"
    lazy: bool  # inside a function, or for type checkers only
    typing_only: bool

    def __str__(self) -> str:
        return f"monarch/{self.path}:{self.line} imports {self.target}"


def sources() -> list[tuple[str, Path]]:
    """Every module of the package, examples included, as (path inside the package, file)."""
    own = [(str(file.relative_to(PACKAGE)), file) for file in sorted(PACKAGE.rglob("*.py"))]
    return own + [(f"examples/{file.relative_to(EXAMPLES)}", file) for file in sorted(EXAMPLES.rglob("*.py"))]


def dotted(path: str) -> str:
    """The module's name: "core/router.py" -> "monarch.core.router", "core/__init__.py" -> "monarch.core"."""
    parts = ["monarch", *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: str, tree: ast.Module) -> Iterator[Import]:
    """All imports of a module, wherever they stand, relative ones resolved, with each imported submodule as target."""
    package = ["monarch", *path.split("/")[:-1]]

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, lazy, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield Import(path, node.lineno, full if full in modules() else module, lazy, typing_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, True, True)
            for child in node.orelse:
                yield from walk(child, lazy, typing_only)
        else:
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            statements = (
                each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr | ast.expr_context)
            )
            for child in statements:
                yield from walk(child, inside, typing_only)

    yield from walk(tree, False, False)


@cache
def modules() -> set[str]:
    return {dotted(path) for path, _ in sources()}


@cache
def trees() -> dict[str, ast.Module]:
    gc.disable()  # a finalizer that renders a traceback parses inside of `ast.parse`, which Python 3.11 takes ill
    try:
        return {path: ast.parse(file.read_text(encoding="utf-8"), str(file)) for path, file in sources()}
    finally:
        gc.enable()


@cache
def imports() -> list[Import]:
    return [found for path, tree in trees().items() for found in imports_of(path, tree)]


def layer_of(module: str) -> str:
    """The layer of a module of ours by its dotted name."""
    first = module.removeprefix("monarch").removeprefix(".").split(".")[0]
    if first in LAYERS:
        return first
    return "base" if first in BASE else "tools" if first in TOOLS else "facade"


def is_ours(module: str) -> bool:
    return module == "monarch" or module.startswith("monarch.")


def test_imports_point_down():
    """From the facades down to errors and log; imports for type checkers count."""
    slips = [
        str(i)
        for i in imports()
        if is_ours(i.target) and LAYERS.index(layer_of(i.target)) > LAYERS.index(layer_of(dotted(i.path)))
    ]

    assert slips == []


def test_no_circle_of_imports_is_longer_than_a_pair():
    """Lazy ones count, too: a module that loads one above it when it is first called is no layer below it."""
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if not found.typing_only and found.target in edges:
            edges[dotted(found.path)].add(found.target)

    def reached_from(module: str) -> set[str]:
        reached: set[str] = set()
        todo = [module]
        while todo:
            new = edges[todo.pop()] - reached
            reached |= new
            todo += new
        return reached

    reached = {module: reached_from(module) for module in edges}
    circles = {frozenset(other for other in reached[module] if module in reached[other]) for module in edges}
    assert [sorted(circle) for circle in circles if len(circle) > 2] == []


def test_core_and_above_know_no_concrete_transport():
    """Only `transports` itself, and tests' tools, name a transport's module; everybody else asks the registry."""
    concrete = [
        str(i)
        for i in imports()
        if layer_of(i.target) == "transports"
        and layer_of(dotted(i.path)) not in ("transports", "tools")
        and i.target.split(".")[2:3] not in ([], *([name] for name in TRANSPORTS_FOR_CORE))
    ]

    assert concrete == []


def test_examples_use_only_what_users_may():
    """An example that reaches below the facades teaches a name that may change."""
    reaching = [
        str(i)
        for i in imports()
        if i.path.startswith("examples/")
        and is_ours(i.target)
        and layer_of(i.target) != "facade"
        and i.target != "monarch.supervision"  # a package whose face is public
        and not i.target.startswith("monarch.examples")
    ]

    assert reaching == []


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_with_an_owner_is_imported_there_only(library):
    """The longest prefix that fits a module decides; a library without an entry for a module may not be used in it."""
    slips = []
    for i in imports():
        if i.target.split(".")[0] != library or i.typing_only:
            continue
        fitting = [prefix for prefix in OWNERS[library] if i.path == prefix or i.path.startswith(prefix.rstrip("/"))]
        allowed = OWNERS[library][max(fitting, key=len)] if fitting else "nowhere"
        if allowed == "nowhere" or (allowed == "lazily" and not i.lazy):
            slips.append(f"{i} (allowed: {allowed})")

    assert slips == []


def test_third_party_imports_are_declared():
    """Whatever is imported at a module's top level is in the standard library or a dependency in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.split(">")[0].split("=")[0] for name in project["dependencies"]}
    known = declared | {"attr", "monarch", "pytest", *sys.stdlib_module_names}
    unknown = [str(i) for i in imports() if not i.lazy and i.target.split(".")[0] not in known]

    optional = (
        "mesh/tensor/",
        "examples/parallel_training.py",
        "examples/fault_tolerant_training.py",
    )  # need what an extra installs
    assert [line for line in unknown if not line.startswith(tuple(f"monarch/{path}" for path in optional))] == []


def test_every_module_has_a_docstring():
    assert [path for path, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_every_package_is_listed_in_pyproject():
    """Packages are listed by hand because of `monarch.examples`; a new folder must not be left out of the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {dotted(path) for path, _ in sources() if path.endswith("__init__.py")}

    assert sorted(listed) == sorted(folders)


HEAVY = ["torch", "pyverbs", "ibverbs", "numpy", "pytest", "pynng"]
IMPORTING = f"""
import importlib, json, os, sys, threading, time
heavy, start_s, cost_s = [], time.process_time(), 0.0
for module in ("monarch", "monarch.actor", "monarch.config"):
    before_s = time.process_time()
    importlib.import_module(module)
    if module != "monarch.config":
        cost_s += time.process_time() - before_s
    heavy += [(module, each) for each in {HEAVY} if each in sys.modules]
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
threads = threading.active_count(), len(os.listdir("/proc/self/task"))
json.dump([heavy, threads, children, start_s, cost_s], sys.stdout)
"""


@cache
def importing() -> tuple[list[Any], list[int], list[str], float, float]:
    """What importing the facades does in a fresh interpreter: heavy libraries that are loaded, by the facade that did;
    threads and children; CPU time of the interpreter alone, and of importing `monarch.actor`, the best of three."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORTING], cwd=ROOT, capture_output=True, check=True, timeout=30)
        for _ in range(3)
    ]
    found = [json.loads(run.stdout) for run in runs]
    heavy, threads, children = found[0][:3]
    return heavy, threads, children, min(each[3] for each in found), min(each[4] for each in found)


def test_importing_loads_no_heavy_library():
    """torch, pyverbs and numpy load on first use; pynng with the first link."""
    assert importing()[0] == []


def test_importing_starts_no_thread_and_no_process():
    _, threads, children, _, _ = importing()

    assert (threads, children) == ([1, 1], [])


def test_importing_monarch_actor_is_cheap():
    """Under 0.25 s of CPU; on a machine on which Python itself starts slowly, as many times more: the bound is on what
    we do, not on the machine."""
    *_, interpreter_s, cost_s = importing()

    assert cost_s < max(0.25, 15 * interpreter_s)
