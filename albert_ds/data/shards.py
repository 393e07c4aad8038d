"""Shards: WebDataset tars of a fixed number of sequences, and the index.json that lists them.

    train-000000.tar        members train-000000-00000.seq, train-000000-00001.seq, ...
    heldout-000000.tar      the same for the documents that are held out
    spiece.model, tokenizer_config.json      the vocabulary
    index.json              written last: a folder without it is not a data set

A member holds one sequence, little-endian:

    crc32 of all that follows  u32 | number of sentences S  u32 | document  u64 |
    ends of the S sentences | token ids        both in the token dtype of index.json

Where index.json says "segmented": true, the vocabulary size is added to the id of every token that
starts a word of the user's segmenter.

The same sequences in the same order give the same bytes. Any WebDataset reader can read a shard;
here the headers are read directly, because records are needed in another order than in the file,
and often only some of them (8 microseconds a member; WebDataset takes 50 and more).

Everything read from disk is checked: a shard's size, its headers and its sha256 when it is read, a
record when it is unpacked.
"""

import hashlib
import io
import re
import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from albert_ds.base.cli import integer
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_file
from albert_ds.base.json_files import MAX_BYTES, check, parse_json
from albert_ds.base.storage import is_url, join, read_bytes
from albert_ds.vocab.vocab import MODEL_NAME, Vocab, read_vocab

INDEX_NAME = "index.json"
FORMAT = 1
SPLITS = ("train", "heldout")
MAX_SHARD_BYTES = 1 << 32  # a rank holds up to eight shards in memory
_SIZE = integer(0, 1 << 48)
_SHARD = {
    "name": str,
    "samples": integer(1, MAX_SHARD_BYTES),
    "tokens": _SIZE,
    "bytes": integer(0, MAX_SHARD_BYTES),
    "sha256": str,
}
_SPLIT = {"shards": [_SHARD], "samples": _SIZE, "tokens": _SIZE, "documents": _SIZE}
SCHEMA = {
    "format": FORMAT,
    "splits": dict.fromkeys(SPLITS, _SPLIT),
    "sequence_length": integer(1, 1 << 20),
    "token_dtype": ("uint16", "uint32"),
    "vocab_sha256": str,
}
_BLOCK = 512  # bytes of a tar block: one for a member's header, then as many as its content needs
_HEADER = struct.Struct("<IIQ")
_CHECKED = struct.Struct("<IQ")  # the header without its crc32
SHARD_NAME = re.compile(r"(train|heldout)-\d{6,}\.tar")


class Sequence(NamedTuple):
    """The sentences of one stored sequence."""

    document: int  # a hash of the document's text
    ends: np.ndarray  # [S] one past the last token of each sentence; the last one is T
    ids: np.ndarray  # [T] token ids without [CLS] and [SEP], as stored
    segmented: bool = False  # the vocabulary size is added to the id of a token that starts a word


def token_dtype(vocab_size: int, *, segmented: bool = False) -> str:
    """Narrowest unsigned type that holds every id as it is stored."""
    return "uint16" if vocab_size * (1 + segmented) <= 1 << 16 else "uint32"


def pack_sequence(document: int, ends: list[int], ids: list[int], dtype: np.dtype) -> bytes:
    """The bytes of one sequence."""
    body = np.array(ends + ids, dtype).tobytes()
    checked = _CHECKED.pack(len(ends), document) + body
    return struct.pack("<I", zlib.crc32(checked)) + checked


