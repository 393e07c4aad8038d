"""What a training imports: not torch's compiler, which nothing here uses and takes seconds."""

import subprocess
import sys

from tests.conftest import ROOT, train_command

PROGRAM = """
import sys
from albert_ds.train import main
code = main(sys.argv[1:])
print("imported:", [name for name in NAMES if name in sys.modules])
sys.exit(code)
"""
NAMES = ("torch._inductor.compile_fx", "functorch.compile", "megatron")


def test_a_training_imports_neither_torchs_compiler_nor_megatron(data, tmp_path):
    words = train_command(data, tmp_path / "run", steps=1)[2:]
    program = PROGRAM.replace("NAMES", repr(NAMES))
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
