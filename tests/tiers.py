"""Which tests run in the loop between two edits, and which belong to the laboratory.

A test is quick where it works in pytest's own process: starting ranks and tools takes most of the
suite's time. So a new test falls into the right tier by itself. Two lists hold the exceptions.
"""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
STARTS_PROCESSES = {"run_ranks", "start_ranks", "run_tool", "subprocess", "multiprocessing"}
# Files and single tests. They start processes, but without them a package, a tool or a training on
# two ranks would not be covered.
QUICK_ANYWAY = {
    "data/test_tools.py",
    "data/test_vocab.py",
    "test_global_batch.py",
    "test_tiers.py",
    "commands/test_inspect_shards.py",
    "lab/commands/test_plots.py",
    "commands/test_probe.py::test_the_own_head_is_not_trained",
}
# They work in pytest's own process, but for many seconds.
TOO_LONG = {
    "text/test_segmented.py",
    "data/test_languages.py",
    "data/test_leaks.py",
    "data/test_tokenizer_json.py",
    "optim/test_real_sizes.py",
    "tasks/squad/test_dataset.py",
    "test_compile.py::test_layers_and_lengths_share_their_graphs",
    "test_generated_input.py",
    "test_json_files.py",
}

# Files of minutes. They begin first, so that no worker of several runs one alone at the end.
LONGEST = {
    "lab/commands/test_throughput_bench.py",
    "slurm/test_faults.py",
    "test_compile.py",
    "test_exactness.py",
    "tools/lab/test_chaos.py",
}


def find_tests() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def is_lab(path: Path) -> bool:
    """Whether a file tests what only measures, predicts or draws."""
    return name_of(path).startswith(("lab/", "tools/lab/"))


def is_quick(path: Path, test: str) -> bool:
    """Whether `test`, a function of the file `path`, runs in the quick tier."""
    name = name_of(path)
    names = {name, f"{name}::{test}"}
    if name.startswith("slurm/") or names & TOO_LONG:
        return False
    return bool(names & QUICK_ANYWAY) or not read_tests(path)[test] & STARTS_PROCESSES


def read_tests(path: Path) -> dict[str, set[str]]:
    """Each test of a file -> all names and texts it uses, also through helpers under tests/.

    An imported name is there as it is and with its module: `run_ranks` and
    `tests.distributed.run_ranks`.
    """
    return {name: follow(path, name) for name in read_uses(path) if name.startswith("test_")}


def follow(path: Path, name: str) -> set[str]:
    """What the definition `name` of a file uses, and what that uses in turn."""
    seen: set[tuple[Path, str]] = set()
    left = {(path, name)}
    while left:
        file, used = left.pop()
        seen.add((file, used))
        for other in read_uses(file).get(used, set()):
            module, _, imported = other.rpartition(".")
            left.add((file, other))
            if module.startswith("tests."):
                left.add((TESTS.parent / f"{module.replace('.', '/')}.py", imported))
        left -= seen
    return {used for _, used in seen}


@cache
def read_uses(path: Path) -> dict[str, set[str]]:
    """Each definition of a file -> the names and texts in it."""
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text())
    imported, used = find_imports(tree), {}
    for node in tree.body:
        names = find_names(node)
        names |= {imported[name] for name in names & imported.keys()}
        used |= {defined: names for defined in find_defined(node)}
    return used


def find_imports(tree: ast.Module) -> dict[str, str]:
    """Each imported name, wherever the import stands -> the same with its module."""
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imports |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            imports |= {a.asname or a.name: a.name for a in node.names}
    return imports


def find_names(node: ast.AST) -> set[str]:
    """Names and texts in a piece of code; a test's and a fixture's parameters are fixtures."""
    names, parameters = set(), set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Constant(value=str(name)):
                names.add(name)
            case ast.arg(arg=name):
                parameters.add(name)
    if isinstance(node, ast.FunctionDef):
        is_fixture = "fixture" in "".join(map(ast.unparse, node.decorator_list))
        if is_fixture or node.name.startswith("test_"):
            return names | parameters
    return names - parameters


def find_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