def unpack_sequence(
    record: bytes, dtype: np.dtype, vocab_size: int, *, segmented: bool = False
) -> Sequence:
    """Inverse of `pack_sequence`; ValueError says what is wrong with a damaged record."""
    if len(record) < _HEADER.size or (len(record) - _HEADER.size) % dtype.itemsize:
        raise ValueError(f"{len(record)} bytes is not the length of a record")
    crc, sentences, document = _HEADER.unpack_from(record)
    if zlib.crc32(memoryview(record)[4:]) != crc:
        raise ValueError("its checksum is wrong")
    body = np.frombuffer(record, dtype, offset=_HEADER.size)
    ends = body[:sentences]
    ids = body[sentences:]
    if not 0 < sentences < len(body) or ends[-1] != len(ids):
        raise ValueError(f"its {sentences} sentences do not end at its {len(ids)} tokens")
    if not ends[0] or (ends[1:] <= ends[:-1]).any():
        raise ValueError(f"the ends of its {sentences} sentences do not rise")
    if ids.max() >= vocab_size * (1 + segmented):
        raise ValueError(f"token id {ids.max()} is not under the vocabulary size {vocab_size}")
    return Sequence(document, ends, ids, segmented)


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
    documents: int
    language: str | None = None
    sequence_length: int  # tokens of the longest sample, with [CLS] and two [SEP]
    token_dtype: np.dtype
    segmented: bool = False  # built with --segmented
    words: int | None = None  # of all the text; None where an earlier version has built it

    @property
    def fingerprint(self) -> str:
        """A hash of the content of all shards, independent of where they are stored."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each shard, int64 [number of shards]."""
        return np.array([shard.samples for shard in self.shards], np.int64)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def write_shard(folder: Path, name: str, records: list[bytes], tokens: int) -> ShardInfo:
    """Write `records`, which hold `tokens` tokens, to the shard `name` in one atomic step.

    Raises UserError if it is larger than a reader takes.
    """
    stem = name.removesuffix(".tar")
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as writer:
        for number, record in enumerate(records):
            member = tarfile.TarInfo(f"{stem}-{number:05d}.seq")  # owner 0, time 0, mode 644
            member.size = len(record)
            writer.addfile(member, io.BytesIO(record))
    content = tar.getvalue()
    if len(content) > MAX_SHARD_BYTES:
        raise UserError(
            f"--samples-per-shard: {name} would have {len(records):,} sequences and "
            f"{len(content):,} bytes; at most {MAX_SHARD_BYTES:,}: fewer sequences in a shard, or "
            "--dedup if they are copies"
        )
    return ShardInfo(
        name=name,
        samples=len(records),
        tokens=tokens,
        bytes=len(content),
        sha256=write_file(folder / name, content),
    )


