"""In processes that tests start, too, a warning that the product causes is an error."""

import subprocess
import sys

from tests.conftest import ROOT

CHILD = """
import sys, types, warnings
import tests.preload  # torch, DeepSpeed and megatron-core, which set filters of their own

def warn(module):
    code = compile("import warnings; warnings.warn('old', DeprecationWarning)", module, "exec")
    exec(code, types.ModuleType(module).__dict__)

for module in ("albert_ds.data.made_up", "tools.made_up", "__main__"):
    try:
        warn(module)
    except DeprecationWarning:
        continue
    sys.exit(f"{module} warned and went on")
warn("another_library")
"""


def test_a_warning_of_the_product_ends_the_process_that_a_test_starts():
    child = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
