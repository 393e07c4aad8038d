"""Compile device.cpp, once for each version of torch and of the file."""

import fcntl
import hashlib
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def find_compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++")


def build() -> Path:
    """The folder that holds the compiled module `device`; it takes a minute where there is none."""
    import torch
    from torch.utils.cpp_extension import load

    text = SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()
    name = f"albert-ds-fake-cuda-{hashlib.sha256(text).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    library = folder / f"device{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    folder.mkdir(exist_ok=True)
    # Workers of the test suite come here at the same time: one compiles, the others wait. The
    # library appears under its name as a whole, so a killed compiler leaves nothing to be loaded.
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                load("device", [str(SOURCE)], build_directory=scratch, extra_cflags=["-O1"])
                (Path(scratch) / library.name).rename(library)
    return folder
