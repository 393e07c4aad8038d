"""A rank that never starts, dies, freezes or delays the others ends the run and is named."""

import json
import signal
import sys

import psutil
import pytest

from albert_ds.data.shards import open_shards
from albert_ds.process.rendezvous import list_ranks
from tests.conftest import start_ranks, train_command
from tests.distributed import run_ranks
from tests.finetuning import flags, write_checkpoint, write_rte
from tests.test_resume import wait_for_step

# On a busy machine ranks connect some seconds apart.
QUICK = dict(steps=100_000, timeout_minutes=0.3, eval_every=10**6, save_every=10**6)


def test_many_ranks_make_a_short_line():
    assert list_ranks([3]) == "rank 3"
    assert list_ranks(list(range(12))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (12 in all)"


def read_timeouts(rank: int) -> list[float]:
    import torch
    import torch.distributed as dist

    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.process.rendezvous import join_world
    from albert_ds.process.world import read_world

    join_world(read_world(), timeout_minutes=2)
    mesh = build_mesh(1, timeout_minutes=2)
    groups = (dist.group.WORLD, mesh.control_group, mesh.dp_group, mesh.tp_group)
    cpu = torch.device("cpu")
    dist.barrier()  # the store lives in rank 0, and goes with it
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def test_no_group_waits_longer_than_it_is_told():
    # megatron-core's own default is 30 minutes, for its groups' making as well.
    assert run_ranks(read_timeouts, 2) == [[180.0] * 4] * 2


def test_a_rank_that_never_comes_is_named(data, tmp_path):
    ranks = start_ranks(train_command(data, tmp_path / "run", batch_size=6, **QUICK), 3)
    ranks[2].kill()
    outputs = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == [5, 5, -signal.SIGKILL]
    assert "albert-ds: rank 2 of 3 did not connect" in outputs[0][1]
    assert "0.3 min (--timeout-minutes)" in outputs[0][1]
    assert "frame #" not in outputs[0][1] + outputs[1][1]  # C++ stack traces
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("frozen", "what"), [(1, "rank"), (0, "rank"), (1, "its loader")])
def test_a_frozen_rank_ends_the_run_and_is_named(data, tmp_path, frozen, what):
    run = tmp_path / "run"
    ranks = start_ranks(train_command(data, run, num_workers=1, **QUICK), 2)
    wait_for_step(run, 2)
    process = psutil.Process(ranks[frozen].pid)
    victim = process.children()[0] if what == "its loader" else process
    victim.suspend()
    other = ranks[1 - frozen]
    said = other.communicate(timeout=300)[1]
    assert other.returncode == 5
    if what == "its loader":
        assert process.wait(timeout=300) == 5
    victim.kill()
    ranks[frozen].communicate(timeout=300)
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 5 and ending["reason"].startswith(f"rank {frozen} on ")
    assert ("has waited 0.3 min" if what == "its loader" else "is missing") in ending["reason"]
    assert f"albert-ds: {ending['reason']}" in said


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL], ids=lambda s: s.name)
def test_a_rank_that_is_lost_in_fine_tuning_is_named(data, tmp_path, what):
    vocab = open_shards(data, "train").vocab
    checkpoint = write_checkpoint(tmp_path / "pretrained", vocab, vocab_size=vocab.size)
    common = ("glue/rte", write_rte(tmp_path / "RTE"), checkpoint, tmp_path / "out")
    rhythm = dict(steps=100_000, eval_every=10**6, save_every=10**6, timeout_minutes=0.3)
    argv = flags(*common, **rhythm)
    ranks = start_ranks([sys.executable, "albert_ds/finetune.py", *argv], 2)
    wait_for_step(tmp_path / "out", 2)
    ranks[1].send_signal(what)
    said = ranks[0].communicate(timeout=300)[1]
    ranks[1].kill()
    ranks[1].communicate(timeout=300)
    assert ranks[0].returncode == 5
    ending = json.loads((tmp_path / "out" / "exit.json").read_text())
    assert ending["code"] == 5 and ending["reason"].startswith("rank 1 on ")
    assert "missing" in ending["reason"] and f"albert-ds: {ending['reason']}" in said
