"""Shards: WebDataset tars of a fixed number of sequences, and the index.json that lists them.

    train-000000.tar        members train-000000-00000.seq, train-000000-00001.seq, ... (records.py)
    heldout-000000.tar      the same for the documents that are held out
    spiece.model, tokenizer_config.json      the vocabulary
    index.json              written last: without it there is no data set

The same sequences in the same order give the same bytes. Any WebDataset reader can read a shard;
here the headers are walked directly (8 microseconds a member against WebDataset's 50 and more),
since records are needed in another order than they lie in, and often only some of them.
"""

import functools
import hashlib
import io
import json
import os
import re
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from albert_ds.data.records import Sequence, read_document, unpack_sequence
from albert_ds.data.vocab import MODEL_NAME, Vocab, read_vocab
from albert_ds.errors import DamagedData, UserError

INDEX_NAME = "index.json"
FORMAT = 1
SPLITS = ("train", "heldout")
_BLOCK = 512  # a tar is made of these: one for a member's header, then its bytes, filled up
_SHARD_NAME = re.compile(r"(train|heldout)-\d{6,}\.tar")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """A shard as index.json lists it."""

    name: str
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSet:
    """One split of a built folder, checked against its index.json."""

    folder: Path
    split: str
    shards: tuple[ShardInfo, ...]
    vocab: Vocab
    sequence_length: int  # the longest sequence, with [CLS] and two [SEP]
    token_dtype: np.dtype

    @property
    def fingerprint(self) -> str:
        """Tells these shards from any others, wherever they lie."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each shard, int64 [number of shards]."""
        return np.array([shard.samples for shard in self.shards], np.int64)


class ShardWriter:
    """Writes records to shards of `samples_per_shard` each; the last one may hold fewer."""

    def __init__(self, folder: Path, split: str, samples_per_shard: int):
        self.folder = folder
        self.split = split
        self.samples_per_shard = samples_per_shard
        self.shards: list[ShardInfo] = []
        self._tar: tarfile.TarFile | None = None
        self._samples = self._tokens = 0

    def add(self, record: bytes, tokens: int) -> None:
        stem = f"{self.split}-{len(self.shards):06d}"
        if self._tar is None:
            self._tar = tarfile.open(self._partial, "w", format=tarfile.USTAR_FORMAT)
        member = tarfile.TarInfo(f"{stem}-{self._samples:05d}.seq")  # owner 0, time 0, mode 644
        member.size = len(record)
        self._tar.addfile(member, io.BytesIO(record))
        self._samples += 1
        self._tokens += tokens
        if self._samples == self.samples_per_shard:
            self.close()

    def close(self) -> None:
        """Finish the shard at hand, if there is one."""
        if self._tar is None:
            return
        self._tar.close()
        name = f"{self.split}-{len(self.shards):06d}.tar"
        content = self._partial.read_bytes()
        info = ShardInfo(
            name=name,
            samples=self._samples,
            tokens=self._tokens,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        os.replace(self._partial, self.folder / name)
        self.shards.append(info)
        self._tar, self._samples, self._tokens = None, 0, 0

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self.split}.tar.partial"


