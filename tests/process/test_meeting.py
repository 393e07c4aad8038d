"""Before the ranks train, each is found to have the same settings, and a failed one tells all."""

import json
import os
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.process.ending import Ending
from albert_ds.process.heartbeat import Beat
from albert_ds.process.rendezvous import listen_at, notify_ranks, open_store
from albert_ds.process.world import World
from albert_ds.settings.pretrain import read_config
from albert_ds.vocab.vocab import read_vocab
from tests.command import run_command
from tests.conftest import ROOT, finish, start_each, train_command
from tests.distributed import take_port
from tests.finetuning import flags, write_checkpoint
from tests.models import write_run

TIMEOUT = 240  # seconds; the default of --timeout-minutes is 10 min
JSON = ROOT / "ds_configs" / "zero1_fp32.json"
HOST = os.uname().nodename
ALONE = World(rank=0, local_rank=0, size=1, launcher="torch")
PATIENCE = timedelta(seconds=30)


@pytest.fixture(scope="module")
def other_data(data, text_file, tmp_path_factory) -> Path:
    """Other shards of the same vocabulary."""
    folder = tmp_path_factory.mktemp("other") / "shards"
    built = ("--input", text_file, "--vocab", data / "spiece.model", "--output", folder)
    done = run_command("shards", *built, "--sequence-length", 64, "--holdout", 0.1)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def other_weights(data, tmp_path_factory) -> Path:
    """A run of the model that `train_command` trains."""
    folder = tmp_path_factory.mktemp("weights")
    config = read_config(train_command(data, folder / "unused")[2:], world_size=2)[0]
    vocab = read_vocab(data / "spiece.model")
    return write_run(folder / "run", AlbertForPretraining(config.model, seed=1), vocab)


def end_all(commands: list[list[str]], **variables) -> tuple[list[int], list[str]]:
    """The exit codes and what stood on stderr, by rank."""
    ranks = start_each(commands, **variables)
    codes = finish(ranks, timeout=TIMEOUT)
    return codes, [rank.communicate()[1] for rank in ranks]


# What rank 1 alone is told.
DIFFERENT = {
    "learning_rate": 0.01,
    "seed": 7,
    "batch_size": 16,
    "masked_fraction": 0.3,
    "dropout": 0.5,
    "depth_schedule": "1@0,2@50%",
    "data": "other_data",
    "init_from": "other_weights",
    "deepspeed_config": "other_json",
}
LINE = (
    "its settings, number of ranks, data, weights to start from or program are not those of rank "
    "0; they must be the same on all ranks"
)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_with_another_setting_is_named_and_nobody_trains(name, data, tmp_path, request):
    value = DIFFERENT[name]
    if value == "other_json":
        value = tmp_path / JSON.name
        value.write_text(json.dumps(json.loads(JSON.read_text()) | {"gradient_clipping": 0.5}))
    elif str(value).startswith("other_"):
        value = request.getfixturevalue(value)
    run = tmp_path / "run"
    given = {"data": data, "output": run}
    commands = [train_command(**given), train_command(**given | {name: value})]
    codes, said = end_all(commands)
    assert codes == [2, 2] and not run.exists()
    assert said == [f"albert-ds: rank 1 on {HOST}: {LINE}\n", f"albert-ds: {LINE}\n"]


def test_a_fine_tuning_starts_from_one_encoder(checkpoint, vocab, cola, tmp_path):
    other = write_checkpoint(tmp_path / "other", vocab, seed=1)
    run = tmp_path / "run"
    program = [sys.executable, "albert_ds/finetune.py"]
    commands = [program + flags("glue/cola", cola, start, run) for start in (checkpoint, other)]
    codes, said = end_all(commands)
    assert codes == [2, 2] and not run.exists()
    assert said[0] == f"albert-ds: rank 1 on {HOST}: {LINE}\n"


