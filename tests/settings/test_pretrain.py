"""What is typed is what is resolved."""

import json
import shlex

import pytest

from albert_ds.base.errors import UserError
from albert_ds.data.stream_config import OBJECTIVES
from albert_ds.settings.pretrain import read_config, resolve_workers
from albert_ds.settings.shared import write_config
from tests.conftest import train_command


def test_how_samples_are_drawn(data, tmp_path):
    """One set of shards for every objective, length and way to mask."""
    plain = read_config(train_command(data, tmp_path / "run")[2:], world_size=2).stream
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
    stream = read_config(argv, world_size=2).stream
    assert {name: getattr(stream, name) for name in typed} == typed


@pytest.mark.parametrize(("typed", "on_cuda", "on_cpu"), [({}, 2, 0), ({"num_workers": 0}, 0, 0)])
def test_cuda_gets_loader_processes_unless_typed(data, tmp_path, typed, on_cuda, on_cpu):
    config = read_config(train_command(data, tmp_path / "run", **typed)[2:], world_size=2)
    assert resolve_workers(config, "cuda").num_workers == on_cuda
    assert resolve_workers(config, "cpu").num_workers == on_cpu


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_is_resumed_only_in_the_format_of_its_draws(data, tmp_path, objective):
    run = tmp_path / "run"
    argv = train_command(data, run, objective=objective)[2:]
    config, number = read_config(argv, world_size=2), OBJECTIVES[objective].format
    write_config(config)
    record = json.loads((run / "config.json").read_text())
    assert record["stream"]["format"] == number and read_config(argv, world_size=2) == config
    record["stream"]["format"] = 99
    (run / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=f'"stream.format" .* is {number}, but {run} .* with 99'):
        read_config(argv, world_size=2)


def test_config_json_has_the_command_as_typed(data, tmp_path):
    """Without what a launcher adds; a resumed run may have another."""
    run = tmp_path / "a run"
    argv = [str(word) for word in train_command(data, run)[2:]]
    write_config(read_config(["--local_rank=0", *argv], world_size=2))
    typed = json.loads((run / "config.json").read_text())["command"]
    assert shlex.split(typed) == ["albert-ds", "train", *argv]
    assert read_config([*argv, "--log-every", "3"], world_size=2).command != typed
