"""Wrong input, made by hand: the command ends with one line and its code, and writes nothing.

`bad_input/` makes wrong input by rule. Damaged shards: data/test_shards.py. Damaged checkpoints:
checkpoint/test_damage.py.
"""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from albert_ds.settings.pretrain import read_config
from albert_ds.settings.shared import as_json, write_config
from tests.command import run_command
from tests.conftest import ROOT, finish, start_ranks, train_command

SHIPPED = json.loads((ROOT / "ds_configs" / "zero1_fp32.json").read_text())
# Rank 0 of two that never meet: a command line is checked before. One that is accepted ends soon.
LAUNCHED = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
ENDING = {".lock", "exit.json", "history.jsonl"}  # what a RUN that exists keeps of any ending


def argv_of(data, output, **flags) -> list[str]:
    return train_command(data, output, **{"timeout_minutes": 0.02, **flags})[2:]


def find_faults(folder: Path, argv: list[str], *words: str) -> list[str]:
    """What of the promise `albert-ds train ARGV` breaks; `folder` holds all that it may touch."""
    before = sorted(folder.rglob("*"))
    done = run_command("train", *argv)
    said = done.err.removesuffix("\n")
    faults = [f"no {word!r}" for word in words if word not in said]
    if done.code != 2 or done.out or "\n" in said or not said.startswith("albert-ds: "):
        faults.append(f"code {done.code} {done.out}")
    written = [path for path in folder.rglob("*") if path not in before]
    faults += [f"{path} was written" for path in written if path.name not in ENDING]
    return [f"{words}: {fault}: {said}" for fault in faults]


@pytest.fixture
def refuse(data, tmp_path, monkeypatch):
    """What is wrong with how `train` of one or two ranks refuses these flags with these words."""
    # The second rank never comes to be told.
    monkeypatch.setattr("albert_ds.process.rendezvous.NOTIFY_TIMEOUT", timedelta(0))

    def find(*words: str, ranks: int = 2, **flags) -> list[str]:
        for name, value in LAUNCHED.items() if ranks == 2 else ():
            monkeypatch.setenv(name, value)
        given = {"data": data, "output": tmp_path / "run", **flags}
        return find_faults(tmp_path, argv_of(**given), *words)

    return find


