"""The rules of the house: what may import what, what is imported when, and that everything public is described."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from gspo.config import Section
from gspo.recipe import known_keys

PACKAGE = Path(__file__).parents[1] / "gspo"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    ("types", "config", "functions", "verifiers_package", "recipe", "distributed", "locks"),
    ("objectives", "advantages", "data", "chat", "rewards", "environments", "moe", "reporting", "functional"),
    ("rollout", "training", "credit"),
    ("evaluation", "prompts", "check", "folder", "signals"),
    ("run", "cold_start", "loop"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
DOORS = {("functional", "objectives")}
"""Rooms of floor 1 that may look into another."""

BACKENDS = {
    "vllm",
    "ray",
    "peft",
    "wandb",
    "trackio",
    "matplotlib",
    "datasets",
    "reasoning_gym",
    "math_verify",
    "tensorboard",
    "httpx2",
}


def module(path: Path) -> str:
    """gspo/data/sources.py -> data.sources; a package is its __init__; the package itself is ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module(path): path for path in FILES}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of the package that a file imports anywhere, also inside functions, with the line."""
    here = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "gspo"]
            yield from ((name.removeprefix("gspo").lstrip("."), node.lineno) for name in names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else [])]
            elif node.module and node.module.split(".")[0] == "gspo":
                base = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield (inner if inner in MODULES else ".".join(base)), node.lineno


def on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node that runs when its file is imported."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from on_import(child)


def undescribed(node: ast.AST, name: str) -> Iterator[str]:
    """Public functions, classes and methods below a node that have no docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            if not ast.get_docstring(child):
                yield f"{name}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from undescribed(child, f"{name}.{child.name}")


def test_every_module_has_its_floor():
    rooms = {name.split(".")[0] for name in MODULES if name}
    assert rooms == set(FLOOR), "a new room needs its floor here and in docs/architecture.md"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_down_only_and_rooms_of_floor_one_do_not_know_each_other(path):
    room = module(path).split(".")[0]
    for name, line in imported(path):
        other = name.split(".")[0]
        if not room or not other or other == room:
            continue
        at = f"{path.relative_to(PACKAGE.parent)}:{line}"
        where = f"{at}: {room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})"
        assert FLOOR[other] <= FLOOR[room], where
        if FLOOR[room] == FLOOR[other] == 1:
            assert (room, other) in DOORS, where


def test_no_module_imports_itself_by_a_detour():
    graph = {name: {other for other, _ in imported(path) if other and other != name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


ISOLATED = "rewards.isolated"
"""Run by worker processes alone, each for one backend."""


def test_what_workers_run_is_imported_by_nothing_else():
    outside = [path for name, path in MODULES.items() if not name.startswith(ISOLATED)]
    assert not [(path, line) for path in outside for name, line in imported(path) if "isolated" in name]


@pytest.mark.parametrize("path", [p for p in FILES if not module(p).startswith(ISOLATED)], ids=module)
def test_backends_are_imported_only_when_used(path):
    for node in on_import(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        heavy = BACKENDS & {name.split(".")[0] for name in names}
        assert not heavy, f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 0)} imports {heavy} at its top"


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from gspo.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES ")
    assert not {"torch", "pydantic", "numpy", "transformers", "rich"} & set(modules.split())
    assert all(command in text for command in ("train", "sft", "eval", "check", "report", "compare", "watch"))


def test_help_answers_within_half_a_second():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gspo.cli", "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("path", FILES, ids=module)
def test_everything_public_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    missing = list(undescribed(tree, module(path)))
    if tree.body and not ast.get_docstring(tree):
        missing.append(module(path))
    assert not missing


def test_no_setting_asks_for_a_secret():
    asking = re.compile(r"(^|_)(key|(?<!per_)token|secret|password|passwd|credentials?|api)($|_)")
    assert not [key for key in known_keys() if asking.search(key.rpartition(".")[2])]


def test_every_setting_has_a_docstring():
    def walk(model):
        for name, info in model.model_fields.items():
            assert info.description, f"{model.__name__}.{name}"
        for child in model.__subclasses__():
            walk(child)

    walk(Section)
