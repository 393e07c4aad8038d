"""What is typed is what is resolved."""

from albert_ds.config import read_config
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
