"""Text to shards, in two passes over the disk, by any number of processes that may be killed.

    1  units of text -> sequences -> sorted runs                    (encode.py, runs.py)
    2  all runs, a range of keys at a time -> some shards

A shard is a range of keys, so every process can write any shard by itself, and the bytes depend
neither on their number nor on the order in which documents were read. Memory: one run or one range,
one document, one vocabulary. Finished pieces of either pass are kept when a build is killed.
"""

import errno
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from albert_ds.data.encode import COUNTS, encode_documents
from albert_ds.data.inputs import Slice, cut_units, read_documents
from albert_ds.data.ledger import Ledger, fingerprint
from albert_ds.data.merge import DUPLICATES, cut_ranges, write_range
from albert_ds.data.progress import show_progress
from albert_ds.data.ranks import Ranks
from albert_ds.data.readers import DAMAGE, LINE_KINDS
from albert_ds.data.records import token_dtype
from albert_ds.data.runs import KEYS, RunWriter
from albert_ds.data.shards import FORMAT, INDEX_NAME, SPLITS, index_split, write_index
from albert_ds.data.vocab import Vocab
from albert_ds.errors import ENDINGS, DamagedData, MachineFailed, UserError

WORK_NAME = "building"
# Settings that may change without the text being encoded anew.
NOT_IN_ENCODING = ("holdout", "samples_per_shard", "dedup", "max_damaged")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    sequence_length: int = 512  # tokens, [CLS] and two [SEP] among them
    holdout: float = 0.01  # share of the documents that are held out
    samples_per_shard: int = 2048  # on average
    seed: int = 0
    lines: str = "paragraph"  # what a line of a document is: LINE_KINDS
    language: str = "en"  # whose rules end a sentence
    text_field: str = "text"  # of JSON lines
    dedup: bool = False  # drop documents whose text is that of another
    max_damaged: float = 0.01  # share of the documents that may be damaged

    def __post_init__(self):
        if not 8 <= self.sequence_length <= 1 << 15:
            raise UserError(f"--sequence-length {self.sequence_length}: must be in 8 .. 32768")
        if not 0 <= self.holdout < 1:
            raise UserError(f"--holdout {self.holdout}: must be in 0 .. 1, 1 excluded")
        if self.samples_per_shard < 1:
            raise UserError(f"--samples-per-shard {self.samples_per_shard}: must be at least 1")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed {self.seed}: must be in 0 .. 2**63 - 1")
        if not 0 <= self.max_damaged <= 1:
            raise UserError(f"--max-damaged {self.max_damaged}: must be in 0 .. 1")
        assert self.lines in LINE_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    index: dict
    damage: dict[str, str]  # by kind, where the first damaged document is
    kept: int  # pieces of work that an earlier, killed build had finished
    redone: int  # pieces of its work that were damaged


