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
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from albert_ds.data.ledger import write_file
from albert_ds.data.records import Sequence, read_document, unpack_sequence
from albert_ds.data.storage import is_url, join, read_bytes
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

    folder: str  # a path or a URL
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


def write_shard(folder: Path, name: str, records: list[bytes], tokens: int) -> ShardInfo:
    """Write `records`, of so many tokens, to the shard `name`; there and complete, or not there."""
    stem, tar = name[: -len(".tar")], io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as writer:
        for number, record in enumerate(records):
            member = tarfile.TarInfo(f"{stem}-{number:05d}.seq")  # owner 0, time 0, mode 644
            member.size = len(record)
            writer.addfile(member, io.BytesIO(record))
    content = tar.getvalue()
    return ShardInfo(
        name=name,
        samples=len(records),
        tokens=tokens,
        bytes=len(content),
        sha256=write_file(folder / name, content),
    )


class Shard:
    """A shard in memory; its records are unpacked, and checked, when they are asked for."""

    def __init__(self, source: ShardSet, number: int):
        self._info = source.shards[number]
        self._path = join(source.folder, self._info.name)
        self._dtype = source.token_dtype
        self._vocab_size = source.vocab.size
        try:
            self._content = read_bytes(self._path)
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
    write_file(folder / INDEX_NAME, (json.dumps(index, indent=1) + "\n").encode())


def index_split(shards: list[dict], documents: int) -> dict:
    """The entry of one split in index.json; `shards` as dicts of ShardInfo."""
    return {
        "shards": shards,
        "samples": sum(shard["samples"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": documents,
    }


def read_index(folder: Path | str) -> dict:
    """index.json of a built folder, checked to be one of ours."""
    path = join(str(folder), INDEX_NAME)
    try:
        index = json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: no {INDEX_NAME} here; build the shards with build_shards.py"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path}: not an index of format {FORMAT}")
    return index


def open_shards(folder: Path | str, split: str) -> ShardSet:
    """Open the "train" or "heldout" split of a built folder, at a path or a URL.

    Raises UserError where the folder, a shard or the vocabulary is missing or is not the one that
    index.json names. The shards' content is read, and checked, when it is needed.
    """
    folder = str(folder)
    index, path = read_index(folder), join(folder, INDEX_NAME)
    try:
        shards = tuple(ShardInfo(**entry) for entry in index["splits"][split]["shards"])
        sequence_length, vocab_sha256 = index["sequence_length"], index["vocab_sha256"]
        dtype = np.dtype(index["token_dtype"]).newbyteorder("<")
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not as build_shards.py writes it: {error}") from None
    vocab = read_vocab(join(folder, MODEL_NAME), sha256=vocab_sha256)
    for shard in shards:
        if not _SHARD_NAME.fullmatch(shard.name):
            raise UserError(f"{path}: {shard.name!r} is not the name of a shard")
        # Behind a URL this shows when the shard is needed: asking for each would take long.
        if not is_url(folder) and not Path(folder, shard.name).is_file():
            raise UserError(f"{join(folder, shard.name)}: this shard of {INDEX_NAME} is missing")
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
