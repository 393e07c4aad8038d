"""The draws are a format: the very samples that every earlier run of this format has seen.

A run that is resumed by a later version must go on with the same samples. Whoever changes a draw on
purpose raises its number in OBJECTIVES (data/stream_config.py), which refuses such a resume,
and writes the golden values anew: `python -m tests.data.test_golden`.
"""

import hashlib
import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from albert_ds.data.shards import ShardSet, pack_sequence, write_shard
from albert_ds.data.stream import MicroBatchReader
from albert_ds.data.stream_config import OBJECTIVES, WORD_RULES, StreamConfig
from albert_ds.vocab.vocab import SPECIAL_PIECES
from tests.data.drawing import samples_of

GOLDEN = Path(__file__).with_name("golden_draws.json")
PIECES = [
    *SPECIAL_PIECES,
    *(mark + text for mark in ("\u2581", "") for text in ("a", "th", "ing", "1", "42", "\u00e4")),
    *("(", ",", ".", "'s", "\u4e2d", "\u3042", "\u0e01", "\u20ac"),
]
CASES = [
    (objective, rule, length)
    for objective, rule, length in itertools.product(OBJECTIVES, WORD_RULES, (32, 12))
]
SHOWN = (0, 1, 2, 63, 10_007)  # positions whose samples are kept as they are
HASHED = 300  # positions whose samples are kept as one checksum


def make_source(folder: Path, source: int) -> ShardSet:
    """Shards of made-up sequences: no text and no vocabulary that could change."""
    folder.mkdir()
    shards = []
    number = 0
    for shard in range(10):
        records = []
        tokens = 0
        for _ in range(6 + shard % 3):
            number += 1
            lengths = [1 + (7 * number + 5 * i * i + source) % 9 for i in range(1 + number % 7)]
            ids = [5 + (11 * number + i * i + source) % (len(PIECES) - 5) for i in range(29)]
            ends = [min(end, 29) for end in itertools.accumulate(lengths) if end < 36]
            ends = sorted(set(ends))
            tokens += ends[-1]
            records.append(pack_sequence(number // 3, ends, ids[: ends[-1]], np.dtype("<u2")))
        shards.append(write_shard(folder, f"train-{shard:06d}.tar", records, tokens))
    return ShardSet(
        folder=str(folder),
        split="train",
        shards=tuple(shards),
        vocab=SimpleNamespace(pieces=PIECES, size=len(PIECES), sha256=""),
        documents=1,
        sequence_length=32,
        token_dtype=np.dtype("<u2"),
    )


def draw(sources: list[ShardSet], objective: str, rule: str, length: int) -> dict:
    config = StreamConfig(
        objective=objective, word_boundaries=rule, sequence_length=length, seed=2**40 + 1
    )
    reader = MicroBatchReader(sources, [0.3, 0.7], config)
    drawn = samples_of([reader.read(range(n, n + 1)) for n in {*SHOWN, *range(HASHED)}])
    every = json.dumps([drawn[n] for n in range(HASHED)]).encode()
    shown = {str(n): [*drawn[n][:1], drawn[n][1].count(0), *drawn[n][3:]] for n in SHOWN}
    return {
        "format": config.format,
        "samples": shown,  # ids, tokens of the first segment, masked positions, labels, pair label
        "sha256": hashlib.sha256(every).hexdigest(),
    }


def draw_all(folder: Path) -> dict[str, dict]:
    sources = [make_source(folder / str(n), n) for n in range(2)]
    return {" ".join(map(str, case)): draw(sources, *case) for case in CASES}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw_all(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("case", [" ".join(map(str, case)) for case in CASES])
def test_the_samples_of_this_format_are_what_they_were(drawn, case):
    golden = json.loads(GOLDEN.read_text())[case]
    record = drawn[case]
    advice = f"the draws of {case.split()[0]} have changed: raise its number in OBJECTIVES"
    assert record["samples"] == golden["samples"], advice
    assert record["sha256"] == golden["sha256"], advice
    assert record["format"] == golden["format"], f"python -m {__name__} writes the golden values"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        values = draw_all(Path(temporary))
    lines = (f"{json.dumps(case)}: {json.dumps(value)}" for case, value in values.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
