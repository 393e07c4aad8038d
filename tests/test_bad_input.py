"""Wrong input ends with code 2 and one line that names the value and what is allowed.

Most cases are asked of `read_config`, which runs before any rank starts work; a few go through the
real program, to see the exit code, the single line, and that nothing was written.
"""

import json
import shutil
from dataclasses import replace

import pytest

from albert_ds.errors import UserError
from albert_ds.settings.pretrain import read_config
from albert_ds.settings.shared import as_json, write_config
from tests.conftest import ROOT, finish, start_ranks, train_command


def argv_of(command: list[str]) -> list[str]:
    return command[2:]


def refuse(argv: list[str], world_size: int = 2) -> str:
    """The one line with which `read_config` refuses."""
    with pytest.raises(UserError) as caught:
        read_config(argv, world_size=world_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"batch_size": 9}, ["--batch-size 9", "--micro-batch-size 2", "multiples of 4"]),
        ({"batch_size": 0}, ["--batch-size 0", "at least 1"]),
        ({"steps": "many"}, ["--steps many", "whole number"]),
        ({"model": "albert-huge"}, ["--model", "albert-huge", "albert-base"]),
        ({"objective": "mlm"}, ["--objective", "'mlm'", "sop"]),
        ({"sharing": "some"}, ["--sharing some", "groups:N"]),
        ({"sharing": "groups:5"}, ["--sharing groups:5", "--num-layers 2"]),
        ({"num_heads": 5}, ["--num-heads 5", "--hidden-size 32"]),
        ({"dropout": 1.5}, ["--dropout 1.5", "at least 0 and below 1"]),
        ({"sequence_length": 512}, ["--sequence-length 512", "at most 64"]),
        ({"max_position_embeddings": 32, "sequence_length": 64}, ["--sequence-length 64", "32"]),
        ({"tensor_parallel": 3}, ["--tensor-parallel 3", "ranks 2", "allowed: 1, 2"]),
        ({"warmup_steps": 13}, ["--warmup-steps 13", "--steps 12"]),
        ({"max_hours": 0}, ["--max-hours 0", "above 0"]),
        ({"init_from": "nowhere"}, ["--init-from nowhere", "no such folder"]),
        (
            {"initial_attention": "neighbours", "init_from": "nowhere"},
            ["--initial-attention neighbours", "not with --init-from"],
        ),
        (
            {"initial_attention": "neighbours", "embedding_size": 4},
            ["--initial-attention neighbours", "--embedding-size 4", "from 8 to --hidden-size 32"],
        ),
        ({"pair_head_rate": 0}, ["--pair-head-rate 0", "above 0"]),
        (
            {"pair_head_rate": 0.1, "objective": "none"},
            ["--pair-head-rate", "not with --objective none"],
        ),
        ({"data_weights": [0.5, 0.5]}, ["--data-weights", "2 numbers for 1"]),
        ({"data_weights": -1}, ["--data-weights"]),
        ({"seed": -3}, ["--seed"]),
        ({"masked_fraction": 2}, ["--masked-fraction 2", "above 0 and below 1"]),
        ({"max_ngram": 0}, ["--max-ngram", "at least 1"]),
        ({"max_predictions": 0}, ["--max-predictions", "at least 1"]),
        ({"colour": "blue"}, ["--colour"]),
    ],
)
def test_wrong_flags(data, tmp_path, flags, words):
    message = refuse(argv_of(train_command(data, tmp_path / "run", **flags)))
    for word in words:
        assert word in message, message


