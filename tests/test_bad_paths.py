"""Wrong paths and files without permission: code 2, one line, nothing written."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, train_command
from tests.test_bad_input import argv_of


def lay_out(root: Path, how: str) -> dict:
    """Create wrong paths of every kind; returns the flags that name the one for `how`."""
    (root / "file").write_text("text")
    (root / "folder").mkdir()
    (root / "loop").symlink_to(root / "loop")
    (root / "dangling").symlink_to(root / "nothing")
    return {
        "data is a file": {"data": root / "file"},
        "data is a loop of links": {"data": root / "loop"},
        "data is nowhere": {"data": root / "dangling"},
        "run is a file": {"output": root / "file"},
        "run is under a file": {"output": root / "file" / "run"},
        "run has too long a name": {"output": root / ("x" * 300)},
        "json is a folder": {"deepspeed_config": root / "folder"},
        "json is a link to nothing": {"deepspeed_config": root / "dangling"},
        "init is a file": {"init_from": root / "file"},
        "init is empty": {"init_from": root / "folder"},
    }[how]


@contextmanager
def as_nobody():
    """Run as a user without privileges: permissions do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def run_main(command: list[str], capsys) -> str:
    """Run the real `main`, which must end with 2; returns the one line it prints."""
    from albert_ds.train import main

    assert main(argv_of(command)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("albert-ds: "), lines
    return lines[0]


@pytest.mark.parametrize(
    "how",
    [
        *("data is a file", "data is a loop of links", "data is nowhere"),
        *("run is a file", "run is under a file", "run has too long a name"),
        *("json is a folder", "json is a link to nothing", "init is a file", "init is empty"),
    ],
)
def test_wrong_paths(data, tmp_path, capsys, how):
    wrong = lay_out(tmp_path, how)
    given = {"data": data, "output": tmp_path / "run", **wrong}
    before = sorted(tmp_path.rglob("*"))
    line = run_main(train_command(given.pop("data"), given.pop("output"), **given), capsys)
    assert str(next(iter(wrong.values()))) in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "what", [".", "index.json", "spiece.model", "ds.json", "run", "run/config.json", "init"]
)
def test_what_may_not_be_read_or_written(data, capsys, what):
    with tempfile.TemporaryDirectory() as name:  # other users may not enter pytest's own folders
        root = Path(name)
        root.chmod(0o755)
        folder = shutil.copytree(data, root / "data")
        run, init = root / "run", root / "init"
        shutil.copy(ROOT / "ds_configs" / "zero1_fp32.json", root / "ds.json")
        for path in (run, init):
            path.mkdir()
        (run / "config.json").write_text("{}")
        shut = {".": folder, "index.json": folder / what, "spiece.model": folder / what}
        closed = shut.get(what, root / what)
        closed.chmod(0)
        flags = {"init_from": init} if what == "init" else {}
        with as_nobody():
            line = run_main(
                train_command(folder, run, deepspeed_config=root / "ds.json", **flags), capsys
            )
        assert str(closed) in line
        closed.chmod(0o755)