class Shard:
    """A shard in memory; its records are unpacked, and checked, when they are asked for."""

    def __init__(self, source: ShardSet, number: int):
        self._info = source.shards[number]
        self._path = source.folder / self._info.name
        self._dtype = source.token_dtype
        self._vocab_size = source.vocab.size
        try:
            self._content = self._path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{self._path}: this shard of {INDEX_NAME} is missing") from None
        self._places = self._find_records()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Sequence:
        begin, end = self._places[number]
        try:
            return unpack_sequence(self._content[begin:end], self._dtype, self._vocab_size)
        except ValueError as error:
            raise self._damaged(number, str(error)) from None

    @functools.cached_property
    def documents(self) -> np.ndarray:
        """Document of every record, uint64; unchecked, as the records are not unpacked for it."""
        return np.array([read_document(self._content, begin) for begin, _ in self._places])

    def _find_records(self) -> list[tuple[int, int]]:
        """Begin and end of every record in the tar, whose headers are all checked."""
        content, places, at = self._content, [], 0
        for number in range(self._info.samples):
            header = content[at : at + _BLOCK]
            if len(header) < _BLOCK:
                raise self._damaged(number, "the shard is cut short before it")
            name, size = _read_header(header)
            if name is None:
                raise self._damaged(number, "its tar header is damaged")
            if name != self._key(number):
                raise self._damaged(number, f"missing; {name or 'the end'} is in its place")
            begin, end = at + _BLOCK, at + _BLOCK + size
            if end > len(content):
                raise self._damaged(number, "the shard is cut short within it")
            places.append((begin, end))
            at = begin + -(-size // _BLOCK) * _BLOCK
        if any(content[at : at + _BLOCK]):
            raise self._damaged(len(places), f"more records than the {len(places)} of {INDEX_NAME}")
        return places

    def _key(self, number: int) -> str:
        return f"{self._info.name[:-4]}-{number:05d}.seq"

    def _damaged(self, number: int, what: str) -> DamagedData:
        return DamagedData(f"{self._path}: record {self._key(number)}: {what}")


def _read_header(header: bytes) -> tuple[str | None, int]:
    """Name and size of a tar member; ("", 0) at the end of the tar, (None, 0) if damaged."""
    if not any(header):
        return "", 0
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")  # its own field counts as blanks
    try:
        if int(header[148:155].strip(b"\0 "), 8) != total:
            return None, 0
        return header[:100].rstrip(b"\0").decode("ascii"), int(header[124:136].strip(b"\0 "), 8)
    except ValueError:
        return None, 0


def write_index(folder: Path, index: dict) -> None:
    """Write index.json in one step: it is there and complete, or not there."""
    partial = folder / f"{INDEX_NAME}.partial"
    partial.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / INDEX_NAME)


def index_split(shards: list[ShardInfo], documents: int) -> dict:
    """The entry of one split in index.json."""
    return {
        "shards": [asdict(shard) for shard in shards],
        "samples": sum(shard.samples for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "documents": documents,
    }


def read_index(folder: Path) -> dict:
    """index.json of a built folder, checked to be one of ours."""
    path = folder / INDEX_NAME
    if not path.is_file():
        raise UserError(f"{folder}: no {INDEX_NAME} here; build the shards with build_shards.py")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path}: not an index of format {FORMAT}")
    return index


def open_shards(folder: Path | str, split: str) -> ShardSet:
    """Open the "train" or "heldout" split of a built folder.

    Raises UserError where the folder, a shard or the vocabulary is missing or is not the one that
    index.json names. The shards' content is read, and checked, when it is needed.
    """
    folder = Path(folder)
    index = read_index(folder)
    try:
        shards = tuple(ShardInfo(**entry) for entry in index["splits"][split]["shards"])
        sequence_length, vocab_sha256 = index["sequence_length"], index["vocab_sha256"]
        dtype = np.dtype(index["token_dtype"]).newbyteorder("<")
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / INDEX_NAME}: not as build_shards.py writes it: {error}"
        ) from None
    model = folder / MODEL_NAME
    if model.is_file() and hashlib.sha256(model.read_bytes()).hexdigest() != vocab_sha256:
        raise UserError(f"{model}: not the vocabulary these shards were built with")
    vocab = read_vocab(model)
    for shard in shards:
        if not _SHARD_NAME.fullmatch(shard.name):
            raise UserError(f"{folder / INDEX_NAME}: {shard.name!r} is not the name of a shard")
        if not (folder / shard.name).is_file():
            raise UserError(f"{folder / shard.name}: this shard of {INDEX_NAME} is missing")
    if not shards:
        raise UserError(f"{folder}: its {split} split is empty")
    return ShardSet(
        folder=folder,
        split=split,
        shards=shards,
        vocab=vocab,
        sequence_length=sequence_length,
        token_dtype=dtype,
    )