FLAGS = [
    ({"batch_size": 9}, ["--batch-size 9", "--micro-batch-size 2", "multiples of 4"]),
    ({"sharing": "some"}, ["--sharing some", "groups:N"]),
    ({"sharing": "groups:5"}, ["--sharing groups:5", "--num-layers 2"]),
    ({"num_heads": 5}, ["--num-heads 5", "--hidden-size 32"]),
    ({"dropout": 1.5}, ["--dropout 1.5", "at least 0 and below 1"]),
    ({"sequence_length": 512}, ["--sequence-length 512", "at most 64"]),
    ({"max_position_embeddings": 32, "sequence_length": 64}, ["--sequence-length 64", "32"]),
    ({"tensor_parallel": 3}, ["--tensor-parallel 3", "ranks 2", "allowed: 1, 2"]),
    ({"tensor_parallel": 2, "num_heads": 1}, ["--tensor-parallel 2", "--num-heads 1"]),
    ({"tensor_parallel": 2, "ffn_size": 65}, ["--tensor-parallel 2", "--ffn-size 65"]),
    ({"warmup_steps": 13}, ["--warmup-steps 13", "--steps 12"]),
    ({"init_from": "nowhere"}, ["--init-from nowhere", "no such folder"]),
    ({"init_from": "albert/v2"}, ["--init-from albert/v2", "hf download albert/v2 --local-dir v2"]),
    ({"save_at_tokens": "2M,1M"}, ["--save-at-tokens 2M,1M", "ascending"]),
    ({"save_at_tokens": "1M,,2M"}, ["--save-at-tokens 1M,,2M", "ascending"]),
    ({"save_at_tokens": "0"}, ["--save-at-tokens 0", "ascending"]),
    ({"cooldown": 0.2}, ["--cooldown", "only with --learning-rate-schedule wsd"]),
    ({"masked_fraction": "0.3@1,0.2@5"}, ["--masked-fraction 0.3@1", "step 1; the first"]),
    ({"masked_fraction": "0.3@0,1.5@5"}, ["--masked-fraction", "'1.5@5'", "below 1"]),
    ({"masked_fraction": "0.3@0..0.2@5,0.1@4"}, ["--masked-fraction", "'0.1@4'", "starts at"]),
    ({"masked_fraction": "0.3@0..0.2@101%"}, ["--masked-fraction", "VALUE@SHARE%"]),
    ({"masked_fraction": "0.3@0..0.2@13"}, ["--masked-fraction", "below --steps 12"]),
    ({"sequence_length": "32@0,128@50%"}, ["--sequence-length 128", "at most 64"]),
    ({"sequence_length": "32@0,16@x"}, ["--sequence-length 32@0,16@x", "VALUE@STEP"]),
    ({"batch_size": "8@0,10@50%"}, ["--batch-size 10", "multiples of 4"]),
    ({"batch_size": "8@0..16@50%"}, ["--batch-size 8@0..16@50%", "in jumps only"]),
    ({"batch_size": "8@0,16@12"}, ["--batch-size 8@0,16@12", "'16@12'", "below --steps 12"]),
    ({"depth_schedule": "1@0,2@7,2@7"}, ["--depth-schedule", "'2@7': starts at step 7"]),
    ({"data_weights": [0.5, 0.5]}, ["--data-weights", "2 numbers for 1"]),
    ({"data_weights": -1}, ["--data-weights"]),
    ({"masked_fraction": 2}, ["--masked-fraction 2", "above 0 and below 1"]),
    ({"deepspeed_config": "no.json"}, ["no.json: no such file; `albert-ds recipes"]),
]


def test_wrong_flags(refuse):
    assert not [fault for flags, words in FLAGS for fault in refuse(*words, **flags)]


def lamb(**params) -> dict:
    return {"optimizer": {"type": "Lamb", "params": params}}


def muon(**params) -> dict:
    return {"optimizer": {"type": "Muon", "params": params}}


def zero(**settings) -> dict:
    return {"zero_optimization": settings}


