"""datatrove's own job arrays on Slurm clean text and build shards of it."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.command import run_command
from tests.conftest import ROOT
from tests.data.corpus import make_documents

pytest.importorskip("datatrove")
EXAMPLE = ROOT / "tools" / "examples" / "datatrove_shards.py"


def test_its_executor_gives_the_shards_of_one_process(cluster, vocab, tmp_path):
    raw, work = tmp_path / "raw", tmp_path / "work"
    raw.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": "\n".join(d)}) for d in make_documents(30, seed=number)]
        (raw / f"{number}.jsonl").write_text("\n".join(lines))
    vocab.write(tmp_path)
    model = tmp_path / "spiece.model"
    cluster.run(
        *(sys.executable, str(EXAMPLE), "--input", str(raw), "--work", str(work)),
        *("--vocab", str(model), "--output", str(tmp_path / "data")),
        *("--tasks", "2", "--slurm", "batch"),
        cwd=tmp_path,
        environ={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": str(ROOT),
        },
    )
    is_built = (tmp_path / "data" / "index.json").exists
    cluster.wait(is_built, "the shards", timeout=120)
    done = run_command(
        *("shards", "--input", work / "text" / "*.gz", "--vocab", model),
        *("--output", tmp_path / "alone"),
    )
    assert done.code == 0, done.err
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "data" / path.name).read_bytes(), path.name