def lamb(**params) -> dict:
    return {"optimizer": {"type": "Lamb", "params": params}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_batch_size": 64}, ["train_batch_size", "64", "--batch-size is 8"]),
        ({"train_micro_batch_size_per_gpu": 1}, ["train_micro_batch_size_per_gpu", "2"]),
        ({"gradient_accumulation_steps": 7}, ["gradient_accumulation_steps", "7"]),
        ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation", "zero_optimization"]),
        ({"zero_optimization": {"stage": 4}}, ["stage 4", "0, 1, 2, 3"]),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, ["round_robin"]),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, ["offload"]),
        (
            {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 5}},
            ["stage3_module_granularity_threshold"],
        ),
        ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}}, ["fp16", "loss scale"]),
        ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, ["bf16", "stage 1"]),
        ({"zero_optimization": {"stage": 1, "overlap_com": True}}, ["overlap_com", "overlap_comm"]),
        ({"bf16": {"enable": True}}, ["bf16.enable", "enabled"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["choose one"]),
        (
            {"zero_optimization": {"stage": 3, "memory_efficient_linear": True}},
            ["memory_efficient_linear", "1 % off"],
        ),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            ["check_grad_overflow", "not finite"],
        ),
        ({"optimizer": {"type": "FusedLamb"}}, ["FusedLamb", "stage 1", "43 to 52 %"]),
        ({"optimizer": {"type": "OneBitLamb"}}, ["OneBitLamb", "Lamb, AdamW"]),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": 10}}}, ["max_coeff", "betas"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler", "--warmup-steps"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["--tensor-parallel"]),
        ({"checkpoint": {"writer": {}}}, ["checkpoint"]),
        ({"activation_checkpointing": {}}, ["reentrant"]),
        ({"gradient_clipping": "auto"}, ['gradient_clipping "auto"', "at least 0"]),
        ({"gradient_clipping": -1}, ["gradient_clipping -1", "at least 0"]),
        ({"gradient_clipping": float("nan")}, ["NaN is not finite"]),
        ({"gradient_clipping": float("inf")}, ["Infinity is not finite"]),
        ({"bf16": {"enabled": "auto"}}, ['bf16.enabled "auto"', "true or false"]),
        ({"bf16": None}, ["bf16 null", "an object"]),
        ({"zero_optimization": [1]}, ["zero_optimization [1]", "an object"]),
        ({"zero_optimization": {"stage": True}}, ["stage true", "0, 1, 2, 3"]),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, ["reduce_bucket_size", "auto"]),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, ["reduce_bucket_size 0", "at least 1"]),
        ({"steps_per_print": 0}, ["steps_per_print 0", "at least 1"]),
        ({"communication_data_type": "int8"}, ["communication_data_type", "fp32"]),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": 0}},
            ["bf16.check_grad_overflow 0", "true or false"],
        ),
        ({"optimizer": None}, ["optimizer null", "an object"]),
        ({"optimizer": {"type": "Lamb", "parameters": {}}}, ["optimizer.parameters", "params"]),
        ({"optimizer": {"type": "Lamb", "params": None}}, ["optimizer.params null"]),
        (lamb(lr="1e-3"), ['params.lr "1e-3"', '"auto" or a number', "at least 0"]),
        (lamb(betas=[1, 1]), ["params.betas.0 1", "below 1"]),
        (lamb(betas=[0.9]), ["params.betas [0.9]", "2 values"]),
        (lamb(betas="auto"), ['params.betas "auto"', "a list"]),
        (lamb(weight_decay=10**400), ["too large"]),
    ],
)
def test_wrong_deepspeed_config(data, tmp_path, changes, words):
    shipped = json.loads((ROOT / "ds_configs" / "zero1_fp32.json").read_text())
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**shipped, **changes}))
    command = train_command(data, tmp_path / "run", deepspeed_config=path)
    message = refuse(argv_of(command))
    for word in [str(path) if "batch" not in words[0] and "grad" not in words[0] else "", *words]:
        assert word in message, message


def test_a_number_in_both_places_that_differs(data, tmp_path):
    shipped = json.loads((ROOT / "ds_configs" / "zero1_fp32.json").read_text())
    shipped["optimizer"]["params"]["lr"] = 0.001
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(shipped))
    flags = dict(deepspeed_config=path, learning_rate=0.002)
    message = refuse(argv_of(train_command(data, tmp_path / "run", **flags)))
    assert "0.001" in message and "--learning-rate is 0.002" in message
    # The JSON owns the optimizer block where the command line is silent.
    command = train_command(data, tmp_path / "run", deepspeed_config=path)
    assert read_config(argv_of(command), world_size=2).learning_rate == 0.001


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[1]", "\x00", "", "null", '{"a": 1}{', "\xff", '{"a": ' * 5000, "[" * 50000),
        '{"steps_per_print": ' + "9" * 5000 + "}",
        '{"gradient_clipping": 1e999}',
        '{"gradient_clipping": 1.0, "gradient_clipping": 2.0}',
        '{"optimizer": ' + '{"a": ' * 40 + "1" + "}" * 41,
    ],
)
def test_a_deepspeed_config_that_is_no_object(data, tmp_path, content):
    path = tmp_path / "ds.json"
    path.write_text(content)
    command = train_command(data, tmp_path / "run", deepspeed_config=path)
    assert str(path) in refuse(argv_of(command))


