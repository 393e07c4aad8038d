"""The house's own rules: imports point down, no name shadows a module, nothing is too long."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "albert_ds"
# Lowest first. Siblings of one level never import one another, but for the last named.
LEVELS = {
    "errors": 0,
    "model": 1,
    "data": 1,
    "optim": 1,
    "parallel": 1,
    "pictures": 1,
    "runtime": 2,
    "scaling": 2,
    "evals": 3,
    "tasks": 3,
    "interop": 3,
    "flags": 4,
    "config": 5,
    "train": 6,
    "bench": 7,
    "tuning": 7,
    "measure": 8,
    "finetune": 8,
}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of albert_ds that a file imports, wherever in the file it does."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("albert_ds.")}
    return rooms


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    here = room(path.relative_to(PACKAGE).parts)
    for there in imported_rooms(path) - {here}:
        assert LEVELS[there] < LEVELS[here], f"{path.name} ({here}) imports {there}"


def test_every_room_has_a_level():
    assert {room(path.relative_to(PACKAGE).parts) for path in SOURCES} <= set(LEVELS)


def test_nothing_in_the_package_shadows_another_module():
    # `deepspeed albert_ds/train.py` puts albert_ds/ first on sys.path: a logging.py in it would
    # become the standard library's for everyone.
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    ours = {path.stem for path in PACKAGE.iterdir()} - {"__init__", "__pycache__"}
    assert not ours & (taken - {"albert_ds"})


def test_tools_are_imported_by_nothing():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in ("tools", "tests"), path


@pytest.mark.parametrize("folder", ["albert_ds", "tools"])
def test_files_and_functions_fit_in_a_head(folder):
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 300, f"{path}: what second idea does it hold?"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno} {node.name} has {length} lines"
