"""`make quick` leaves no package and no user's tool out; the lists of exceptions are true."""

import ast

import pytest

from tests.conftest import ROOT
from tests.tiers import (
    LONGEST,
    QUICK_ANYWAY,
    TOO_LONG,
    find_imports,
    find_tests,
    is_quick,
    name_of,
    read_tests,
)

QUICK = {
    f"{name_of(path)}::{test}": names
    for path in find_tests()
    for test, names in read_tests(path).items()
    if is_quick(path, test)
}
TOOLS = {path.stem: path for path in (ROOT / "albert_ds").rglob("commands/[a-z]*.py")}
USED = set().union(*QUICK.values())
USED_TOOLS = {
    tool
    for tool in TOOLS
    if any(f".commands.{tool}." in f"{name}." or f"tools/{tool}.py" in name for name in USED)
}
PACKAGES = {path.parent for path in (ROOT / "albert_ds").rglob("*.py")} - {ROOT / "albert_ds"}
# They measure on ranks that they start, for a minute at least.
BENCHES = {"comm_volume", "throughput_bench"}


@pytest.mark.parametrize("package", sorted(str(p.relative_to(ROOT)) for p in PACKAGES))
def test_every_package_has_a_quick_test(package):
    imports = [find_imports(ast.parse(TOOLS[tool].read_text())).values() for tool in USED_TOOLS]
    start = package.replace("/", ".") + "."
    assert any(name.startswith(start) for name in USED.union(*imports))


def test_every_users_tool_has_a_quick_test():
    assert TOOLS.keys() - USED_TOOLS <= BENCHES


def test_two_ranks_train_in_the_quick_tier():
    names = QUICK["test_global_batch.py::test_any_cut_gives_the_same_update"]
    assert {"tests.distributed.run_ranks", "tests.training.train_ranks"} <= names


def test_the_lists_of_exceptions_name_tests_that_exist():
    tests = {f"{name_of(path)}::{test}" for path in find_tests() for test in read_tests(path)}
    assert tests | {name_of(path) for path in find_tests()} >= QUICK_ANYWAY | TOO_LONG | LONGEST