def test_fp16_is_refused_before_anything_is_written_where_the_device_has_none(
    data, tmp_path, monkeypatch
):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    file = "ds_configs/zero1_fp16.json"
    message = refuse(argv_of(train_command(data, tmp_path / "run", deepspeed_config=file)))
    assert f"{file}: fp16.enabled true" in message and "bf16 or fp32" in message


def test_missing_files(data, tmp_path):
    run = tmp_path / "run"
    assert "no such file" in refuse(argv_of(train_command(data, run, deepspeed_config="no.json")))
    assert "index.json" in refuse(argv_of(train_command(tmp_path, run)))
    other = refuse(argv_of(train_command(data, run, init_from=tmp_path)))
    assert str(tmp_path) in other and "neither a run" in other
    copy = shutil.copytree(data, tmp_path / "copy")
    next(copy.glob("train-*.tar")).unlink()
    assert "train-" in refuse(argv_of(train_command(copy, run)))


def test_a_vocabulary_that_disagrees_with_the_shards(data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "copy")
    with open(copy / "spiece.model", "ab") as file:
        file.write(b"\n\x08\n\x03abc\x15\x00\x00\x00\x00")
    assert "spiece.model" in refuse(argv_of(train_command(copy, tmp_path / "run")))


def test_resuming_with_other_values_names_both(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = read_config(argv_of(train_command(data, run)), world_size=2)
    (run / "config.json").write_text(json.dumps(as_json(config)))
    for flags, words in (
        ({"hidden_size": 64}, ["--hidden-size is 64", "started with 32"]),
        ({"objective": "nsp"}, ["--objective is nsp", "started with sop"]),
        ({"batch_size": 16}, ["--batch-size is 16", "started with 8"]),
        ({"seed": 1}, ["--seed is 1", "started with 0"]),
        ({"learning_rate": 0.1}, ["--learning-rate is 0.1", "started with 0.00176"]),
        (
            {"model": "albert-base", "num_heads": 4},
            ["--model is albert-base", "started with albert-tiny"],
        ),
    ):
        message = refuse(argv_of(train_command(data, run, **flags)))
        for word in words:
            assert word in message, message
    allowed = dict(
        steps=20,
        micro_batch_size=4,
        save_every=5,
        max_hours=2,
        tensor_parallel=2,
        deepspeed_config="ds_configs/zero0_fp32.json",
    )
    read_config(argv_of(train_command(data, run, **allowed)), world_size=2)


def test_resuming_with_another_optimizer_names_the_json(data, tmp_path):
    run, path = tmp_path / "run", tmp_path / "ds.json"
    run.mkdir()
    config = read_config(argv_of(train_command(data, run)), world_size=2)
    (run / "config.json").write_text(json.dumps(as_json(config)))
    shipped = json.loads((ROOT / "ds_configs" / "zero1_fp32.json").read_text())
    for name, value in (("lr", 0.1), ("weight_decay", 0.5)):
        optimizer = {"type": "Lamb", "params": {**shipped["optimizer"]["params"], name: value}}
        path.write_text(json.dumps({**shipped, "optimizer": optimizer}))
        message = refuse(argv_of(train_command(data, run, deepspeed_config=path)))
        assert message.startswith(f'"optimizer.params.{name}" of --deepspeed_config is {value}')


def test_a_key_that_an_old_run_lacks_has_its_old_default(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = read_config(argv_of(train_command(data, run)), world_size=2)
    record = as_json(config)
    for holder, name in ((record, "eval_samples"), (record["stream"], "word_boundaries")):
        del holder[name]
    record["eval_every"] = 77  # may change
    (run / "config.json").write_text(json.dumps(record))
    argv = argv_of(train_command(data, run, eval_samples=4096))
    assert read_config(argv, world_size=2).eval_samples == 4096
    assert "--eval-samples is 8" in refuse(argv_of(train_command(data, run)))
    argv = argv_of(train_command(data, run, eval_samples=4096, word_boundaries="released"))
    assert "--word-boundaries is released" in refuse(argv)
    del record["data_sha256"]
    (run / "config.json").write_text(json.dumps(record))
    argv = argv_of(train_command(data, run, eval_samples=4096))
    assert '"data_sha256" of config.json' in refuse(argv)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("learning_rate", value) for value in ("nan", "inf", "-1", "1e300")),
        *(("dropout", value) for value in ("nan", "1", "-0.1")),
        *(("masked_fraction", value) for value in ("0", "1", "nan")),
        *(("timeout_minutes", value) for value in ("0", "nan", "inf", "1e300")),
        *(("max_hours", value) for value in ("-1", "nan", "inf", "1e300")),
        *(("batch_size", value) for value in ("1_0.5", "1" + "0" * 30, "9" * 5000)),
        *(("micro_batch_size", value) for value in ("-2", "1" + "0" * 30)),
        *(("max_ngram", value) for value in ("1000", "3.0")),
        *(("data_weights", value) for value in ("0", "nan")),
        *((name, "") for name in ("output", "data", "deepspeed_config", "init_from")),
        *((name, "\udcff") for name in ("output", "data")),
    ],
)
def test_a_value_out_of_range_names_flag_value_and_range(data, tmp_path, flag, value):
    given = {"data": data, "output": tmp_path / "run", flag: value}
    command = argv_of(train_command(given.pop("data"), given.pop("output"), **given))
    name = flag if flag == "deepspeed_config" else flag.replace("_", "-")
    message = refuse(command)
    shown = value if value.isprintable() and value else repr(value)
    assert message.startswith(f"--{name} {shown}: must be "), message


