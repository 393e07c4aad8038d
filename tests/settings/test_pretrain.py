"""What is typed is what is resolved."""

import json
import shlex
from dataclasses import replace

import pytest

import albert_ds
from albert_ds.base.errors import UserError
from albert_ds.data.stream_config import OBJECTIVES
from albert_ds.settings.pretrain import read_config, resolve_workers
from albert_ds.settings.shared import write_config
from tests.conftest import train_command


def test_how_samples_are_drawn(data, tmp_path):
    """One set of shards for every objective, length and way to mask."""
    plain = read_config(train_command(data, tmp_path / "run")[2:], world_size=2)[0].stream
    assert (plain.masked_fraction, plain.max_predictions, plain.max_ngram) == (0.15, None, 3)
    typed = {
        "objective": "nsp",
        "sequence_length": 32,
        "masked_fraction": 0.3,
        "max_predictions": 20,
        "max_ngram": 1,
        "word_boundaries": "released",
        "seed": 7,
    }
    argv = train_command(data, tmp_path / "run", **typed)[2:]
    stream = read_config(argv, world_size=2)[0].stream
    assert {name: getattr(stream, name) for name in typed} == typed


@pytest.mark.parametrize(("typed", "on_cuda", "on_cpu"), [({}, 2, 0), ({"num_workers": 0}, 0, 0)])
def test_cuda_gets_loader_processes_unless_typed(data, tmp_path, typed, on_cuda, on_cpu):
    config = read_config(train_command(data, tmp_path / "run", **typed)[2:], world_size=2)[0]
    assert resolve_workers(config, "cuda").num_workers == on_cuda
    assert resolve_workers(config, "cpu").num_workers == on_cpu


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_is_resumed_only_in_the_format_of_its_draws(data, tmp_path, objective):
    run = tmp_path / "run"
    argv = train_command(data, run, objective=objective)[2:]
    config = read_config(argv, world_size=2)[0]
    number = OBJECTIVES[objective].format
    write_config(config)
    record = json.loads((run / "config.json").read_text())
    assert record["stream"]["format"] == number and read_config(argv, world_size=2)[0] == config
    record["stream"]["format"] = 99
    (run / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=f'"stream.format" .* is {number}, but {run} .* with 99'):
        read_config(argv, world_size=2)


def test_a_run_of_a_newer_version_is_refused_and_an_older_one_resumes(data, tmp_path):
    run = tmp_path / "run"
    argv = train_command(data, run)[2:]
    config = read_config(argv, world_size=2)[0]
    write_config(config)
    record = json.loads((run / "config.json").read_text())
    assert record["versions"]["albert-ds"] == albert_ds.__version__
    for older in (albert_ds.__version__, "0.0.9", None):
        record["versions"]["albert-ds"] = older
        (run / "config.json").write_text(json.dumps(record))
        assert read_config(argv, world_size=2)[0] == config
    for newer in ("0.10.0", "1.0"):
        record["versions"]["albert-ds"] = newer
        (run / "config.json").write_text(json.dumps(record))
        words = f"--output {run}: was written by albert-ds {newer}, which is newer than 0.1.0;"
        with pytest.raises(UserError, match=words):
            read_config(argv, world_size=2)


def test_config_json_has_the_command_as_typed(data, tmp_path):
    """Without what a launcher adds; a resumed run may have another."""
    run = tmp_path / "a run"
    argv = [str(word) for word in train_command(data, run)[2:]]
    write_config(read_config(["--local_rank=0", *argv], world_size=2)[0])
    typed = json.loads((run / "config.json").read_text())["command"]
    assert shlex.split(typed) == ["albert-ds", "train", *argv]
    assert read_config([*argv, "--log-every", "3"], world_size=2)[0].command != typed


