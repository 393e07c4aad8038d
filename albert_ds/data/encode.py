"""The first pass of building: one unit of text -> sentences -> ids -> sequences -> sorted runs.

The key of a sequence is a hash of (seed, document, its number there), so sorting by it is a shuffle
of the whole corpus that depends on nothing but the text. A document is known by a hash of its text,
which also decides whether it is held out, so copies of it are never on both sides.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b

import numpy as np

from albert_ds.data.inputs import Reading
from albert_ds.data.readers import DAMAGE, split_sentences
from albert_ds.data.records import pack_sequence, token_dtype
from albert_ds.data.runs import KEYS, RunWriter, Spilled
from albert_ds.data.segments import pack_sentences
from albert_ds.data.vocab import UNK, Vocab

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
    "unknown_tokens",
)


def encode_documents(
    readings: Iterable[Reading],
    vocab: Vocab,
    runs: RunWriter,
    *,
    sequence_length: int,
    seed: int,
    lines: str,
    language: str,
    advance: Callable[[int, int], None],
) -> dict:
    """Write the sequences of a unit to `runs`. Returns what there is to know about the unit:

    counts: of COUNTS; draws: lowest and highest held-out draw of its documents; damage: by kind,
    the place of the first document that was damaged so.
    """
    counts = Counter(dict.fromkeys(COUNTS, 0))
    damage: dict[str, str] = {}
    capacity = sequence_length - 3
    dtype = np.dtype(token_dtype(vocab.size)).newbyteorder("<")
    salt = seed.to_bytes(16, "little")
    lowest, highest = KEYS, -1
    for seen, (document, name, bytes_read) in enumerate(readings, 1):
        advance(seen, bytes_read)
        if document.damage:
            counts[f"damaged_{document.damage}"] += 1
            damage.setdefault(document.damage, f"{name}: line {document.line}")
            continue
        counts["cut_documents"] += document.cut
        sentences = vocab.encode(split_sentences(document.lines, lines, language))
        kept = [sentence for sentence in sentences if sentence]
        counts["empty_sentences"] += len(sentences) - len(kept)
        if not kept:
            counts["empty_documents"] += 1
            continue
        text = blake2b("\n".join(document.lines).encode(), digest_size=8).digest()
        draw = _hash(salt, text)
        lowest, highest = min(lowest, draw), max(highest, draw)
        counts["documents"] += 1
        counts["sentences"] += len(kept)
        counts["cut_sentences"] += sum(len(sentence) > capacity for sentence in kept)
        counts["unknown_tokens"] += sum(sentence.count(UNK) for sentence in kept)
        for number, (ids, ends) in enumerate(pack_sentences(kept, capacity)):
            counts["sequences"] += 1
            counts["one_sentence_sequences"] += len(ends) == 1
            counts["tokens"] += len(ids)
            record = pack_sequence(int.from_bytes(text, "little"), ends, ids, dtype)
            key = _hash(salt, text, number.to_bytes(8, "little"))
            runs.add(Spilled(key, record, len(ids), draw, number == 0))
    runs.flush()
    return {"counts": dict(counts), "draws": [lowest, highest], "damage": damage}


def _hash(*parts: bytes) -> int:
    return int.from_bytes(blake2b(b"".join(parts), digest_size=8).digest(), "big")