JSON = [
    ({"train_batch_size": 64}, ["train_batch_size", "64", "--batch-size is 8"]),
    ({"train_micro_batch_size_per_gpu": 1}, ["train_micro_batch_size_per_gpu", "2"]),
    ({"gradient_accumulation_steps": 7}, ["gradient_accumulation_steps", "7"]),
    ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation", "zero_optimization"]),
    (zero(stage=4), ["stage 4", "0, 1, 2, 3"]),
    (zero(stage=1, round_robin_gradients=True), ["round_robin"]),
    (zero(stage=1, allgather_bucket_size=500_000_001), ["allgather_bucket_size", "even"]),
    (zero(stage=3, offload_param={"device": "cpu"}), ["offload"]),
    (
        zero(stage=3, stage3_module_granularity_threshold=5),
        ["stage3_module_granularity_threshold"],
    ),
    ({**zero(stage=0), "fp16": {"enabled": True}}, ["fp16", "loss scale"]),
    ({**zero(stage=0), "bf16": {"enabled": True}}, ["bf16", "stage 1"]),
    (zero(stage=1, overlap_com=True), ["overlap_com", "overlap_comm"]),
    ({"bf16": {"enable": True}}, ["bf16.enable", "enabled"]),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["choose one"]),
    (zero(stage=3, memory_efficient_linear=True), ["memory_efficient_linear", "1 % off"]),
    (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        ["check_grad_overflow", "not finite"],
    ),
    ({"optimizer": {"type": "FusedLamb"}}, ["FusedLamb", "stage 1", "43 to 52 %"]),
    ({"optimizer": {"type": "OneBitLamb"}}, ["OneBitLamb", "Lamb, AdamW"]),
    (lamb(max_coeff=10), ["max_coeff", "betas"]),
    (lamb(momentum=0.9), ["optimizer.params.momentum", "betas"]),
    (muon(bias_correction=True), ["optimizer.params.bias_correction", "adam_lr, betas"]),
    (muon(momentum=1), ["params.momentum 1", "below 1"]),
    (muon(lr=0, adam_lr=0.001), ['"adam_lr"', "above 0"]),
    ({"scheduler": {"type": "WarmupLR"}}, ["scheduler", "--warmup-steps"]),
    ({"tensor_parallel": {"autotp_size": 2}}, ["--tensor-parallel"]),
    ({"checkpoint": {"writer": {}}}, ["checkpoint"]),
    ({"activation_checkpointing": {}}, ["reentrant"]),
    ({"gradient_clipping": "auto"}, ['gradient_clipping "auto"', "at least 0"]),
    ({"gradient_clipping": -1}, ["gradient_clipping -1", "at least 0"]),
    ({"optimizer": None}, ["optimizer null", "an object"]),
    (zero(stage=True), ["stage true", "0, 1, 2, 3"]),
    (zero(reduce_bucket_size="5e8"), ["reduce_bucket_size", "auto"]),
    (zero(reduce_bucket_size=0), ["reduce_bucket_size 0", "at least 1"]),
    ({"steps_per_print": 0}, ["steps_per_print 0", "at least 1"]),
    ({"communication_data_type": "int8"}, ["communication_data_type", "fp32"]),
    (
        {"bf16": {"enabled": True, "check_grad_overflow": 0}},
        ["bf16.check_grad_overflow 0", "true or false"],
    ),
    ({"optimizer": {"type": "Lamb", "parameters": {}}}, ["optimizer.parameters", "params"]),
    (lamb(lr="1e-3"), ['params.lr "1e-3"', '"auto" or a number', "at least 0"]),
    (lamb(betas=[1, 1]), ["params.betas.0 1", "below 1"]),
    (lamb(betas=[0.9]), ["params.betas [0.9]", "2 values"]),
    (lamb(betas="auto"), ['params.betas "auto"', "a list"]),
    (lamb(weight_decay=10**400), ["too large"]),
    (
        lamb(**{**SHIPPED["optimizer"]["params"], "lr": 0.001}),
        ["0.001", "--learning-rate is 0.002"],
    ),
]


def test_a_wrong_deepspeed_config(refuse, tmp_path):
    path = tmp_path / "ds.json"
    faults = []
    for changes, words in JSON:
        path.write_text(json.dumps({**SHIPPED, **changes}))
        # Where the file and a flag differ, the key and the flag are named, not the file.
        is_of_both = any(word in words[0] for word in ("batch", "grad", "adam_lr"))
        place = [] if is_of_both else [str(path)]
        typed = {"learning_rate": 0.002} if "0.002" in words[-1] else {}
        faults += refuse(*(words if typed else place + words), deepspeed_config=path, **typed)
    long = '{"steps_per_print": ' + "9" * 5000 + "}"  # more digits than Python reads
    for content in ("", "{", "[1]", '{"gradient_clipping": 1e999}', long):
        path.write_text(content)
        faults += refuse(str(path), deepspeed_config=path)
    assert not faults


