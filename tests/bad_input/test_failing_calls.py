"""Every call of the file system fails once: one line, a code, no input lost, and it goes on."""

import errno
import hashlib
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, train_command
from tests.distributed import Program

# Of systems that our authors do not have: too many files, no memory, FUSE, NFS, quotas, devices.
ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO),
    *(errno.ENOTCONN, errno.EREMOTEIO, errno.ESTALE, errno.EBUSY, errno.EROFS, errno.ETIMEDOUT),
)
CASES, NIGHTLY = 3, 25  # of each command
LIMIT = 300


def hash_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def run(folder: Path, number: int, error: int, counted: Path, words: list) -> tuple[int, str]:
    script = str(ROOT / "tests" / "bad_input" / "failing_calls.py")
    argv = [script, str(folder), str(number), str(error), str(counted), *map(str, words)]
    ran = Program(argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, err = ran.communicate(timeout=LIMIT)
    return ran.returncode, err


def commands(data: Path, text_file: Path, out: Path) -> dict[str, list]:
    vocab = data / "spiece.model"
    text = ["--input", text_file]
    train = train_command(data, out, steps=4, save_every=2, eval_every=4)[2:]
    return {
        "train": ["train", *train],
        "vocab": ["vocab", *text, "--output", out, "--vocab-size", 300],
        "shards": ["shards", *text, "--vocab", vocab, "--output", out, "--sequence-length", 64],
    }


@pytest.mark.parametrize("name", ["train", "vocab", "shards"])
@pytest.mark.parametrize("cases", [CASES, pytest.param(NIGHTLY, marks=pytest.mark.nightly)])
def test_a_call_that_fails_costs_one_line_and_nothing_else(data, text_file, tmp_path, name, cases):
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    words, inputs = commands(data, text_file, out)[name], hash_files(data)
    code, err = run(out.parent, 0, 0, tmp_path / "calls", words)
    assert code == 0, err
    expected = {k: v for k, v in hash_files(out).items() if is_result(k)}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) > 10
    numbers, draw, wrong = range(1, len(calls) + 1), random.Random(name), []
    for number in sorted(draw.sample(numbers, min(cases, len(calls)))):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        error = draw.choice(ERRORS)
        code, err = run(out.parent, number, error, tmp_path / "none", words)
        lines = [line for line in err.splitlines() if line.startswith("albert-ds: ")]
        said = re.sub(r"\S+/", "", " ".join(lines))
        case = f"{calls[number - 1]}, {errno.errorcode[error]}: {code}: {said}"
        is_good = code in (0, 2, 3, 5) and "Traceback" not in err and (code == 0 or lines)
        again, err = run(out.parent, 0, 0, tmp_path / "none", words)
        found = {k: v for k, v in hash_files(out).items() if is_result(k)} if again == 0 else {}
        # vocab and shards may say that the result is there.
        is_done = again == 2 and code == 0
        if not is_good or not (found == expected or is_done):
            wrong.append(f"{case}; again: {again}: {err.strip().splitlines()[-1:]}")
    assert not wrong, "\n".join(wrong)
    assert hash_files(data) == inputs


def is_result(name: str) -> bool:
    """What must be the same bytes however it came about: no clocks in it, no half of a run."""
    return name.endswith((".safetensors", ".tar", ".model"))
