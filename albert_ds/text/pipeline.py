"""Text to shards, in two passes over the disk, by any number of processes that may be killed.

    1  units of text -> sequences -> sorted runs                    (encode.py)
    2  all runs, one range of keys at a time -> some shards         (external_sort.py)

A shard is a range of keys, so every process can write any shard alone, and the bytes depend neither
on the number of processes nor on the order of reading. Memory: one run or one range, one document,
one vocabulary. Finished pieces of either pass are kept when a build is killed.
"""

import errno
import fcntl
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from albert_ds.cli import Number, flag, log_line
from albert_ds.data.segments import PACKINGS
from albert_ds.data.shards import FORMAT, INDEX_NAME, SPLITS, index_split, token_dtype, write_index
from albert_ds.data.vocab import Vocab
from albert_ds.errors import ENDINGS, DamagedData, MachineFailed, UserError
from albert_ds.text.documents import DAMAGE, SEED, TextConfig
from albert_ds.text.encode import COUNTS, encode_documents
from albert_ds.text.external_sort import (
    DUPLICATES,
    KEYS,
    RunWriter,
    cut_ranges,
    write_range,
)
from albert_ds.text.manifest import Manifest, fingerprint
from albert_ds.text.mpi import Ranks
from albert_ds.text.sources import Slice, cut_units, read_documents
from albert_ds.text.survey import measure_unknown, report_survey, survey_text