class Shard:
    """A shard in memory. A record is unpacked and checked when it is asked for."""

    def __init__(self, source: ShardSet, number: int):
        self._source = source
        self._info = info = source.shards[number]
        self._path = join(source.folder, info.name)
        try:
            self._content = read_bytes(self._path, info.bytes + 1)
        except FileNotFoundError:
            raise UserError(f"{self._path}: this shard of {INDEX_NAME} is missing") from None
        self._places = self._find_records()
        sha256 = hashlib.sha256(self._content).hexdigest()
        if sha256 != info.sha256:
            for each in range(len(self)):  # the first damaged record is the better message
                self[each]
            raise DamagedData(
                f"{self._path}: all its {len(self)} records can be read, but its sha256 {sha256} "
                f"is not the {info.sha256} of {INDEX_NAME}: it is of another build, or was changed"
            )

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Sequence:
        (begin, end), of = self._places[number], self._source
        try:
            record = self._content[begin:end]
            return unpack_sequence(record, of.token_dtype, of.vocab.size, segmented=of.segmented)
        except ValueError as error:
            raise self._damaged(number, str(error)) from None

    def _find_records(self) -> list[tuple[int, int]]:
        """Begin and end of every record in the tar, whose headers are all checked."""
        content = self._content
        places = []
        at = 0
        for number in range(self._info.samples):
            header = content[at : at + _BLOCK]
            if len(header) < _BLOCK:
                raise self._damaged(number, "the shard is cut short before it")
            name, size = _read_header(header)
            if name is None:
                raise self._damaged(number, "its tar header is damaged")
            if name != self._key(number):
                raise self._damaged(number, f"missing; {name or 'the end'} is in its place")
            begin = at + _BLOCK
            end = at + _BLOCK + size
            if end > self._info.bytes:
                whole = f"the {self._info.bytes} of the shard in {INDEX_NAME}"
                raise self._damaged(number, f"its {size} bytes go beyond {whole}")
            if end > len(content):
                raise self._damaged(number, "the shard is cut short within it")
            places.append((begin, end))
            at = begin + -(-size // _BLOCK) * _BLOCK
        if any(content[at : at + _BLOCK]):
            raise self._damaged(len(places), f"more records than the {len(places)} of {INDEX_NAME}")
        return places

    def _key(self, number: int) -> str:
        return f"{self._info.name.removesuffix('.tar')}-{number:05d}.seq"

    def _damaged(self, number: int, what: str) -> DamagedData:
        return DamagedData(f"{self._path}: record {self._key(number)}: {what}")


def _read_header(header: bytes) -> tuple[str | None, int]:
    """Name and size of a tar member; ("", 0) at the end of the tar, (None, 0) if damaged."""
    if not any(header):
        return "", 0
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")  # the sum's own field is blank
    try:
        if int(header[148:155].strip(b"\0 "), 8) != total:
            return None, 0
        return header[:100].rstrip(b"\0").decode("ascii"), int(header[124:136].strip(b"\0 "), 8)
    except ValueError:
        return None, 0


def read_index(folder: Path | str) -> dict:
    """The content of a built folder's index.json. Raises UserError if it is not one."""
    path = join(str(folder), INDEX_NAME)
    try:
        content = read_bytes(path, MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: no {INDEX_NAME} here; build the shards with `albert-ds shards`"
        ) from None
    index = parse_json(content, path)
    check(index, SCHEMA, path)
    check(index.get("segmented", False), bool, f"{path}: segmented")  # earlier versions do not say
    counts = index.get("counts", {})
    check(counts, dict, f"{path}: counts")
    check(counts.get("words"), (_SIZE, None), f"{path}: counts.words")
    check(index.get("language"), (str, None), f"{path}: language")
    _check_index(index, path)
    return index


def _check_index(index: dict, path: str) -> None:
    """Raise UserError if the entries of an index contradict each other."""
    seen: dict[str, str] = {}
    for split in SPLITS:
        entry = index["splits"][split]
        for shard in entry["shards"]:
            name = shard["name"]
            if not SHARD_NAME.fullmatch(name) or not name.startswith(f"{split}-"):
                raise UserError(f"{path}: {name!r} is not the name of a shard of splits.{split}")
            for value in (name, shard["sha256"]):
                if value in seen:
                    raise UserError(
                        f"{path}: splits.{split}.shards: names a shard twice: {seen[value]}, {name}"
                    )
                seen[value] = name
        for what in ("samples", "tokens"):
            total = sum(shard[what] for shard in entry["shards"])
            if entry[what] != total:
                raise UserError(
                    f"{path}: splits.{split}.{what} {entry[what]}: must be {total}, the sum over "
                    "its shards"
                )


def list_shards(index: dict, split: str) -> tuple[ShardInfo, ...]:
    """The shards of a split in an index.json that was read."""
    entries = index["splits"][split]["shards"]
    return tuple(ShardInfo(**{name: entry[name] for name in _SHARD}) for entry in entries)


class ShardFolder:
    """A built folder, at a path or a URL. Its index.json and its vocabulary are read once."""

    def __init__(self, folder: Path | str):
        """Raises UserError if the folder or the vocabulary is missing, or if the vocabulary is not
        the one that index.json names."""
        self.folder = str(folder)
        self.index = read_index(folder)
        self.vocab = read_vocab(join(self.folder, MODEL_NAME), sha256=self.index["vocab_sha256"])

    def has(self, split: str) -> bool:
        return self.index["splits"][split]["samples"] > 0

    def open(self, split: str) -> ShardSet:
        """The "train" or "heldout" split. A shard is read and checked when it is needed.

        Raises UserError if a shard is missing or there is none.
        """
        shards = list_shards(self.index, split)
        for shard in shards:
            # At a URL a missing shard is found when it is needed: one request for each takes long.
            if not is_url(self.folder) and not Path(self.folder, shard.name).is_file():
                place = join(self.folder, shard.name)
                raise UserError(f"{place}: this shard of {INDEX_NAME} is missing")
        if not shards:
            raise UserError(f"{self.folder}: its {split} split is empty")
        return ShardSet(
            folder=self.folder,
            split=split,
            shards=shards,
            vocab=self.vocab,
            documents=self.index["splits"][split]["documents"],
            language=self.index.get("language"),
            sequence_length=self.index["sequence_length"],
            token_dtype=np.dtype(self.index["token_dtype"]).newbyteorder("<"),
            segmented=self.index.get("segmented", False),
            words=self.index.get("counts", {}).get("words"),
        )


def open_shards(folder: Path | str, split: str) -> ShardSet:
    """One split of a built folder. Raises what `ShardFolder` raises."""
    return ShardFolder(folder).open(split)


def open_data(folders: list[str], *, needs_words: bool) -> tuple[list[ShardSet], ShardSet | None]:
    """The training set of each folder of --data, and the held-out set of the first one.

    needs_words: for --save-at-words. Raises UserError where they do not fit together, too.
    """
    opened = [ShardFolder(folder) for folder in folders]
    heldout = opened[0].open("heldout") if opened[0].has("heldout") else None
    sources = [each.open("train") for each in opened]
    for folder, source in zip(folders, sources, strict=True):
        if source.vocab.sha256 != sources[0].vocab.sha256:
            raise UserError(
                f"--data {folder}: its vocabulary differs from that of {folders[0]}; "
                "all shards of a run must be built with one spiece.model"
            )
        if needs_words and source.words is None:
            raise UserError(
                f"--save-at-words: --data {folder} was built before words were counted; build its "
                "shards again"
            )
    return sources, heldout
