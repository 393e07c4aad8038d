"""Tokenised texts, and the sequences made of them: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

A text that many sequences use (a passage of RACE, a context of SQuAD) is stored once. A sequence is
six integers: text A, its first token, the token after its last; the same for text B. A micro-batch
is collated when it is needed, as in pretraining: sequences end to end, not padded.

Features are built once and kept as OUTPUT/features/<sha256>.safetensors. The name is the checksum
of everything that decides them (the task's files, the vocabulary, the lengths): a file with that
name is read instead, and made again if it is not whole.
Shapes: B sequences and N tokens of a micro-batch, F sequences of a split.
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from albert_ds.base.cli import log_line
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_file
from albert_ds.base.json_files import check_file, parse_json
from albert_ds.data.micro_batch import concatenate
from albert_ds.data.segments import cut_pair
from albert_ds.tasks.recipes import Lengths
from albert_ds.vocab.vocab import CLS, SEP, Vocab

FEATURES = "features"  # folder in RUN; of the runs with several seeds, beside them
FORMAT = 2  # of the cached arrays; another number makes every older file a different one
NO_TAG = -100  # of [CLS] and [SEP]; PyTorch's losses leave it out
NO_TEXT = -1  # in the place of text B if a sequence has one text
BLOCK = 1000  # examples tokenised in one call
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """One split of a task, ready to be batched.

    `arrays` always has `ids` int32 (all texts end to end), `ends` int64 [texts], `rows` int32
    [F, 6] and `example` int32 [F], the number of the example that a sequence belongs to. Others
    depend on the task: `labels`, `tags` (int32, one for each of `ids`), spans, character offsets.
    """

    arrays: dict[str, np.ndarray]
    counts: dict[str, int]  # `examples`, and everything that was cut, skipped or unusual
    choices: int = 1  # sequences that are scored together (RACE: 4)
    key: str = ""  # fingerprint of the features

    @property
    def units(self) -> int:
        """Number of units to draw: sequences, or groups of `choices` of them."""
        return len(self.arrays["rows"]) // self.choices

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, int64 [F]."""
        rows = self.arrays["rows"].astype(np.int64)
        pairs = rows[:, 3] != NO_TEXT
        return 2 + rows[:, 2] - rows[:, 1] + pairs * (1 + rows[:, 5] - rows[:, 4])

    @property
    def unit_lengths(self) -> np.ndarray:
        """Tokens of every unit, int64 [units]."""
        return self.lengths.reshape(-1, self.choices).sum(1)

    def text(self, number: int) -> slice:
        """The part of `ids` that holds a text."""
        ends = self.arrays["ends"]
        return slice(int(ends[number - 1]) if number else 0, int(ends[number]))

    def sequence(self, row: int) -> tuple[np.ndarray, int]:
        """The ids int32 of one sequence, and how many of them belong to segment A."""
        a, a_begin, a_end, b, b_begin, b_end = self.arrays["rows"][row].tolist()
        ids = self.arrays["ids"]
        parts = [[CLS], ids[self.text(a)][a_begin:a_end], [SEP]]
        if b != NO_TEXT:
            parts += [ids[self.text(b)][b_begin:b_end], [SEP]]
        return np.concatenate(parts).astype(np.int32), a_end - a_begin + 2

    def tags(self, row: int) -> np.ndarray:
        """The tag int64 of each token of one sequence; NO_TAG of [CLS] and [SEP]."""
        a, begin, end = self.arrays["rows"][row, :3].tolist()
        inner = self.arrays["tags"][self.text(a)][begin:end].astype(np.int64)
        return np.pad(inner, 1, constant_values=NO_TAG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One split of a task with everything that scoring needs."""

    data: Path  # the task's folder
    name: str  # train, dev, test, dev_matched, ...
    lengths: Lengths
    features: Features


class FeatureBuilder:
    """Collects texts and sequences in flat arrays, so that a large task needs little memory."""

    def __init__(self, *extra: str):
        self._ids, self._ends = array("i"), array("q")
        self._rows, self._example = array("i"), array("i")
        self._extra = {name: array("i") for name in extra}
        self.counts: dict[str, int] = {"examples": 0}  # said first

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def add_text(self, ids: list[int]) -> int:
        """Store a tokenised text; returns its number."""
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        return len(self._ends) - 1

    def add_row(self, example: int, a: tuple[int, int, int], b=(NO_TEXT, 0, 0), **extra) -> None:
        """Add a sequence of text A and perhaps B: (number, first token, token after the last)."""
        self._rows.extend((*a, *b))
        self._example.append(example)
        for name, value in extra.items():
            self._extra[name].append(value)

    def add_example(self, example: int, texts: list[list[int]], limit: int) -> None:
        """Add a sequence of one tokenised text or two, cut to `limit` tokens with the marks."""
        first = texts[0]
        second = texts[1] if len(texts) == 2 else []
        kept_a, kept_b = cut_pair(len(first), len(second), limit - 1 - len(texts))
        if kept_a + kept_b < len(first) + len(second):
            self.count("cut to the longest sequence")
        if not all(texts):
            self.count("with an empty text")
        a = self.add_text(first[:kept_a])
        b = self.add_text(second[:kept_b]) if len(texts) == 2 else NO_TEXT
        self.add_row(example, (a, 0, kept_a), (b, 0, kept_b))

    def build(self, *, choices: int = 1, **arrays: np.ndarray) -> Features:
        extra = {name: np.array(values, np.int32) for name, values in self._extra.items()}
        return Features(
            arrays={
                "ids": np.array(self._ids, np.int32),
                "ends": np.array(self._ends, np.int64),
                "rows": np.array(self._rows, np.int32).reshape(-1, 6),
                "example": np.array(self._example, np.int32),
                **extra,
                **arrays,
            },
            counts=self.counts,
            choices=choices,
        )


def encode_examples(
    examples: Iterator[T], texts_of: Callable[[T], list[str]], vocab: Vocab
) -> Iterator[tuple[T, list[list[int]]]]:
    """Every example with the ids of its texts."""
    while block := list(islice(examples, BLOCK)):
        texts = [texts_of(example) for example in block]
        encoded = iter(vocab.encode(list(chain.from_iterable(texts))))
        for example, given in zip(block, texts, strict=True):
            yield example, list(islice(encoded, len(given)))


def collate(features: Features, units, *, with_targets: bool) -> dict:
    """The model's keyword arguments for some units: tensors as in pretraining, and targets.

    input_ids, token_type_ids, position_ids int64 [N]; cu_seqlens int32 [B + 1]; max_seqlen int.
    Targets: `labels` [units] or, if they are tags, [N]; or `span_starts`, `span_ends`, `impossible`
    [B]. Span tasks also get `allowed` bool [N]: the tokens where an answer may lie, and [CLS], for
    no answer.
    """
    arrays = features.arrays
    units = np.asarray(units)
    rows = (units[:, None] * features.choices + np.arange(features.choices)).reshape(-1)
    sequences = [features.sequence(int(row)) for row in rows]
    tensors = concatenate([ids for ids, _ in sequences], [first for _, first in sequences])
    if "token_begin" in arrays:
        tensors["allowed"] = tensors["token_type_ids"].bool() | (tensors["position_ids"] == 0)
        tensors["allowed"][tensors["cu_seqlens"][1:].long() - 1] = False  # the last [SEP]
    targets = {}
    if with_targets:
        if "labels" in arrays:
            targets["labels"] = arrays["labels"][units]
        if "tags" in arrays:
            targets["labels"] = np.concatenate([features.tags(int(row)) for row in rows])
        for name in ("span_starts", "span_ends", "impossible"):
            if name in arrays:
                targets[name] = arrays[name][rows].astype(np.int64)
    return tensors | {name: torch.from_numpy(x) for name, x in targets.items()}


def fingerprint(data: Path, files: Iterable[Path], **settings) -> str:
    """sha256 of the files in `data`, their places there, and all else that decides the features."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **settings}, sort_keys=True).encode())
    for path in files:
        if path.exists() and not path.is_file():  # to read a pipe may take for ever
            raise UserError(f"--data: {path}: not a file")
        try:
            digest.update(bytes(path.relative_to(data)) + path.read_bytes())
        except OSError as error:
            raise UserError(f"--data: {path}: {error.strerror}") from None
    return digest.hexdigest()


def cached(folder: Path, key: str, build: Callable[[], Features]) -> Features:
    """The features of a fingerprint: read from `folder`, or built and written there."""
    path = folder / f"{key}.safetensors"
    if path.is_file():
        try:
            return read_features(path)
        except DamagedData as error:
            log_line(f"{error}; it is made again")
    features = build()
    about = {"counts": features.counts, "choices": features.choices}
    about["crc32"] = zlib.crc32(save(features.arrays))
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, save(features.arrays, metadata={"about": json.dumps(about)}))
    return read_features(path)


def read_features(path: Path) -> Features:
    """Read features that `cached` has written. Raises DamagedData if they are not whole."""
    try:
        check_file(path, str(path))
        with safe_open(path, framework="numpy") as file:
            about = parse_json((file.metadata() or {}).get("about", "").encode(), str(path))
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        if about.pop("crc32", None) != zlib.crc32(save(arrays)):
            raise UserError(f"{path}: its checksum is wrong")
    except (SafetensorError, UserError) as error:
        raise DamagedData(f"tokenised features are damaged: {path}: {error}") from None
    return Features(arrays=arrays, key=path.stem, **about)
