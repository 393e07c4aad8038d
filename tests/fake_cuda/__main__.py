"""Run a program as if on CUDA: `python -m tests.fake_cuda [--devices N] PROGRAM ARGUMENT...`.

Whatever the program starts sees the devices too. All its figures are those of this machine's host.
"""

import os
import sys
from pathlib import Path

from tests.fake_cuda.build import build

ROOT = Path(__file__).parents[2]


def environment(devices: int = 1) -> dict[str, str]:
    """The variables of a process that sees that many fake devices."""
    paths = [str(ROOT / "tests" / "strict"), str(ROOT), os.environ.get("PYTHONPATH")]
    return {
        "FAKE_CUDA_FOLDER": str(build()),
        "FAKE_CUDA_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # Some virtual machines announce AMX and then forbid it: every bf16 product would crash.
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"),
    }


def main(argv: list[str]) -> None:
    devices = 1
    if argv[:1] == ["--devices"]:
        devices = int(argv[1])
        argv = argv[2:]
    made = environment(devices)
    environ = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"} | made
    os.execve(sys.executable, [sys.executable, *argv], environ)


if __name__ == "__main__":
    main(sys.argv[1:])
