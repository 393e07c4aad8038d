"""What is typed is what is resolved."""

import json

import pytest

from albert_ds.data.stream_config import OBJECTIVES
from albert_ds.errors import UserError
from albert_ds.settings.pretrain import read_config, resolve_workers
from albert_ds.settings.shared import as_json
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


def write_config(config, **stream) -> None:
    """RUN/config.json as a run leaves it, with other values in its "stream"."""
    record = as_json(config)
    record["stream"] = {k: v for k, v in {**record["stream"], **stream}.items() if v is not None}
    config.run.mkdir(exist_ok=True)
    (config.run / "config.json").write_text(json.dumps(record))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_is_resumed_only_in_the_format_of_its_draws(data, tmp_path, objective):
    run = tmp_path / "run"
    argv = train_command(data, run, objective=objective)[2:]
    config = read_config(argv, world_size=2)
    assert as_json(config)["stream"]["format"] == OBJECTIVES[objective].format
    write_config(config)
    assert read_config(argv, world_size=2) == config
    refusal = f"{run} was started with format .* for --objective {objective}, and this version"
    write_config(config, format=99)
    with pytest.raises(UserError, match=refusal):
        read_config(argv, world_size=2)
    write_config(config, format=None)  # from before formats were recorded: format 1
    if OBJECTIVES[objective].format == 1:
        assert read_config(argv, world_size=2) == config
    else:
        with pytest.raises(UserError, match=refusal):
            read_config(argv, world_size=2)