def test_places_and_processes_of_a_machine_may_differ(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shutil.copy(JSON, tmp_path)
    run = tmp_path / "run"
    alike = dict(steps=1, eval_every=9, save_every=9)
    here = train_command(data, run, **alike, num_workers=0)
    there = train_command(
        tmp_path / "data", run, **alike, num_workers=1, deepspeed_config=tmp_path / JSON.name
    )
    assert end_all([here, there])[0] == [0, 0]


# The rank that fails before the others, with these flags or variables -> its cause.
EARLY = {
    "a wrong flag": (1, {"steps": 0}, {}, "--steps 0: must be at least 1"),
    "no such folder": (1, {"data": "/nope"}, {}, "/nope"),
    "another number of ranks": (1, {}, {"WORLD_SIZE": "3"}, LINE),
    "no place among them": (1, {}, {"WORLD_SIZE": "1"}, "RANK=1: must be below WORLD_SIZE=1"),
    "rank 0 twice": (1, {}, {"RANK": "0"}, "another process is rank 0 too"),
    "no such network": (1, {}, {"GLOO_SOCKET_IFNAME": "ib"}, "GLOO_SOCKET_IFNAME=ib (INTERFACE"),
    "rank 0 itself": (0, {"steps": 0}, {}, "--steps 0: must be at least 1"),
    "one of three": (2, {"steps": 0}, {}, "--steps 0: must be at least 1"),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_rank_that_fails_early_ends_all_with_its_cause(name, data, tmp_path):
    failing, changes, variables, words = EARLY[name]
    run = tmp_path / "run"
    size = max(failing + 1, 2)
    run.mkdir()
    given = {"data": data, "output": run, "batch_size": 12}
    commands = [
        train_command(**given | (changes if rank == failing else {})) for rank in range(size)
    ]
    codes, said = end_all(commands, variables={failing: variables})
    assert codes == [2] * size
    if "RANK" in variables:  # of two that are one rank the later one says it
        assert words in "".join(said), said
    else:
        assert words in said[failing], said[failing]
        others = f"albert-ds: rank {failing} on {HOST}: "
        reason = json.loads((run / "exit.json").read_text())["reason"]
        if failing > 0:
            assert said[0].startswith(others) and words in said[0], said[0]
        assert words in reason


def test_the_store_listens_where_the_ranks_meet_and_nowhere_else():
    port = take_port()
    store = open_store(replace(ALONE, address=f"127.0.0.1:{port}"), PATIENCE, is_host=True)
    store.set("a", "b")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_a_name_that_is_loopback_to_its_own_machine_alone_is_no_place_to_listen(monkeypatch):
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", take_port()))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: addresses)
    assert listen_at("node1", addresses[0][-1][1]) is None  # torch then listens at all addresses
    os.close(listen_at("localhost", addresses[0][-1][1]))


def test_who_does_not_know_the_secret_ends_no_rank(monkeypatch):
    world = replace(ALONE, address=f"127.0.0.1:{take_port()}")
    monkeypatch.setenv("ALBERT_DS_SECRET", "of this job")
    store = open_store(world, PATIENCE, is_host=True)
    store.set("host/0", "here")
    assert open_store(world, PATIENCE).check(["host/0"])
    monkeypatch.delenv("ALBERT_DS_SECRET")
    stranger = open_store(world, PATIENCE)
    stranger.set("ending", json.dumps([2, "stranger's words", False]))
    assert not store.check(["ending"]) and not stranger.check(["host/0"])


@pytest.mark.parametrize("junk", [b"junk", b"7", b"{}", b"[1, 5, false]", b"\xff"])
def test_what_is_no_beat_is_no_sign_of_life(junk):
    assert Beat.decode(junk) == Beat()


def test_a_port_that_a_silent_program_holds_ends_with_5_and_is_named(data, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and says nothing
        port = str(server.getsockname()[1])
        command = train_command(data, tmp_path / "run", timeout_minutes=0.02)
        meeting = {rank: {"MASTER_PORT": port} for rank in range(2)}
        codes, said = end_all([command] * 2, variables=meeting)
    assert codes == [5, 5] and not (tmp_path / "run").exists()
    assert f"could not connect to 127.0.0.1:{port} within 0.02 min" in said[0]
    assert len(said[0].splitlines()) == 1 and "Traceback" not in said[1]


@pytest.mark.parametrize("same", [True, False])
def test_a_rank_that_fails_first_says_only_what_rank_0_does_not(same):
    """Both have a wrong command line, and rank 1 tells it before rank 0 does."""
    store = dist.HashStore()
    store.set("start", "")
    ranks = [World(rank=r, local_rank=r, local_size=2, size=2, launcher="torch") for r in (0, 1)]
    news = {}

    def tell(world: World, reason: str) -> None:
        news[world.rank] = notify_ranks(world, store, Ending(2, reason))

    first = threading.Thread(target=tell, args=(ranks[1], "--batch-size 9 is wrong"))
    first.start()
    while not store.get("start"):
        time.sleep(0.01)
    tell(ranks[0], "--batch-size 9 is wrong" if same else "RUN is in use")
    first.join()
    assert news[1] is not same