def build_shards(
    locations: list[str], vocab: Vocab, output: Path, config: BuildConfig, ranks: Ranks
) -> Built:
    """Write the shards of the text at `locations`, the vocabulary and index.json. Collective.

    Raises UserError for text that cannot be split as asked, DamagedData for files that cannot be
    read through or too many damaged documents, MachineFailed where the disk is full; then no
    index.json is written.
    """
    with _work_folder(output, ranks) as work:
        units = ranks.from_first(lambda: cut_units(locations))
        encoding = _encode_units(units, vocab, work, config, ranks)
        total = Counter(dict.fromkeys(COUNTS, 0))
        damage: dict[str, str] = {}
        for note in encoding.notes:
            total.update(note["counts"])
            damage = note["damage"] | damage
        draws = [note["draws"] for note in encoding.notes]
        threshold = ranks.from_first(lambda: _settle(total, damage, draws, config))
        writing = _write_ranges(encoding.notes, total, threshold, output, work, config, ranks)
        index = _make_index(writing.notes, total, vocab, config)
        ranks.from_first(lambda: _publish(output, index, vocab))
    return Built(
        index=index,
        damage=damage,
        kept=encoding.kept + writing.kept,
        redone=encoding.redone + writing.redone,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What a pass over all pieces of work has left: a note of each, in their order."""

    notes: list[dict]
    kept: int
    redone: int


def _encode_units(
    units: list[list[Slice]], vocab: Vocab, work: Path, config: BuildConfig, ranks: Ranks
) -> Pass:
    """The first pass. Collective."""
    settings = {**asdict(config), **dict.fromkeys(NOT_IN_ENCODING)}
    how = [FORMAT, vocab.sha256, asdict(vocab.normalisation), settings]
    ledger = Ledger(work, "unit", [fingerprint(how, unit) for unit in units])
    notes, redone = ledger.find_finished(ranks)
    kept = len(notes)
    # The largest first, so that all are busy to the end.
    sizes = [sum(piece.size for piece in unit) for unit in units]
    todo = sorted(set(range(len(units))) - notes.keys(), key=lambda number: -sizes[number])
    mine = todo[ranks.rank :: ranks.size]
    documents = read = 0
    of = f" (process 1 of {ranks.size})" if ranks.size > 1 else ""
    with show_progress(sum(sizes[n] for n in mine), f"encoding{of}") as advance:

        def encode(number: int) -> tuple[dict, Mapping[Path, str]]:
            nonlocal documents, read
            runs = RunWriter(work / f"unit-{number:06d}")
            seen = 0

            def show(of_unit: int, bytes_read: int) -> None:
                nonlocal seen
                seen = of_unit
                if ranks.rank == 0:
                    advance(documents + of_unit, read + bytes_read)

            readings = read_documents(units[number], config.text_field)
            note = encode_documents(
                readings,
                vocab,
                runs,
                sequence_length=config.sequence_length,
                seed=config.seed,
                lines=config.lines,
                language=config.language,
                advance=show,
            )
            documents, read = documents + seen, read + sizes[number]
            return note, runs.files

        notes |= ledger.do(ranks, todo, encode)
    return Pass(notes=[notes[n] for n in range(len(units))], kept=kept, redone=redone)


def _settle(
    counts: Counter[str], damage: dict[str, str], draws: list[list[int]], config: BuildConfig
) -> int:
    """See that the text is fit to go on with, and choose what is held out.

    Documents that draw less than what is returned: the share asked for, and at least one.
    """
    damaged = sum(counts[f"damaged_{kind}"] for kind in DAMAGE)
    documents = counts["documents"]
    if damaged > config.max_damaged * (damaged + documents + counts["empty_documents"]):
        first = "; ".join(f"{kind} first at {place}" for kind, place in damage.items())
        raise DamagedData(
            f"{damaged:,} damaged documents, beside {documents:,} sound ones, are over "
            f"--max-damaged {config.max_damaged}: {first}"
        )
    if not counts["tokens"]:
        raise UserError("--input: the files hold no text")
    lowest, highest = min(draw[0] for draw in draws), max(draw[1] for draw in draws)
    threshold = int(config.holdout * KEYS)
    if config.holdout and lowest < highest:
        threshold = max(threshold, lowest + 1)
    if highest < threshold:
        raise UserError(
            f"--holdout {config.holdout}: would hold out all of the {documents} documents"
        )
    return threshold


def _write_ranges(
    encoded: list[dict],
    counts: Mapping[str, int],
    threshold: int,
    output: Path,
    work: Path,
    config: BuildConfig,
    ranks: Ranks,
) -> Pass:
    """The second pass. Collective."""
    runs = {work / name: sha for note in encoded for name, sha in note["files"].items()}
    ranges = cut_ranges(counts, config.holdout, config.samples_per_shard)
    how = [sorted(runs.values()), threshold, config.dedup]
    ledger = Ledger(work, "range", [fingerprint(how, asdict(part)) for part in ranges])
    notes, redone = ledger.find_finished(ranks)
    kept = len(notes)

    def write(number: int) -> tuple[dict, Mapping[Path, str]]:
        part = ranges[number]
        shards, found = write_range(part, list(runs), output, threshold, dedup=config.dedup)
        note = {"split": part.split, "shards": [asdict(shard) for shard in shards], "counts": found}
        return note, {output / shard.name: shard.sha256 for shard in shards}

    notes |= ledger.do(ranks, sorted(set(range(len(ranges))) - notes.keys()), write)
    return Pass(notes=[notes[n] for n in range(len(ranges))], kept=kept, redone=redone)


def _make_index(
    written: list[dict], counts: Counter[str], vocab: Vocab, config: BuildConfig
) -> dict:
    splits = {}
    duplicates = Counter(dict.fromkeys(DUPLICATES, 0))
    for split in SPLITS:
        mine = [note for note in written if note["split"] == split]
        documents = sum(note["counts"]["documents"] for note in mine)
        splits[split] = index_split([shard for note in mine for shard in note["shards"]], documents)
        for note in mine:
            duplicates.update({name: note["counts"][name] for name in DUPLICATES})
    tokens, samples = (
        sum(splits[split][what] for split in SPLITS) for what in ("tokens", "samples")
    )
    return {
        "format": FORMAT,
        "vocab_sha256": vocab.sha256,
        "vocab_size": vocab.size,
        **asdict(vocab.normalisation),
        **asdict(config),
        "token_dtype": token_dtype(vocab.size),
        "splits": splits,
        "counts": {**counts, **duplicates},
        "fill": tokens / (samples * (config.sequence_length - 3)),
    }


def _publish(output: Path, index: dict, vocab: Vocab) -> None:
    """Write what makes a data set of the shards; those of an earlier, other build go."""
    listed = {shard["name"] for entry in index["splits"].values() for shard in entry["shards"]}
    for split in SPLITS:
        for path in output.glob(f"{split}-*.tar*"):
            if path.name not in listed:
                path.unlink()
    vocab.write(output)
    write_index(output, index)


@contextmanager
def _work_folder(output: Path, ranks: Ranks) -> Generator[Path]:
    """The folder in `output` where the work lies; it stays where a build can be taken up again."""
    work = output / WORK_NAME
    is_new = not output.exists()
    locks: list[int] = []
    ranks.from_first(lambda: locks.append(_claim(output, work)))
    try:
        yield work
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MachineFailed(
            f"{output}: {error.strerror}; what is finished is kept, the same command goes on"
        ) from None
    except ENDINGS:
        if ranks.rank == 0 and not any(work.glob("*.run")):  # nothing to take up again
            shutil.rmtree(work)
            if is_new and not any(output.iterdir()):
                output.rmdir()
        raise
    else:
        if ranks.rank == 0:
            shutil.rmtree(work)
    finally:
        for lock in locks:
            os.close(lock)


def _claim(output: Path, work: Path) -> int:
    """Make the folders and lock them; the kernel frees the lock when its owner dies."""
    if (output / INDEX_NAME).exists():
        shutil.rmtree(work, ignore_errors=True)  # of a build that was killed at its very end
        raise UserError(f"--output {output}: holds a built data set already; name another folder")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be made: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"--output {output}: another build is writing to it") from None
    return lock