WORK_NAME = "building"
# Settings that may change without encoding the text again.
NOT_IN_ENCODING = (
    "holdout",
    "samples_per_shard",
    "dedup",
    "max_damaged",
    "max_unknown",
    "any_script",
)
LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal
MAX_WITHOUT_PAIR, MIN_FILL = 0.05, 0.6  # beyond which a warning is printed


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig(TextConfig):
    """How shards are built of text. Raises UserError, naming the flag, for a wrong value."""

    sequence_length: int = flag(
        "longest sequence, with [CLS] and two [SEP]",
        default=512,
        type=Number(low=8, high=1 << 15, whole=True),
        metavar="TOKENS",
    )
    packing: str = flag(
        "whole: a sequence holds whole sentences only. full: sentences are added until the length "
        "is reached, and training truncates every sample to it, as in the release",
        default="whole",
        choices=PACKINGS,
    )
    holdout: float = flag(
        "share (0 to 1) of the documents that are held out",
        default=0.01,
        type=Number(low=0, below=1),
        metavar="SHARE",
    )
    samples_per_shard: int = flag(
        "mean number of sequences in a shard",
        default=2048,
        type=Number(low=1, high=1 << 20, whole=True),
        metavar="SEQUENCES",
    )
    seed: int = flag(
        "seed of the order and of the choice of held-out documents",
        default=0,
        type=SEED,
        metavar="N",
    )
    dedup: bool = flag(
        "keep one of the documents with the very same text (by default all are kept, and the "
        "copies are counted)",
        default=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    index: dict
    report: list[str]  # on normalisation and unknown tokens, of a sample
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
        figures, report = ranks.from_first(lambda: _survey(units, vocab, config))
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
        index["text"] = figures
        ranks.from_first(lambda: _publish(output, index, vocab))
        if ranks.rank == 0:
            warn_of_packing(index)
    return Built(
        index=index,
        report=report,
        damage=damage,
        kept=encoding.kept + writing.kept,
        redone=encoding.redone + writing.redone,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """The result of a pass over all pieces of work: their notes, in order."""

    notes: list[dict]
    kept: int
    redone: int


def _encode_units(
    units: list[list[Slice]], vocab: Vocab, work: Path, config: BuildConfig, ranks: Ranks
) -> Pass:
    """The first pass. Collective."""
    settings = {**asdict(config), **dict.fromkeys(NOT_IN_ENCODING)}
    how = [FORMAT, vocab.sha256, asdict(vocab.normalisation), settings]
    manifest = Manifest(work, "unit", [fingerprint(how, unit) for unit in units])
    notes, redone = manifest.find_finished(ranks)
    kept = len(notes)
    # The largest first, so that all processes end at about the same time.
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
                packing=config.packing,
                seed=config.seed,
                text=config,
                advance=show,
            )
            documents, read = documents + seen, read + sizes[number]
            return note, runs.files

        notes |= manifest.do(ranks, todo, encode)
    return Pass(notes=[notes[n] for n in range(len(units))], kept=kept, redone=redone)


def _survey(units: list[list[Slice]], vocab: Vocab, config: BuildConfig) -> tuple[dict, list[str]]:
    """(figures for index.json, lines that report on them) of a sample of the text."""
    survey = survey_text(units, config, vocab.normalisation)
    unknown = measure_unknown(vocab, survey)
    return survey.as_index(), report_survey(survey, unknown, config)


def warn_of_packing(index: dict) -> None:
    """Say on stderr where sequences are short or have no pair, why, and what to do."""
    counts, capacity = index["counts"], index["sequence_length"] - 3
    single = counts["one_sentence_sequences"] / counts["sequences"]
    if single <= MAX_WITHOUT_PAIR and index["fill"] >= MIN_FILL:
        return
    document, sentence = (
        counts["tokens"] / counts[f"{what}s"] for what in ("document", "sentence")
    )
    if sentence < capacity / 4:
        why = (
            f"a document has {document:.0f} tokens on average: leave blank lines only between "
            "documents, not between paragraphs, or write each document as one JSON line"
        )
    else:
        why = (
            f"a sentence has {sentence:.0f} tokens on average: see --language, --lines and "
            "--sentence-ends spaces for text whose sentences are not found"
        )
    log_line(
        f"warning: {single:.1%} of the sequences have one sentence and so no pair, and the fill is "
        f"{index['fill']:.1%}; {why}"
    )


def check_damage(counts: Mapping[str, int], places: dict[str, str], max_damaged: float) -> None:
    """Raise DamagedData where more than that share of the documents is damaged."""
    damaged = sum(counts.get(f"damaged_{kind}", 0) for kind in DAMAGE)
    documents = counts.get("documents", 0)
    if damaged > max_damaged * (damaged + documents + counts.get("empty_documents", 0)):
        first = "; ".join(f"{kind} first at {place}" for kind, place in places.items())
        raise DamagedData(
            f"{damaged:,} damaged documents, beside {documents:,} sound ones, are over "
            f"--max-damaged {max_damaged}: {first}"
        )


def _settle(
    counts: Counter[str], damage: dict[str, str], draws: list[list[int]], config: BuildConfig
) -> int:
    """Check the text as a whole, and choose the held-out documents.

    Those are the documents whose draw is below the returned number: the share of --holdout, and
    at least one.
    """
    check_damage(counts, damage, config.max_damaged)
    if not counts["tokens"]:
        raise UserError("--input: the files hold no text")
    lowest, highest = min(draw[0] for draw in draws), max(draw[1] for draw in draws)
    threshold = int(config.holdout * KEYS)
    if config.holdout and lowest < highest:
        threshold = max(threshold, lowest + 1)
    if highest < threshold:
        raise UserError(
            f"--holdout {config.holdout}: would hold out all of the {counts['documents']} documents"
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
    manifest = Manifest(work, "range", [fingerprint(how, asdict(part)) for part in ranges])
    notes, redone = manifest.find_finished(ranks)
    kept = len(notes)

    def write(number: int) -> tuple[dict, Mapping[Path, str]]:
        part = ranges[number]
        shards, found = write_range(part, list(runs), output, threshold, dedup=config.dedup)
        note = {"split": part.split, "shards": [asdict(shard) for shard in shards], "counts": found}
        return note, {output / shard.name: shard.sha256 for shard in shards}

    notes |= manifest.do(ranks, sorted(set(range(len(ranges))) - notes.keys()), write)
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
    read = 1 - counts["spare_tokens"] / counts["tokens"]  # share of the stored tokens
    return {
        "format": FORMAT,
        "vocab_sha256": vocab.sha256,
        "vocab_size": vocab.size,
        **asdict(vocab.normalisation),
        **asdict(config),
        "token_dtype": token_dtype(vocab.size, segmented=config.segmented),
        "splits": splits,
        "counts": {**counts, **duplicates},
        "fill": tokens * read / (samples * (config.sequence_length - 3)),
    }


def _publish(output: Path, index: dict, vocab: Vocab) -> None:
    """Write the vocabulary and the index, and delete the shards of an earlier, different build."""
    listed = {shard["name"] for entry in index["splits"].values() for shard in entry["shards"]}
    for split in SPLITS:
        for path in output.glob(f"{split}-*.tar*"):
            if path.name not in listed:
                path.unlink()
    vocab.write(output)
    write_index(output, index)


@contextmanager
def _work_folder(output: Path, ranks: Ranks) -> Generator[Path]:
    """The folder of unfinished work in `output`. It is kept where a build can be resumed."""
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
            f"{output}: {error.strerror}; finished work is kept, and the same command continues"
        ) from None
    except ENDINGS:
        if ranks.rank == 0 and not any(work.glob("*.run")):  # nothing to resume
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


@contextmanager
def show_progress(total_bytes: int, what: str) -> Generator[Callable[[int, int], None]]:
    """A progress bar on a terminal, a line now and then elsewhere.

    Gives a function that takes the documents and the bytes read so far.
    """
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else LINE_SECONDS
    how = {"mininterval": seconds, "maxinterval": max(10.0, seconds), "delay": seconds}
    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, **how) as bar:
        begun = time.monotonic()

        def advance(documents: int, read: int) -> None:
            rate = documents / max(time.monotonic() - begun, 1e-9)
            bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f}/s", refresh=False)
            bar.update(read - bar.n)

        yield advance