def test_an_empty_output_writes_nothing(data, tmp_path, monkeypatch, capsys):
    from albert_ds.train import main

    argv = argv_of(train_command(data, "out"))
    argv[argv.index("--output") + 1] = ""
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("albert-ds: --output ''")
    assert not list(tmp_path.iterdir())


def test_the_program_ends_with_2_one_line_and_nothing_written(data, tmp_path):
    run = tmp_path / "run"
    ranks = start_ranks(train_command(data, run, batch_size=9), 2)
    outputs = [process.communicate(timeout=180) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    lines = outputs[0][1].strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("albert-ds: --batch-size 9")
    assert outputs[1] == ("", "")  # local rank 0 speaks for all
    assert not run.exists()


def test_a_model_that_no_memory_holds_ends_with_2_before_anything_is_written(data, tmp_path):
    run = tmp_path / "run"
    command = train_command(data, run, hidden_size=1 << 20, ffn_size=1 << 20)
    (rank,) = start_ranks(command, 1)
    err = rank.communicate(timeout=180)[1]
    lines = [line for line in err.splitlines() if line.startswith("albert-ds: ")]
    assert rank.returncode == 2 and len(lines) == 1, err
    assert " GB of this machine's memory, " in lines[0] and "Traceback" not in err
    assert not run.exists()


def test_the_password_of_a_url_is_not_in_config_json(data, tmp_path):
    run = tmp_path / "run"
    config = read_config(argv_of(train_command(data, run)), world_size=2)
    url = "https://user:secret@host/data"
    write_config(replace(config, data=[url, "https://host/b@c:d"]))
    written = (run / "config.json").read_text()
    assert "secret" not in written
    assert json.loads(written)["data"] == ["https://user:***@host/data", "https://host/b@c:d"]
    read_config(argv_of(train_command(data, run)), world_size=2)  # it is no reason not to resume


def test_a_run_in_use_is_refused_and_its_ending_left_alone(data, tmp_path):
    from albert_ds.process.run_folder import RunLock

    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock(run)
    assert finish(start_ranks(train_command(data, run), 1)) == [2]
    assert sorted(path.name for path in run.iterdir()) == [".lock"]
    lock.release()


def test_damaged_data_ends_every_rank_with_3_and_names_shard_and_record(data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "copy")
    shard = next(copy.glob("train-*.tar"))
    content = bytearray(shard.read_bytes())
    content[600] ^= 0xFF
    shard.write_bytes(content)
    run = tmp_path / "run"
    ranks = start_ranks(train_command(copy, run, steps=1000, eval_every=2000), 2)
    outputs = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == [3, 3]
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 3
    assert shard.name in ending["reason"] and "-00000.seq" in ending["reason"]
    assert "Traceback" not in outputs[0][1] + outputs[1][1]
