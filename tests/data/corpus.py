"""A small made-up corpus, and how to build shards of it."""

import random
from pathlib import Path
from unittest.mock import patch

from albert_ds.text import sources
from albert_ds.text.documents import Document
from albert_ds.text.encode import BuildConfig
from albert_ds.text.pipeline import build_shards
from albert_ds.text.pool import Pool
from albert_ds.vocab.vocab import Vocab

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
SAMPLES_PER_SHARD = 8
SEQUENCE_LENGTH = 64


def make_documents(number: int, seed: int = 0) -> list[list[str]]:
    """Documents as lists of sentences of made-up words; no two sentences are the same."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(300)]

    def sentence() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 14))).capitalize() + "."

    return [[sentence() for _ in range(draw.randint(1, 40))] for _ in range(number)]


def write_wiki(path: Path, documents: list[list[str]]) -> Path:
    """Write documents as WikiExtractor does, two sentences to a paragraph."""
    with path.open("w", encoding="utf-8") as file:
        for number, sentences in enumerate(documents):
            file.write(f'<doc id="{number}" url="" title="">\n')
            for i in range(0, len(sentences), 2):
                file.write(" ".join(sentences[i : i + 2]) + "\n\n")
            file.write("</doc>\n")
    return path


def read_all(paths: list[Path], unit_bytes: int | None = None) -> list[Document]:
    """Every document of the files, as units of work give them."""
    with patch.object(sources, "UNIT_BYTES", unit_bytes or sources.UNIT_BYTES):
        units = sources.cut_units([str(path) for path in paths])
    return [reading.document for unit in units for reading in sources.read_documents(unit)]


def build(folder: Path, vocab: Vocab, inputs: list[Path], **config) -> dict:
    """Build shards as the tool does, of short sequences and few of them to a shard."""
    settings = {
        "sequence_length": SEQUENCE_LENGTH,
        "samples_per_shard": SAMPLES_PER_SHARD,
        "holdout": 0.1,
        "max_unknown": 1.0,  # the vocabulary of these tests is small
        **config,
    }
    locations = sorted(str(path) for path in inputs)
    return build_shards(locations, vocab, folder, BuildConfig(**settings), Pool())[0]
