"""Text to shards, in two passes over the data and with little of it in memory.

    1  documents -> sentences -> ids -> sequences -> a bucket on disk, chosen by the sequence's key
    2  each bucket in turn, sorted by key -> shards

The key of a sequence is a hash of (seed, document, its number there), so sorting by it is a shuffle
of the whole corpus, whose result depends neither on the order in which documents were read nor on
the number of buckets. Memory: one bucket (a few shards), one document, one vocabulary.
A document is known by a hash of its text, which also decides whether it is held out, so
copies of a document are never on both sides.
"""

import errno
import shutil
import struct
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from albert_ds.data.readers import LINE_KINDS, Document, split_sentences
from albert_ds.data.records import pack_sequence, token_dtype
from albert_ds.data.segments import pack_sentences
from albert_ds.data.shards import FORMAT, INDEX_NAME, SPLITS, ShardWriter, index_split, write_index
from albert_ds.data.vocab import UNK, Vocab
from albert_ds.errors import MachineFailed, UserError

BUCKET_BYTES = 8 << 20  # input text that shares a bucket; about two shards
MAX_BUCKETS = 4096
FLUSH_BYTES = 16 << 10  # of a bucket that wait in memory
_SPILL = struct.Struct("<QQII?")  # key, draw, record bytes, tokens, whether it opens a document
_HASH_RANGE = 1 << 64
COUNTS = (
    "documents",
    "empty_documents",  # dropped: no text
    "sentences",
    "empty_sentences",  # dropped: no piece of the vocabulary, as for a lone zero-width space
    "cut_sentences",  # longer than a sequence, cut into pieces
    "sequences",
    "one_sentence_sequences",  # have no pair: their sop or nsp label is ignored
    "tokens",
    "unknown_tokens",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    sequence_length: int = 512  # tokens, [CLS] and two [SEP] among them
    holdout: float = 0.01  # share of the documents that are held out
    samples_per_shard: int = 2048
    seed: int = 0
    lines: str = "paragraph"  # what a line of a document is: LINE_KINDS
    language: str = "en"  # whose rules end a sentence

    def __post_init__(self):
        if not 8 <= self.sequence_length <= 1 << 15:
            raise UserError(f"--sequence-length {self.sequence_length}: must be in 8 .. 32768")
        if not 0 <= self.holdout < 1:
            raise UserError(f"--holdout {self.holdout}: must be in 0 .. 1, 1 excluded")
        if self.samples_per_shard < 1:
            raise UserError(f"--samples-per-shard {self.samples_per_shard}: must be at least 1")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed {self.seed}: must be in 0 .. 2**63 - 1")
        assert self.lines in LINE_KINDS


def build_shards(
    documents: Iterable[Document],
    vocab: Vocab,
    output: Path,
    config: BuildConfig,
    *,
    input_bytes: int,
) -> dict:
    """Write the shards of `documents`, the vocabulary and index.json; returns the index.

    `input_bytes`, a guess at the size of all the text, sets the number of buckets.
    Raises UserError for text that cannot be split as asked, what `documents` raises, and
    MachineFailed where the disk is full; then no index.json is written.
    """
    counts: Counter[str] = Counter()
    with _work_folder(output) as work:
        buckets = Buckets(work, min(MAX_BUCKETS, 1 + input_bytes // BUCKET_BYTES))
        draws = _fill_buckets(buckets, documents, vocab, config, counts)
        threshold = _find_threshold(config.holdout, draws, counts["documents"])
        writers = {split: ShardWriter(output, split, config.samples_per_shard) for split in SPLITS}
        split_documents: Counter[str] = Counter()
        for spilled in buckets.read_sorted():
            split = "heldout" if spilled.draw < threshold else "train"
            writers[split].add(spilled.record, spilled.tokens)
            split_documents[split] += spilled.opens_document
        for writer in writers.values():
            writer.close()
    vocab.write(output)
    index = {
        "format": FORMAT,
        "vocab_sha256": vocab.sha256,
        "vocab_size": vocab.size,
        **asdict(vocab.normalisation),
        **asdict(config),
        "token_dtype": token_dtype(vocab.size),
        "splits": {
            split: index_split(writer.shards, split_documents[split])
            for split, writer in writers.items()
        },
        "counts": dict(counts),
        "fill": counts["tokens"] / (counts["sequences"] * (config.sequence_length - 3)),
    }
    write_index(output, index)
    return index


def _fill_buckets(
    buckets: "Buckets",
    documents: Iterable[Document],
    vocab: Vocab,
    config: BuildConfig,
    counts: Counter[str],
) -> tuple[int, int]:
    """The first pass. Returns the lowest and the highest held-out draw of all documents."""
    counts.update(dict.fromkeys(COUNTS, 0))
    capacity = config.sequence_length - 3
    dtype = np.dtype(token_dtype(vocab.size)).newbyteorder("<")
    salt = config.seed.to_bytes(16, "little")
    lowest, highest = _HASH_RANGE, -1
    for lines, _ in documents:
        sentences = vocab.encode(split_sentences(lines, config.lines, config.language))
        kept = [sentence for sentence in sentences if sentence]
        counts["empty_sentences"] += len(sentences) - len(kept)
        if not kept:
            counts["empty_documents"] += 1
            continue
        name = blake2b("\n".join(lines).encode(), digest_size=8).digest()
        draw = _hash(salt, name)
        lowest, highest = min(lowest, draw), max(highest, draw)
        counts["documents"] += 1
        counts["sentences"] += len(kept)
        counts["cut_sentences"] += sum(len(sentence) > capacity for sentence in kept)
        counts["unknown_tokens"] += sum(sentence.count(UNK) for sentence in kept)
        for number, (ids, ends) in enumerate(pack_sentences(kept, capacity)):
            counts["sequences"] += 1
            counts["one_sentence_sequences"] += len(ends) == 1
            counts["tokens"] += len(ids)
            record = pack_sequence(int.from_bytes(name, "little"), ends, ids, dtype)
            key = _hash(salt, name, number.to_bytes(8, "little"))
            buckets.add(key, Spilled(record, len(ids), draw, number == 0))
    buckets.flush()
    if not counts["tokens"]:
        raise UserError("--input: the files hold no text")
    return lowest, highest


def _find_threshold(holdout: float, draws: tuple[int, int], documents: int) -> int:
    """Documents that draw less than this are held out: the share asked for, and at least one."""
    lowest, highest = draws
    threshold = int(holdout * _HASH_RANGE)
    if holdout and lowest < highest:
        threshold = max(threshold, lowest + 1)
    if highest < threshold:
        raise UserError(f"--holdout {holdout}: would hold out all of the {documents} documents")
    return threshold


def _hash(*parts: bytes) -> int:
    return int.from_bytes(blake2b(b"".join(parts), digest_size=8).digest(), "big")


class Spilled(NamedTuple):
    """A sequence on its way to a shard."""

    record: bytes
    tokens: int
    draw: int  # of its document, for the held-out split
    opens_document: bool  # the first sequence of its document


class Buckets:
    """A sort on disk: equal ranges of keys share a file, which is sorted when it is read back."""

    def __init__(self, folder: Path, number: int):
        self._waiting = [bytearray() for _ in range(number)]
        self._paths = [folder / f"bucket-{i:04d}" for i in range(number)]

    def add(self, key: int, spilled: Spilled) -> None:
        i = key * len(self._paths) // _HASH_RANGE
        record, tokens, draw, opens = spilled
        self._waiting[i] += _SPILL.pack(key, draw, len(record), tokens, opens) + record
        if len(self._waiting[i]) > FLUSH_BYTES:
            self._flush(i)

    def flush(self) -> None:
        for i in range(len(self._paths)):
            self._flush(i)

    def read_sorted(self) -> Iterator[Spilled]:
        """Everything that was added, by ascending key, whatever the number of buckets."""
        for path in self._paths:
            content = memoryview(path.read_bytes())
            path.unlink()
            entries, at = [], 0
            while at < len(content):
                key, draw, size, tokens, opens = _SPILL.unpack_from(content, at)
                at += _SPILL.size + size
                entries.append((key, at - size, at, tokens, draw, opens))
            entries.sort()
            for _, begin, end, tokens, draw, opens in entries:
                yield Spilled(bytes(content[begin:end]), tokens, draw, opens)

    def _flush(self, i: int) -> None:
        # Opened anew each time: there may be more buckets than files that a process may hold open.
        with self._paths[i].open("ab") as file:
            file.write(self._waiting[i])
        self._waiting[i] = bytearray()


@contextmanager
def _work_folder(output: Path) -> Generator[Path]:
    """A folder in `output` that is gone afterwards, and `output` with it if it stayed empty."""
    if (output / INDEX_NAME).exists():
        raise UserError(f"--output {output}: holds a built data set already; name another folder")
    is_new = not output.exists()
    work = output / "building"
    try:
        for name in ("building", "*.partial", "train-*.tar", "heldout-*.tar"):
            for left_over in output.glob(name):  # of a build that was killed
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be made: {error.strerror}") from None
    try:
        yield work
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MachineFailed(f"{output}: {error.strerror}; no {INDEX_NAME} was written") from None
    finally:
        shutil.rmtree(work)
        if is_new and not any(output.iterdir()):
            output.rmdir()
