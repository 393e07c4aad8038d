"""What the released ALBERT pipeline does with text, as a yardstick for data_bench.py; train on
nothing it writes.

The algorithm of create_pretraining_data.py, written from its description: every document is
tokenised into memory; then each pass over all documents makes padded, masked sentence-order samples
(target length drawn once a document and pass, n-grams of whole words, at most 20 predictions); then
everything is shuffled and written as tf.train.Example records. Tokenising is our own, so that only
the pipelines differ.
"""

import argparse
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from albert_ds.data.inputs import cut_units, read_documents
from albert_ds.data.readers import split_sentences
from albert_ds.data.storage import find_files
from albert_ds.data.vocab import CLS, MASK, SEP, Vocab, read_vocab
from albert_ds.data.words import build_word_starts
from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser

LENGTH = 512
MAX_PREDICTIONS = 20
MASKED_FRACTION = 0.15
SHORT_FRACTION = 0.1
NGRAM_SHARES = (6 / 11, 3 / 11, 2 / 11)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="GLOB", help="text, as for build_shards.py")
    add("--vocab", required=True, metavar="FILE", help="spiece.model of build_vocab.py")
    add("--output", required=True, type=Path, metavar="FILE", help="file of records to write")
    add("--passes", type=int, default=40, help="samples of each document are drawn so often (40)")
    add("--seed", type=int, default=12345, help="of all that is drawn (12345)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    vocab, rng = read_vocab(args.vocab), random.Random(args.seed)
    documents = [
        document
        for unit in cut_units(find_files(args.input))
        for reading in read_documents(unit)
        if (document := tokenise(reading.document.lines, vocab))
    ]
    rng.shuffle(documents)
    starts = build_word_starts(vocab.pieces, "released").tolist()
    samples = [
        mask(ids, first, label, starts, rng)
        for _ in range(args.passes)
        for number in range(len(documents))
        for ids, first, label in draw_pairs(documents, number, rng)
    ]
    rng.shuffle(samples)
    with args.output.open("wb") as file:
        make = example_maker()
        for sample in samples:
            content = make(*sample)
            # The framing of a TFRecord file; its two checksums are left 0.
            file.write(struct.pack("<QI", len(content), 0) + content + bytes(4))
    print(f"{args.output}: {len(samples):,} samples")


def tokenise(lines: list[str], vocab: Vocab) -> list[list[int]]:
    return [ids for ids in vocab.encode(split_sentences(lines, "paragraph")) if ids]


def draw_pairs(
    documents: list[list[list[int]]], number: int, rng: random.Random
) -> Iterator[tuple[list[int], int, int]]:
    """(ids, tokens of [CLS] A [SEP], label) of every sample of a document in one pass."""
    document = documents[number]
    longest = LENGTH - 3
    target = rng.randint(2, longest) if rng.random() < SHORT_FRACTION else longest
    chunk: list[list[int]] = []
    size = 0
    for i, sentence in enumerate(document):
        chunk.append(sentence)
        size += len(sentence)
        if size < target and i < len(document) - 1:
            continue
        split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first = [token for part in chunk[:split] for token in part]
        second = [token for part in chunk[split:] for token in part]
        label = 0
        if len(chunk) == 1:
            second, label = draw_other(documents, number, target - len(first), rng), 1
        elif rng.random() < 0.5:
            first, second, label = second, first, 1
        while len(first) + len(second) > longest:
            longer = first if len(first) > len(second) else second
            del longer[0 if rng.random() < 0.5 else -1]
        if first and second:
            yield [CLS, *first, SEP, *second, SEP], len(first) + 2, label
        chunk, size = [], 0


def draw_other(
    documents: list[list[list[int]]], number: int, target: int, rng: random.Random
) -> list[int]:
    """Sentences of another document, from a random one on, up to about `target` tokens."""
    for _ in range(10):
        other = rng.randrange(len(documents))
        if other != number:
            break
    tokens: list[int] = []
    for sentence in documents[other][rng.randrange(len(documents[other])) :]:
        tokens += sentence
        if len(tokens) >= target:
            break
    return tokens


def mask(ids: list[int], first: int, label: int, starts: list[bool], rng: random.Random):
    """The sample with its masked positions and labels."""
    words: list[list[int]] = []
    for position, token in enumerate(ids):
        if token in (CLS, SEP):
            continue
        if words and not starts[token]:
            words[-1].append(position)
        else:
            words.append([position])
    budget = min(MAX_PREDICTIONS, max(1, round(MASKED_FRACTION * len(ids))))
    # For each word, the n-grams that begin with it.
    ngrams = [
        [words[i : i + n + 1] for n in range(min(3, len(words) - i))] for i in range(len(words))
    ]
    rng.shuffle(ngrams)
    covered: set[int] = set()
    for candidates in ngrams:
        if len(covered) >= budget:
            break
        n = rng.choices(range(len(candidates)), NGRAM_SHARES[: len(candidates)])[0]
        positions = [p for word in candidates[n] for p in word]
        while len(covered) + len(positions) > budget and n:
            n -= 1
            positions = [p for word in candidates[n] for p in word]
        if len(covered) + len(positions) > budget or covered.intersection(positions):
            continue
        covered.update(positions)
    masked = list(ids)
    chosen = sorted(covered)
    for position in chosen:
        draw = rng.random()
        if draw < 0.8:
            masked[position] = MASK
        elif draw < 0.9:
            masked[position] = rng.randrange(len(starts))
    return masked, first, label, chosen, [ids[position] for position in chosen]


def example_maker():
    """A function that makes the bytes of a tf.train.Example of one sample, all fields padded."""
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import (
        FieldDescriptorProto as field,  # ty: ignore[import-not-found]
    )
    from google.protobuf.descriptor_pb2 import (
        FileDescriptorProto,  # ty: ignore[import-not-found]
    )

    file = FileDescriptorProto(name="example.proto", package="p", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        added = file.message_type.add(name=name)
        for field_name, number, kind, label, of in fields:
            added.field.add(name=field_name, number=number, type=kind, label=label)
            if of:
                added.field[-1].type_name = of

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("Floats", ("value", 1, field.TYPE_FLOAT, many, ""))
    message("Ints", ("value", 1, field.TYPE_INT64, many, ""))
    message(
        "Feature",
        ("floats", 2, field.TYPE_MESSAGE, one, ".p.Floats"),
        ("ints", 3, field.TYPE_MESSAGE, one, ".p.Ints"),
    )
    message(
        "Entry",
        ("key", 1, field.TYPE_STRING, one, ""),
        ("value", 2, field.TYPE_MESSAGE, one, ".p.Feature"),
    )  # a map is stored as such entries
    message("Features", ("feature", 1, field.TYPE_MESSAGE, many, ".p.Entry"))
    message("Example", ("features", 1, field.TYPE_MESSAGE, one, ".p.Features"))
    pool = descriptor_pool.Default()
    pool.Add(file)
    example_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Example"))

    def make(ids, first, label, positions, labels) -> bytes:
        unused, room = [0] * (LENGTH - len(ids)), [0] * (MAX_PREDICTIONS - len(positions))
        ints = {
            "input_ids": ids + unused,
            "input_mask": [1] * len(ids) + unused,
            "segment_ids": [0] * first + [1] * (len(ids) - first) + unused,
            "masked_lm_positions": positions + room,
            "masked_lm_ids": labels + room,
            "next_sentence_labels": [label],
        }
        example = example_class()
        for name, values in ints.items():
            example.features.feature.add(key=name).value.ints.value.extend(values)
        weights = example.features.feature.add(key="masked_lm_weights").value.floats.value
        weights.extend([1.0] * len(positions) + [0.0] * len(room))
        return example.SerializeToString()

    return make


if __name__ == "__main__":
    try:
        main()
    except ENDINGS as ending:
        print(f"released_pipeline: {ending}", file=sys.stderr)
        sys.exit(ending.code)
