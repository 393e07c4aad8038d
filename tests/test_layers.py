"""Rules of the code base: imports point down, file by file; no name shadows a module; sizes."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "albert_ds"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Lowest first. A package or top-level module imports itself and lower levels, nothing else.
ORDER = (
    *("base", "vocab model optim process", "data parallel", "engine text", "checkpoint"),
    *("tasks interop", "settings", "training", "evals train finetune", "commands", "__main__"),
)
LEVELS = {name: level for level, names in enumerate(ORDER) for name in names.split()}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def module_of(path: Path) -> str:
    """`text.mpi` for albert_ds/text/mpi.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path): path for path in SOURCES}


def package_of(module: str) -> str:
    """The longest prefix of a module that has a level."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(prefix for prefix in prefixes if prefix in LEVELS)


def imported_modules(path: Path) -> set[str]:
    """Files of albert_ds that a file imports, at its top, in a function or for its types."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    modules = {name.removeprefix("albert_ds.") for name in names if name.startswith("albert_ds.")}
    return modules & MODULES.keys()


IMPORTS = {module: imported_modules(path) for module, path in MODULES.items()}


def test_imports_point_down():
    upwards = [
        f"{module} imports {imported}"
        for module, all_imported in IMPORTS.items()
        for imported in all_imported
        if (there := package_of(imported)) != (here := package_of(module))
        and LEVELS[there] >= LEVELS[here]
    ]
    assert upwards == []


def test_no_import_circle_between_files():
    try:
        list(TopologicalSorter(IMPORTS).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_product_never_imports_laboratory():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] != "albert_lab", path


def test_users_tools_import_no_tool():
    for path in [*SOURCES, *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in ("tools", "tests"), path


def test_nothing_in_the_package_shadows_another_module():
    # `deepspeed albert_ds/train.py` puts albert_ds/ first on sys.path: a logging.py in it would
    # become the standard library's for everyone.
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    modules = [path for path in PACKAGE.iterdir() if path.suffix in ("", ".py")]
    stems = {path.stem for path in modules} - {"__init__", "__pycache__"}
    assert not stems & (taken - {"albert_ds"})


def test_files_and_functions_stay_readable():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        text = path.read_text()
        assert text.count("\n") <= MAX_FILE_LINES, f"{path}: split it"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name}: {length}"
