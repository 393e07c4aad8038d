"""A rank that never starts, or whose loader of data freezes, ends the run and is named."""

import fcntl
import json
import shutil
import signal

import psutil
import pytest
from torch.distributed import TCPStore

from albert_ds.base.errors import MachineFailed
from albert_ds.process.rendezvous import host_store, wait_for_ranks
from albert_ds.process.world import World
from tests.conftest import start_ranks, train_command
from tests.distributed import run_ranks, take_port
from tests.test_resume import wait_for_step


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
    assert run_ranks(read_timeouts, 2) == [[120.0] * 4] * 2


def test_a_rank_that_never_comes_is_named():
    # A launcher's store outlives its ranks: rank 1 has come and given up when rank 0 comes.
    store = TCPStore("127.0.0.1", take_port(), is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    for rank, missing in ((1, "ranks 0, 2"), (0, "rank 2")):
        world = World(
            rank=rank, local_rank=rank, size=3, launcher="torch", address=address, has_store=True
        )
        with pytest.raises(MachineFailed) as caught:
            wait_for_ranks(world, host_store(world, minutes=0.05), "cpu", {}, minutes=0.05)
        ending = f"did not connect to {address} within 0.05 min (--timeout-minutes)"
        assert str(caught.value) == f"{missing} of 3 {ending}"


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_whose_storage_gives_no_answer_to_any_rank_ends(data, tmp_path, size):
    folder = shutil.copytree(data, tmp_path / "data")
    shards = [path.open("r+b") for path in folder.glob("train-*.tar")]
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel's word that somebody waits
    for shard in shards:  # whoever opens it waits, up to 45 s
        fcntl.fcntl(shard, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    run = tmp_path / "run"
    minutes = 0.2 * size  # in which several ranks also find each other
    ranks = start_ranks(train_command(folder, run, num_workers=1, timeout_minutes=minutes), size)
    said = [process.communicate(timeout=500)[1] for process in ranks]
    for shard in shards:
        shard.close()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    assert [process.returncode for process in ranks] == [5] * size
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 5 and "no data: the storage" in ending["reason"]
    assert f"after {12 * size}" in ending["reason"] and f"albert-ds: {ending['reason']}" in said[0]


@pytest.mark.nightly
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_whose_loader_is_frozen_ends_the_run_and_is_named(data, tmp_path, frozen):
    run = tmp_path / "run"
    rhythm = dict(steps=100_000, timeout_minutes=0.5, eval_every=10**6, save_every=10**6)
    ranks = start_ranks(train_command(data, run, num_workers=1, **rhythm), 2)
    wait_for_step(run, 2)
    (loader,) = psutil.Process(ranks[frozen].pid).children()
    loader.suspend()
    said = [process.communicate(timeout=500)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [5, 5]
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 5 and ending["reason"].startswith(f"rank {frozen} on ")
    # A batch that was ready cannot be fetched from a frozen worker; then there is no time limit.
    assert "keeps the others waiting" in ending["reason"] or "no data" in ending["reason"]
    assert f"albert-ds: {ending['reason']}" in said[0]
