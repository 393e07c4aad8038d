"""Every way of reducing gradients leaves their sum over ranks, whatever it hides."""

import json
import subprocess
import sys

import pytest
import torch

from albert_ds.errors import UserError
from albert_ds.measure.link import check_nodes
from tests.conftest import ROOT
from tests.distributed import run_ranks
from tools.overlap_bench import WAYS, Step, build_parser


def reduce_each_way(rank: int) -> dict[str, list[torch.Tensor]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    args = build_parser().parse_args(["--sequence-length", "16"])
    gradients = {}
    for way in WAYS:
        step = Step("albert-tiny", way, args)
        step()
        gradients[way] = [p.grad for p in step.model.parameters()]
    dist.barrier()
    return gradients


def test_all_ways_leave_the_sum_over_ranks():
    ranks = run_ranks(reduce_each_way, 2)
    bare = [rank["none"] for rank in ranks]
    expected = [first + second for first, second in zip(*bare, strict=True)]
    for rank in ranks:
        for way in WAYS[1:]:
            torch.testing.assert_close(rank[way], expected, rtol=1e-4, atol=1e-4)


def test_it_prints_what_is_exposed(tmp_path):
    try:
        check_nodes(2)
    except UserError as error:
        pytest.skip(str(error))
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "tools/overlap_bench.py", "--models", "albert-tiny", "--link", "none"),
        *("--sequence-length", "16", "--rounds", "1", "--output", report),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("| albert-tiny |") == len(WAYS) - 1
    found = json.loads(report.read_text())["albert-tiny"]
    assert list(found["seconds"]) == list(found["peak_bytes"]) == list(WAYS)
