"""The first pass of building: one unit of text -> sentences -> ids -> sequences -> sorted runs.

The key of a sequence is a hash of (seed, document, its number there). Sorting by it shuffles the
whole corpus, and depends on nothing but the text. A document is identified by a hash of its text,
which also decides whether it is held out, so copies of it are never in both splits.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from albert_ds.base.cli import Range, flag, integer
from albert_ds.data.segments import PACKINGS, pack_sentences
from albert_ds.data.shards import pack_sequence, token_dtype
from albert_ds.text.documents import DAMAGE, SEED, TextConfig
from albert_ds.text.external_sort import KEYS, RunWriter, SortRecord
from albert_ds.text.segmented import LONGEST_WORD, ZERO_WIDTH, encode_segmented, find_starts
from albert_ds.text.sources import Reading
from albert_ds.vocab.vocab import UNK, Vocab
from albert_ds.vocab.words import mark_words

COUNTS = (
    "documents",
    "empty_documents",  # dropped: no text
    *(f"damaged_{kind}" for kind in DAMAGE),  # dropped
    "cut_documents",  # longer than the reader takes: the rest is a document of its own
    "sentences",
    "empty_sentences",  # dropped: no piece of the vocabulary, as for a lone zero-width space
    "cut_sentences",  # longer than a sequence, cut into pieces
    "sequences",
    "one_sentence_sequences",  # have no pair: their sop or nsp label is ignored
    "tokens",
    "words",  # between spaces, or as --segmented marks them
    "unused_tokens",  # beyond the sequence length: every reading leaves as many out, drawn anew
    "unknown_tokens",
    "joined_words",  # --segmented: one piece holds characters of this word and the one before
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig(TextConfig):
    """How shards are built of text. Raises UserError, naming the flag, for a wrong value."""

    sequence_length: int = flag(
        "longest sequence, with [CLS] and two [SEP]", "TOKENS", integer(8, 1 << 15), default=512
    )
    packing: str = flag(
        "whole: a sequence holds whole sentences only. full: sentences are added until the length "
        "is reached, and training truncates every sample to it, as in the release",
        default="whole",
        choices=PACKINGS,
    )
    holdout: float = flag(
        "share (0 to 1) of the documents that are held out",
        "SHARE",
        Range(ge=0, lt=1),
        default=0.01,
    )
    samples_per_shard: int = flag(
        "mean number of sequences in a shard", "SEQUENCES", integer(1, 1 << 20), default=2048
    )
    seed: int = flag(
        "seed of the order and of the choice of held-out documents", "N", SEED, default=0
    )
    dedup: bool = flag(
        "keep one of the documents with the very same text (by default all are kept, and the "
        "copies are counted)",
        default=False,
    )


def encode_documents(
    readings: Iterable[Reading], vocab: Vocab, runs: RunWriter, config: BuildConfig
) -> dict:
    """Write the sequences of a unit to `runs`. Returns a note about the unit:

    counts: of COUNTS; draws: lowest and highest held-out draw of its documents; damage: for each
    kind, the place of the first document with that damage.
    """
    counts = Counter(dict.fromkeys(COUNTS, 0))
    damage: dict[str, str] = {}
    capacity = config.sequence_length - 3
    word_marks = mark_words(vocab.pieces, segmented=config.segmented)
    dtype = np.dtype(token_dtype(vocab.size, segmented=config.segmented)).newbyteorder("<")
    salt = config.seed.to_bytes(16, "little")
    lowest = KEYS
    highest = -1
    for reading in readings:
        document = reading.document
        if document.damage:
            counts[f"damaged_{document.damage}"] += 1
            if document.damage not in damage:
                damage[document.damage] = reading.place + reading.cause
            continue
        counts["cut_documents"] += document.cut
        if config.segmented:
            starts = find_starts(config.space(document.lines))
            longest = LONGEST_WORD if config.word_mark == ZERO_WIDTH else math.inf
            plain = config.split(document.lines)
            sentences, joined = encode_segmented(plain, starts, vocab, longest)
            counts["joined_words"] += joined
        else:
            sentences = vocab.encode(config.split(document.lines))
        kept = [sentence for sentence in sentences if sentence]
        counts["empty_sentences"] += len(sentences) - len(kept)
        if not kept:
            counts["empty_documents"] += 1
            continue
        digest = blake2b("\n".join(config.plain(document.lines)).encode(), digest_size=8).digest()
        draw = _hash(salt, digest)
        lowest, highest = min(lowest, draw), max(highest, draw)
        counts["documents"] += 1
        counts["sentences"] += len(kept)
        counts["cut_sentences"] += sum(len(sentence) > capacity for sentence in kept)
        unknown = (UNK, UNK + vocab.size)
        counts["unknown_tokens"] += sum(ids.count(token) for ids in kept for token in unknown)
        for number, (ids, ends) in enumerate(pack_sentences(kept, capacity, config.packing)):
            counts["sequences"] += 1
            counts["one_sentence_sequences"] += len(ends) == 1
            counts["tokens"] += len(ids)
            counts["words"] += int(word_marks[ids].sum())
            counts["unused_tokens"] += max(0, len(ids) - capacity)
            record = pack_sequence(int.from_bytes(digest, "little"), ends, ids, dtype)
            key = _hash(salt, digest, number.to_bytes(8, "little"))
            runs.add(SortRecord(key, record, len(ids), draw, number == 0))
    runs.flush()
    return {"counts": dict(counts), "draws": [lowest, highest], "damage": damage}


def _hash(*parts: bytes) -> int:
    return int.from_bytes(blake2b(b"".join(parts), digest_size=8).digest(), "big")
