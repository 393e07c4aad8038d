"""Several workers of the suite ask for the device at once."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fake_cuda.build import build

LIBRARY = b"begin " * 100 + b"end"


def test_workers_that_start_together_get_one_whole_library(tmp_path, monkeypatch):
    compiled = []

    def compile_slowly(name, sources, build_directory, **flags):
        compiled.append(name)
        with open(Path(build_directory) / f"{name}.so", "wb") as file:
            for part in (LIBRARY[:300], LIBRARY[300:]):
                file.write(part)
                file.flush()
                time.sleep(0.2)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.load", compile_slowly)

    def worker(delay):
        time.sleep(delay)
        return (build() / "device.so").read_bytes()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(worker, (0, 0.1))) == [LIBRARY, LIBRARY]
    assert compiled == ["device"]


def test_a_killed_compiler_leaves_no_library(tmp_path, monkeypatch):
    def be_killed(name, sources, build_directory, **flags):
        (Path(build_directory) / f"{name}.so").write_bytes(LIBRARY[:300])
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.load", be_killed)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert not list(tmp_path.rglob("*.so"))
