"""The two passes of a build, each as pieces of work that any process may do.

A finished piece is kept by its note (`manifest.py`), so a pass does what is missing.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.data.shards import FORMAT
from albert_ds.text.encode import COUNTS, BuildConfig, encode_documents
from albert_ds.text.external_sort import ENTRY, KEYS, RunWriter, cut_ranges, write_range
from albert_ds.text.manifest import Piece, fingerprint, read_note, write_note
from albert_ds.text.pool import Pool
from albert_ds.text.progress import open_bar, tell_progress
from albert_ds.text.sources import Slice, read_documents
from albert_ds.text.work_folder import list_parts
from albert_ds.vocab.vocab import Vocab

# Settings that may change without encoding the text again.
NOT_IN_ENCODING = "holdout samples_per_shard dedup max_damaged max_unknown any_script".split()


def run_pass(
    pool: Pool, pieces: list[Piece], work: Callable[[Piece], dict], bar: tqdm
) -> list[dict]:
    """The notes of the pieces: what a killed build has left, and what `work` makes of the rest."""
    kept = list(pool.map(read_note, pieces))
    notes = {number: note for number, note in enumerate(kept) if isinstance(note, dict)}
    redone = kept.count("damaged")
    if notes or redone:
        log_line(
            f"{bar.desc}: of an earlier start, {len(notes)} pieces of work were kept and {redone} "
            "damaged ones are done again"
        )
    # The largest first, so that all processes end at about the same time.
    missing = sorted(
        set(range(len(pieces))) - notes.keys(), key=lambda number: -pieces[number].size
    )
    bar.total = sum(pieces[number].size for number in missing)
    with bar:
        done = pool.map(work, [pieces[number] for number in missing])
        for number, note in zip(missing, done, strict=True):
            notes[number] = note
            bar.update(pieces[number].size)
    return [notes[number] for number in range(len(pieces))]


def _make_pieces(stem: Path, inputs: list[tuple[Any, int]], settings: list) -> list[Piece]:
    """inputs: the input of each piece, and its size; settings: all else that decides its result."""
    return [
        Piece(
            stem.with_name(f"{stem.name}-{number:06d}.json"),
            fingerprint(settings, part),
            part,
            size,
        )
        for number, (part, size) in enumerate(inputs)
    ]


def list_units(
    units: list[list[Slice]], vocab: Vocab, work: Path, config: BuildConfig
) -> list[Piece]:
    """The pieces of the first pass."""
    settings = {**asdict(config), **dict.fromkeys(NOT_IN_ENCODING)}
    inputs = [(unit, sum(part.size for part in unit)) for unit in units]
    form = [FORMAT, ENTRY.descr, COUNTS, vocab.sha256, asdict(vocab.normalisation), settings]
    return _make_pieces(work / "unit", inputs, form)


def encode_units(units: list[Piece], vocab: Vocab, config: BuildConfig, pool: Pool) -> list[dict]:
    encode = partial(_encode_unit, vocab=vocab, config=config)
    return run_pass(pool, units, encode, open_bar("encoding", "B"))


def _encode_unit(piece: Piece, *, vocab: Vocab, config: BuildConfig) -> dict:
    runs = RunWriter(piece.path.with_suffix(""))
    tally: Counter[str] = Counter()
    readings = tell_progress(read_documents(piece.input, config.text_field, tally), piece.size)
    note = encode_documents(readings, vocab, runs, config)
    return write_note(piece, {**note, "tally": tally}, runs.files)


def read_encoded(units: list[Piece], work: Path) -> list[dict]:
    """The notes of all units, which parts have encoded; their runs are proven where they are read.

    Raises UserError that names the parts that are missing.
    """
    notes = [read_note(unit, proves_files=False) for unit in units]
    lacking = [number for number, note in enumerate(notes) if not isinstance(note, dict)]
    if lacking:
        numbers = {part.of for part in list_parts(work, "piece")}
        parts = {f"{number % of + 1}/{of}" for number in lacking for of in numbers}
        shown = ", ".join(sorted(parts)[:8]) + (", ..." if len(parts) > 8 else "") or "I/N"
        raise UserError(
            f"--join: {len(lacking)} of the {len(units)} units of the text in {work} are not "
            f"encoded; allowed: after --piece {shown}"
        )
    return [note for note in notes if isinstance(note, dict)]


def plan_ranges(
    encoded: list[dict], counts: Mapping[str, int], work: Path, config: BuildConfig
) -> tuple[list[Piece], Callable[[Piece], dict]]:
    """The pieces of the second pass, and what writes one."""
    threshold = _choose_heldout([note["draws"] for note in encoded], counts, config)
    runs = {work / name: sha for note in encoded for name, sha in note["files"].items()}
    ranges = cut_ranges(counts, config.holdout, config.samples_per_shard)
    inputs = [(part, part.last - part.first) for part in ranges]
    settings = [sorted(runs.values()), threshold, config.dedup]
    write = partial(_write_range, runs=list(runs), threshold=threshold, dedup=config.dedup)
    return _make_pieces(work / "range", inputs, settings), write


def _choose_heldout(draws: list[list[int]], counts: Mapping[str, int], config: BuildConfig) -> int:
    """Hold out the documents whose draw is below the returned number.

    That is the share of --holdout, and at least one document.
    """
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


def _write_range(piece: Piece, *, runs: list[Path], threshold: int, dedup: bool) -> dict:
    work = piece.path.parent
    shards, counts = write_range(piece.input, runs, work, threshold, dedup=dedup)
    listed = [asdict(shard) for shard in shards]
    note = {"split": piece.input.split, "shards": listed, "counts": counts}
    return write_note(piece, note, {work / shard.name: shard.sha256 for shard in shards})