def test_a_config_file_says_what_is_not_typed(data, tmp_path, capsys):
    """YAML with the names of flags, or a run's config.json: the same run, also when prolonged."""
    run, again = tmp_path / "run", tmp_path / "again"
    argv = train_command(data, run, masked_fraction="0.3..0.15@100%", dropout=0.1)[2:]
    config = read_config(argv, world_size=2)[0]
    write_config(config, trained_length=64)
    short = ["--config", run / "config.json", "--output", again]
    loaded = read_config([*map(str, short)], world_size=2)[0]
    assert replace(loaded, output=config.output, command=config.command) == config
    typed = read_config([*map(str, short), "--steps", "99", "--data", str(data)], world_size=2)[0]
    assert (typed.steps, typed.data) == (99, [str(data)])
    said = capsys.readouterr().err
    assert f"replaces --steps {config.steps} by 99" in said
    assert 'of its block "deepspeed" the learning rate alone is taken' in said
    pairs = zip(argv[::2], argv[1::2], strict=True)
    lines = [f"{flag}: {value}".lstrip("-") for flag, value in pairs if flag != "--output"]
    yaml = tmp_path / "flags.yaml"
    yaml.write_text("\n".join(lines).replace("batch-size", "batch_size"))
    loaded = read_config(["--config", str(yaml), "--output", str(again)], world_size=2)[0]
    assert replace(loaded, output=config.output, command=config.command) == config


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stepz: 3", 'unknown key "stepz"; did you mean steps?'),
        ("steps: many", "--steps many: must be a whole number"),
        ("deterministic: 3", "--deterministic 3: must be true or false"),
        ("steps: {a: 1}", "must be a value"),
        ("output: there", "output: must be typed"),
        ("- steps", "must have a name and its value a line"),
        ("steps: [3", "not YAML: "),
        ('{"versions": {}, "task": "squad1"}', "is of no pretraining run"),
        ('{"versions": {}, "stream": {}, "seeed": 1}', 'unknown key "seeed"; did you mean seed'),
    ],
)
def test_a_wrong_config_file_is_one_line(data, tmp_path, content, said):
    file = tmp_path / "flags"
    file.write_text(content)
    argv = ["--config", file, *train_command(data, tmp_path / "run")[2:]]
    with pytest.raises(UserError, match=f"^--config {file}: ") as caught:
        read_config([str(word) for word in argv], world_size=2)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_epochs_are_passes_over_all_the_data(data, tmp_path):
    argv = [str(word) for word in train_command(data, tmp_path / "run")[2:]]
    at = argv.index("--steps")
    del argv[at : at + 2]
    config = read_config([*argv, "--epochs", "2.5"], world_size=2)[0]
    samples = json.loads((data / "index.json").read_text())["splits"]["train"]["samples"]
    before = (config.steps - 1) * config.batch_size
    assert before < 2.5 * samples <= before + config.batch_size
    for flags, said in (
        ([], "one of the arguments --steps --epochs is required"),
        (["--epochs", "1", "--steps", "2"], "argument --steps: not allowed with argument --epochs"),
        (["--epochs", "1", "--batch-size", "2@0,4@50%"], "--epochs: not with a schedule"),
    ):
        with pytest.raises(UserError, match=said):
            read_config([*argv, *flags], world_size=2)
    run = tmp_path / "short"
    write_config(replace(config, output=str(run)))
    argv = ["--config", str(run / "config.json"), "--output", str(tmp_path / "next")]
    assert read_config([*argv, "--epochs", "1"], world_size=2)[0].steps < config.steps


def test_a_mistyped_flag_is_named_before_a_missing_one(data, tmp_path):
    for argv, said in (
        (["--batchsize", "3"], "--batchsize: no such flag; did you mean --batch-size?"),
        (["--qwertz=3"], "--qwertz: no such flag"),
        (["--model", "albert-bsae"], "did you mean albert-base?"),
    ):
        with pytest.raises(UserError) as caught:
            read_config(argv, world_size=1)
        assert str(caught.value).endswith(said)
