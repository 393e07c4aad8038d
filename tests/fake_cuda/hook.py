"""Give a Python process the fake device: `install` before torch is imported.

Every process with FAKE_CUDA_FOLDER in its environment does so (tests/strict/sitecustomize.py), so a
program and all that it starts see the device, and a process that needs no torch loads none.
"""

import ctypes
import importlib
import importlib.machinery
import os
import sys
from pathlib import Path


class Finder:
    """Finds torch, and wraps what is executed when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        assert spec is not None and spec.loader is not None and spec.origin is not None
        library = Path(spec.origin).with_name("lib") / "libtorch_python.so"
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            # The device must be known before torch looks for one; it links to torch's library.
            ctypes.CDLL(str(library))
            sys.path.append(os.environ["FAKE_CUDA_FOLDER"])
            importlib.import_module("device")
            execute(module)
            importlib.import_module("tests.fake_cuda.torch_cuda")
            importlib.import_module("tests.staged_gloo").stage()

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    sys.meta_path.insert(0, Finder())
