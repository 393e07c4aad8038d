"""Compile device.cpp, once for each version of torch and of the file."""

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
    if not (folder / f"device{sysconfig.get_config_var('SHLIB_SUFFIX')}").exists():
        folder.mkdir(exist_ok=True)
        load("device", [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O1"])
    return folder
