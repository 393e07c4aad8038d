"""Which files a reader opens to follow a batch, a weight and an export: `python -m tests.walk`.

Each is done on the small data set of tests/fixtures. Listed are the files of albert_ds in which a
function runs meanwhile; docs/architecture.md has their number.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from albert_ds.__main__ import main
from tests.conftest import ROOT
from tests.models import copy_old_run

PACKAGE = str(ROOT / "albert_ds") + os.sep
LOOP = "pretraining/loop.py"
# The functions in which each begins; what they call belongs to it.
WAYS = {
    "batch": {(LOOP, "open_stream"), (LOOP, "next_batch"), (LOOP, "run_passes")},
    "weight": {(LOOP, "start")},  # of a run that resumes
    "export": {("commands/convert_hf.py", "main")},
}


def words_for(way: str, steps: int = 3) -> list[str]:
    if way == "export":
        return ["export", "--checkpoint", "run", "--output", "hf"]
    config = str(ROOT / "ds_configs/zero1_fp32.json")
    return [
        *("train", "--model", "albert-tiny", "--data", "data", "--output", "run"),
        *("--steps", str(steps), "--batch-size", "8", "--micro-batch-size", "8"),
        *("--warmup-steps", "1", "--save-every", "1", "--deepspeed_config", config),
    ]


class Walk:
    """For sys.setprofile: notes the files of all functions that run below those of a way."""

    def __init__(self, begins: set[tuple[str, str]]):
        self.begins, self.files = begins, set[str]()
        self.inside: list[FrameType] = []
        self.importing = 0  # modules at this moment: what runs in them is no part of the way

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "<module>":
            self.importing += {"call": 1, "return": -1}.get(event, 0)
            return
        name = frame.f_code.co_filename.removeprefix(PACKAGE)
        if name == frame.f_code.co_filename or self.importing:
            return
        if event == "call" and (name, frame.f_code.co_name) in self.begins:
            self.inside.append(frame)
        if self.inside:
            self.files.add(name)
        if event == "return" and frame in self.inside:
            self.inside.remove(frame)


def follow(way: str) -> None:
    """Print the files of a way; once a process, because a training ends its process groups."""
    walk = Walk(WAYS[way])
    sys.setprofile(walk)
    try:
        main(words_for(way))
    finally:
        sys.setprofile(None)
        print(f"{way}: {len(walk.files)} files\n  {' '.join(sorted(walk.files))}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(follow(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        copy_old_run(Path(folder, "old")).joinpath("data").rename(f"{folder}/data")
        first = [sys.executable, "-m", "albert_ds", *words_for("first", steps=2)]
        subprocess.run(first, cwd=folder, check=True, capture_output=True)
        for way in WAYS:
            command = [sys.executable, "-m", "tests.walk", way]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