def test_fp16_where_the_device_has_none(refuse, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    file = "ds_configs/zero1_fp16.json"
    assert not refuse(f"{file}: fp16.enabled true", "bf16 or fp32", deepspeed_config=file)


def lay_out(root: Path) -> list[tuple[str, Path]]:
    """Wrong paths of every kind: (the flag, the path)."""
    (root / "file").write_text("text")
    (root / "folder").mkdir()
    (root / "loop").symlink_to(root / "loop")
    (root / "dangling").symlink_to(root / "nothing")
    (root / "piped").mkdir()
    os.mkfifo(root / "piped" / "history.jsonl")  # to open it would wait for ever
    names = {
        "data": ("file", "loop", "dangling", "folder"),
        "output": ("file", "file/run", "x" * 300, "piped"),
        "deepspeed_config": ("folder", "dangling"),
        "init_from": ("file", "folder"),
    }
    return [(flag, root / name) for flag, of_flag in names.items() for name in of_flag]


def test_wrong_paths(refuse, data, tmp_path):
    paths = lay_out(tmp_path)
    assert not [f for flag, path in paths for f in refuse(str(path), ranks=1, **{flag: path})]
    copy = shutil.copytree(data, tmp_path / "copy")
    for split in ("train", "heldout"):
        lost = next(copy.glob(f"{split}-*.tar"))
        aside = lost.rename(tmp_path / lost.name)
        assert not refuse(lost.name, data=copy)
        aside.rename(lost)


@contextmanager
def as_nobody():
    """Run as a user without privileges: permissions do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)  # os.access goes by the real one
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_what_may_not_be_read_or_written(data):
    with tempfile.TemporaryDirectory() as name:  # other users may not enter pytest's own folders
        root = Path(name)
        root.chmod(0o755)
        folder = shutil.copytree(data, root / "data")
        run, init = root / "run", root / "init"
        shutil.copy(ROOT / "ds_configs" / "zero1_fp32.json", root / "ds.json")
        for path in (run, init):
            path.mkdir()
        (run / "config.json").write_text("{}")
        run.chmod(0o777)
        closed = [folder, folder / "index.json", folder / "spiece.model", root / "ds.json"]
        # Below a folder that is read-only nothing can be made either: seen before the work.
        root.chmod(0o555)
        with as_nobody():
            assert not find_faults(root, argv_of(folder, root / "new/run"), f"{root} may not be")
        root.chmod(0o755)
        for path in (*closed, run, run / "config.json", init):
            flags = {"init_from": init} if path == init else {}
            mode = path.stat().st_mode
            path.chmod(0)
            argv = argv_of(folder, run, deepspeed_config=root / "ds.json", **flags)
            with as_nobody():
                faults = find_faults(root, argv, str(path))
            path.chmod(mode)
            assert not faults


@pytest.fixture
def started(data, tmp_path) -> dict:
    """What config.json says of a run that has been started at tmp_path / "run"."""
    (tmp_path / "run").mkdir()
    record = as_json(read_config(argv_of(data, tmp_path / "run"), world_size=2)[0])
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    return record


def test_resuming_with_other_values_names_both(started, refuse, data, tmp_path):
    faults = []
    for flags, words in (
        ({"hidden_size": 64}, ["--hidden-size is 64", "started with 32"]),
        ({"objective": "nsp"}, ["--objective is nsp", "started with sop"]),
        ({"objective": "none"}, ["--objective is none", "started with sop"]),
        ({"warmup_steps": 3}, ["--warmup-steps is 3", "started with 0"]),
        ({"data": [data, data]}, ["--data (sha256 of its shards) is", f"(--data {data})"]),
        ({"batch_size": 16}, ["--batch-size is 16", "started with 8"]),
        ({"seed": 1}, ["--seed is 1", "started with 0"]),
        ({"learning_rate": 0.1}, ["--learning-rate is 0.1", "started with 0.00176"]),
        (
            {"model": "albert-base", "num_heads": 4},
            ["--model is albert-base", "started with albert-tiny"],
        ),
    ):
        faults += refuse(*words, **flags)
    path = tmp_path / "ds.json"
    params = SHIPPED["optimizer"]["params"]
    for name, value in (("lr", 0.1), ("weight_decay", 0.5)):
        path.write_text(json.dumps({**SHIPPED, **lamb(**{**params, name: value})}))
        words = f'albert-ds: "optimizer.params.{name}" of --deepspeed_config is {value}'
        faults += refuse(words, deepspeed_config=path)
    assert not faults
    allowed = dict(
        steps=20,
        micro_batch_size=4,
        save_every=5,
        max_hours=2,
        tensor_parallel=2,
        deepspeed_config="ds_configs/zero0_fp32.json",
    )
    read_config(argv_of(data, tmp_path / "run", **allowed), world_size=2)


def test_the_json_owns_the_optimizer_where_the_command_line_is_silent(data, tmp_path):
    path = tmp_path / "ds.json"
    changes = lamb(**{**SHIPPED["optimizer"]["params"], "lr": 0.001})
    path.write_text(json.dumps({**SHIPPED, **changes}))
    argv = argv_of(data, tmp_path / "run", deepspeed_config=path)
    assert read_config(argv, world_size=2)[0].learning_rate == 0.001


def test_what_a_run_lacks_is_what_its_version_did(started, refuse, tmp_path):
    faults = []
    started["eval_every"] = 77  # may change
    for holder, name, words, was in (
        (started, "eval_samples", "--eval-samples is 8", "4096"),
        (started["stream"], "word_boundaries", "--word-boundaries is scripts", "released"),
        (started, "data_sha256", "--data (sha256 of its shards)", "nothing"),
    ):
        value = holder.pop(name)
        (tmp_path / "run" / "config.json").write_text(json.dumps(started))
        faults += refuse(words, f"started with {was}")
        holder[name] = value
    del started["stream"]  # of fine-tuning, or an export
    (tmp_path / "run" / "config.json").write_text(json.dumps(started))
    assert not faults + refuse("--output ", "its config.json is of no pretraining run")


def test_the_password_of_a_url_is_not_in_config_json(data, tmp_path):
    run = tmp_path / "run"
    config = read_config(argv_of(data, run), world_size=2)[0]
    url = "https://user:secret@host/data"
    changes = {"data": [url, "https://host/b@c:d"], "command": f"albert-ds train --data {url}"}
    write_config(replace(config, **changes))
    written = (run / "config.json").read_text()
    assert "secret" not in written
    assert json.loads(written)["data"] == ["https://user:***@host/data", "https://host/b@c:d"]
    read_config(argv_of(data, run), world_size=2)  # it is no reason not to resume


def test_the_program_ends_with_2_one_line_and_nothing_written(data, tmp_path):
    run = tmp_path / "run"
    ranks = start_ranks(train_command(data, run, batch_size=9), 2)
    outputs = [process.communicate(timeout=500) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    lines = outputs[0][1].strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("albert-ds: --batch-size 9")
    assert outputs[1] == ("", "")  # local rank 0 speaks for all
    assert not run.exists()


def test_a_model_that_no_memory_holds_ends_with_2_before_anything_is_written(data, tmp_path):
    run = tmp_path / "run"
    command = train_command(data, run, hidden_size=1 << 20, ffn_size=1 << 20)
    (rank,) = start_ranks(command, 1)
    err = rank.communicate(timeout=500)[1]
    lines = [line for line in err.splitlines() if line.startswith("albert-ds: ")]
    assert rank.returncode == 2 and len(lines) == 1, err
    assert " GB of this machine's memory, " in lines[0] and "Traceback" not in err
    assert not run.exists()


def test_a_run_in_use_is_refused_and_its_ending_left_alone(data, tmp_path):
    from albert_ds.checkpoint.run_folder import RunLock

    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock(run)
    assert finish(start_ranks(train_command(data, run), 1)) == [2]
    assert sorted(path.name for path in run.iterdir()) == [".lock"]
    lock.release()


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_damaged_data_ends_every_rank_with_3_and_names_shard_and_record(data, tmp_path, split):
    copy = shutil.copytree(data, tmp_path / "copy")
    shard = next(copy.glob(f"{split}-*.tar"))
    content = bytearray(shard.read_bytes())
    content[600] ^= 0xFF
    shard.write_bytes(content)
    run = tmp_path / "run"
    ranks = start_ranks(train_command(copy, run, steps=1000, eval_every=2000), 2)
    outputs = [process.communicate(timeout=500) for process in ranks]
    assert [process.returncode for process in ranks] == [3, 3]
    ending = json.loads((run / "exit.json").read_text())
    assert (ending["code"], ending["step"]) == (3, 0 if split == "train" else None)
    assert shard.name in ending["reason"] and "-00000.seq" in ending["reason"]
    assert "Traceback" not in outputs[0][1] + outputs[1][1]
