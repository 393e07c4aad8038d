"""Text to shards, in two passes over the disk, by any number of processes that may be killed.

    1  units of text -> sequences -> sorted runs                    (encode.py)
    2  all runs, one range of keys at a time -> some shards         (external_sort.py)

A shard is a range of keys, so every process can write any shard alone, and the bytes depend neither
on the number of processes nor on the order of reading. Memory: one run or one range, one document,
one vocabulary. Finished pieces of work of either pass are kept when a build is killed, and a part
of a build does some of one pass (`work_folder.py`).
"""

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from albert_ds import __version__
from albert_ds.base.cli import as_flag, log_line
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import publish, write_json
from albert_ds.base.json_files import check, read_json
from albert_ds.data.shards import FORMAT, INDEX_NAME, SPLITS, token_dtype
from albert_ds.text.documents import DAMAGE
from albert_ds.text.encode import COUNTS, BuildConfig, encode_documents
from albert_ds.text.external_sort import (
    DUPLICATES,
    ENTRY,
    KEYS,
    RunWriter,
    cut_ranges,
    write_range,
)
from albert_ds.text.manifest import Piece, fingerprint, read_note, write_note
from albert_ds.text.pool import Pool
from albert_ds.text.sources import (
    Reading,
    Slice,
    cut_units,
    describe_tally,
    list_files,
    read_documents,
)
from albert_ds.text.survey import choose_word_mark, report_survey, survey_text
from albert_ds.text.work_folder import Part, list_parts, part_folder, part_lock, work_folder
from albert_ds.vocab.vocab import Vocab

SURVEY_NAME = "survey.json"
# Settings that may change without encoding the text again.
NOT_IN_ENCODING = "holdout samples_per_shard dedup max_damaged max_unknown any_script".split()
LINE_SECONDS = 30.0  # between two lines of progress if there is no terminal
MIN_HELD_OUT, GOOD_HELD_OUT = 2_000, 10_000  # tokens
MAX_HOLDOUT = 0.5  # the largest share that a warning names
MASKED = 0.15  # of the tokens, by default of training
MAX_WITHOUT_PAIR, MIN_FILL = 0.05, 0.6  # beyond which a warning is printed


class Text(NamedTuple):
    """The text of a build as all its parts see it."""

    units: list[list[Slice]]
    config: BuildConfig  # with the mark of segmented words
    figures: dict[str, Any]  # of a sample, for index.json
    report: list[str]  # on normalisation


def build_shards(
    locations: list[str],
    vocab: Vocab,
    output: Path,
    config: BuildConfig,
    pool: Pool,
    *,
    is_encoded: bool = False,
) -> tuple[dict, list[str]]:
    """Write the shards of the text at `locations`, the vocabulary and index.json.

    is_encoded: parts have encoded all of it. Returns the content of index.json, and lines on
    normalisation and damage. Raises UserError for text that cannot be split as asked or that lacks
    a part, DamagedData for files that cannot be read through or too many damaged documents,
    MachineFailed if the disk is full; then no index.json is written.
    """
    with work_folder(output, locations) as work:
        text = _survey(locations, vocab, work, config, must_be_same=is_encoded)
        if is_encoded:
            encoded = _read_encoded(text, vocab, work)
        else:
            units = _list_units(text, vocab, work)
            encoded = _encode_units(units, vocab, text.config, pool)
        counts, tally, damage = _sum_up(encoded, config)
        ranges, write = _plan_ranges(encoded, counts, work, config)
        written = _run_pass(pool, ranges, write, open_bar("writing", " shards"))
        index = _make_index(written, counts, vocab, text.config)
        _check_whole(index, work)
        index["input"] = list_files(text.units)
        index["text"] = text.figures
        _publish(output, work, index, vocab)
        warn_of_packing(index)
        _warn_of_holdout(index)
    report = text.report
    for kind, place in damage.items():
        report.append(f"{kind}: {counts[f'damaged_{kind}']:,} dropped, first: {place}")
    return index, [*report, *describe_tally(tally)]


def encode_part(
    locations: list[str], vocab: Vocab, output: Path, config: BuildConfig, pool: Pool, part: Part
) -> str:
    """The first pass over a part of the text; a line on it. Raises what `build_shards` raises."""
    with ExitStack() as locks:
        with part_folder(output, locations) as work:
            text = _survey(locations, vocab, work, config, must_be_same=True)
            locks.enter_context(part_lock(output, work, "piece", part))
        units = _list_units(text, vocab, work)
        own = part.of_items(units)
        counts = Counter()
        for note in _encode_units(own, vocab, text.config, pool):
            counts.update(note["counts"])
    return (
        f"piece {part}: {len(own)} of {len(units)} units of text, {counts['documents']:,} "
        f"documents, {counts['sequences']:,} sequences, {counts['tokens']:,} tokens"
    )


def write_part(
    locations: list[str], vocab: Vocab, output: Path, config: BuildConfig, pool: Pool, part: Part
) -> str:
    """A part of the second pass; a line on it. Raises what `build_shards` raises."""
    with ExitStack() as locks:
        with part_folder(output, locations) as work:
            text = _survey(locations, vocab, work, config, must_be_same=True)
            encoded = _read_encoded(text, vocab, work)
            locks.enter_context(part_lock(output, work, "join", part))
        counts, _, _ = _sum_up(encoded, config)
        ranges, write = _plan_ranges(encoded, counts, work, config)
        own = part.of_items(ranges)
        written = _run_pass(pool, own, write, open_bar("writing", " shards"))
    shards = sum(len(note["shards"]) for note in written)
    return f"join {part}: {len(own)} of {len(ranges)} ranges, {shards:,} shards"


def _survey(
    locations: list[str], vocab: Vocab, work: Path, config: BuildConfig, *, must_be_same: bool
) -> Text:
    """The survey that the folder holds, if it is of this text, or a new one.

    must_be_same: the folder may hold no other one.
    """
    units = cut_units(locations, config.text_field)
    settings = {k: v for k, v in asdict(config).items() if k not in NOT_IN_ENCODING}
    origin = {
        "version": __version__,
        "vocab": fingerprint(vocab.sha256, asdict(vocab.normalisation)),
        "settings": settings,
        "input": fingerprint(units),
    }
    path = work / SURVEY_NAME
    if path.exists():
        kept = read_json(path)
        check(kept, {"origin": dict, "word_mark": str, "figures": dict, "report": [str]}, str(path))
        if kept["origin"] == origin:
            config = replace(config, word_mark=kept["word_mark"])
            return Text(units, config, kept["figures"], kept["report"])
        if must_be_same:
            difference = _name_difference(kept["origin"], origin)
            raise UserError(f"{work}: holds pieces {difference}; name another --output for these")
    config = choose_word_mark(units, config)
    survey = survey_text(units, config, vocab.normalisation)
    report = report_survey(survey, vocab, config)
    kept = {"origin": origin, "word_mark": config.word_mark}
    write_json(path, {**kept, "figures": survey.figures, "report": report})
    return Text(units, config, survey.figures, report)


def _name_difference(kept: dict, origin: dict) -> str:
    """In what pieces that are there differ."""
    for name, value in origin["settings"].items():
        if (other := kept.get("settings", {}).get(name)) != value:
            return f"made with {as_flag(name)} {other}, not {value}"
    if kept.get("version") != origin["version"]:
        return f"made by albert-ds {kept.get('version')}, not {origin['version']}"
    if kept.get("vocab") != origin["vocab"]:
        return "made with another --vocab"
    return "of another --input, or of files that have changed since"


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


def _run_pass(
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
    todo = sorted(set(range(len(pieces))) - notes.keys(), key=lambda number: -pieces[number].size)
    bar.total = sum(pieces[number].size for number in todo)
    with bar:
        done = pool.map(work, [pieces[number] for number in todo])
        for number, note in zip(todo, done, strict=True):
            notes[number] = note
            bar.update(pieces[number].size)
    return [notes[number] for number in range(len(pieces))]


def _list_units(text: Text, vocab: Vocab, work: Path) -> list[Piece]:
    """The pieces of the first pass."""
    settings = {**asdict(text.config), **dict.fromkeys(NOT_IN_ENCODING)}
    inputs = [(unit, sum(part.size for part in unit)) for unit in text.units]
    form = [FORMAT, ENTRY.descr, vocab.sha256, asdict(vocab.normalisation), settings]
    return _make_pieces(work / "unit", inputs, form)


def _encode_units(units: list[Piece], vocab: Vocab, config: BuildConfig, pool: Pool) -> list[dict]:
    encode = partial(_encode_unit, vocab=vocab, config=config)
    return _run_pass(pool, units, encode, open_bar("encoding", "B"))


def _read_encoded(text: Text, vocab: Vocab, work: Path) -> list[dict]:
    """The notes of all units, which parts have encoded; their runs are proven where they are read.

    Raises UserError that names the parts that are missing.
    """
    units = _list_units(text, vocab, work)
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


def _encode_unit(piece: Piece, *, vocab: Vocab, config: BuildConfig) -> dict:
    runs = RunWriter(piece.path.with_suffix(""))
    tally: Counter[str] = Counter()
    readings = tell_progress(read_documents(piece.input, config.text_field, tally), piece.size)
    note = encode_documents(readings, vocab, runs, config)
    return write_note(piece, {**note, "tally": tally}, runs.files)


def warn_of_packing(index: dict) -> None:
    """Say on stderr if sequences are short or have no pair, why, and what to do."""
    counts, capacity = index["counts"], index["sequence_length"] - 3
    single = counts["one_sentence_sequences"] / counts["sequences"]
    if single <= MAX_WITHOUT_PAIR and index["fill"] >= MIN_FILL:
        return
    document, sentence = (
        counts["tokens"] / counts[f"{what}s"] for what in ("document", "sentence")
    )
    if sentence < capacity / 4:
        why = (
            f"a document has {document:.0f} tokens on average: if blank lines stand between its "
            "paragraphs too, leave them only between documents; if documents are that short, a "
            "smaller --sequence-length suits them"
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


def _warn_of_holdout(index: dict) -> None:
    """Say on stderr if too little is held out to measure anything on, and what to do."""
    counts, held_out = index["counts"], index["splits"]["heldout"]
    if not index["holdout"] or held_out["tokens"] >= MIN_HELD_OUT:
        return
    if not held_out["documents"]:
        log_line(
            "warning: the text is one document, so nothing is held out; leave a blank line between "
            "documents, or write each as one JSON line"
        )
        return
    share = math.ceil(100 * GOOD_HELD_OUT / counts["tokens"]) / 100
    advice = f"--holdout {share} holds out more" if share <= MAX_HOLDOUT else "take more text"
    masked = MASKED * held_out["tokens"]
    log_line(
        f"warning: {held_out['tokens']:,} tokens in {held_out['documents']:,} documents are held "
        f"out; of their {masked:,.0f} masked ones an accuracy has a standard error of up to "
        f"{50 / math.sqrt(masked):.0f} points; {advice}"
    )


def _sum_up(encoded: list[dict], config: BuildConfig) -> tuple[Counter, Counter, dict[str, str]]:
    """The counts of all units, what was read of them, and the first place of each damage."""
    counts, tally = Counter(dict.fromkeys(COUNTS, 0)), Counter()
    damage: dict[str, str] = {}
    for note in encoded:
        counts.update(note["counts"])
        tally.update(note["tally"])
        damage = note["damage"] | damage
    check_damage(counts, damage, config.max_damaged)
    return counts, tally, damage


def check_damage(counts: Mapping[str, int], places: dict[str, str], max_damaged: float) -> None:
    """Raise DamagedData if more than that share of the documents is damaged."""
    damaged = sum(counts.get(f"damaged_{kind}", 0) for kind in DAMAGE)
    documents = counts.get("documents", 0)
    if damaged > max_damaged * (damaged + documents + counts.get("empty_documents", 0)):
        first = "; ".join(f"{kind} first at {place}" for kind, place in places.items())
        raise DamagedData(
            f"{damaged:,} damaged documents, beside {documents:,} sound ones, are over "
            f"--max-damaged {max_damaged}: {first}"
        )


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


def _plan_ranges(
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


def _write_range(piece: Piece, *, runs: list[Path], threshold: int, dedup: bool) -> dict:
    work = piece.path.parent
    shards, counts = write_range(piece.input, runs, work, threshold, dedup=dedup)
    listed = [asdict(shard) for shard in shards]
    note = {"split": piece.input.split, "shards": listed, "counts": counts}
    return write_note(piece, note, {work / shard.name: shard.sha256 for shard in shards})


def _make_index(
    written: list[dict], counts: Counter[str], vocab: Vocab, config: BuildConfig
) -> dict:
    splits: dict[str, dict] = {}
    for split in SPLITS:
        notes = [note for note in written if note["split"] == split]
        documents = sum(note["counts"]["documents"] for note in notes)
        shards = [shard for note in notes for shard in note["shards"]]
        sums = {what: sum(shard[what] for shard in shards) for what in ("samples", "tokens")}
        splits[split] = {"shards": shards, **sums, "documents": documents}
    tokens, samples = (
        sum(entry[what] for entry in splits.values()) for what in ("tokens", "samples")
    )
    duplicates = {name: sum(note["counts"][name] for note in written) for name in DUPLICATES}
    read = 1 - counts["unused_tokens"] / counts["tokens"]  # share of the stored tokens
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


def _check_whole(index: dict, work: Path) -> None:
    """Raise DamagedData if sequences were lost between the passes: a run's keys are damaged."""
    counts = index["counts"]
    expected = counts["sequences"] - counts["duplicate_sequences"] * index["dedup"]
    written = sum(entry["samples"] for entry in index["splits"].values())
    if written != expected:
        raise DamagedData(
            f"{work}: {written:,} of {expected:,} sequences were found again, so a file in it is "
            "damaged; delete the folder and build again"
        )


def _publish(output: Path, work: Path, index: dict, vocab: Vocab) -> None:
    """Move the shards to `output`, then the vocabulary, and index.json at the end."""
    shards = [shard["name"] for split in index["splits"].values() for shard in split["shards"]]
    ready = work / "ready"
    shutil.rmtree(ready, ignore_errors=True)  # of a build that was killed here
    ready.mkdir()
    vocab.write(ready)
    files = [*(work / name for name in shards), *ready.iterdir(), ready / INDEX_NAME]
    write_json(ready / INDEX_NAME, index)
    publish({path: output / path.name for path in files})


def open_bar(what: str, unit: str, total: int = 0) -> tqdm:
    """A progress bar on a terminal, a line now and then elsewhere."""
    seconds = 0.1 if sys.stderr.isatty() else LINE_SECONDS
    options = {"mininterval": seconds, "maxinterval": max(10.0, seconds), "delay": seconds}
    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, **options)


def tell_progress(readings: Iterable[Reading], size: int) -> Iterator[Reading]:
    """The documents of a unit of `size` bytes, with a line now and then if there are very many."""
    told = time.monotonic()
    for number, reading in enumerate(readings, 1):
        if time.monotonic() > told + LINE_SECONDS:
            told = time.monotonic()
            done = f"{reading.bytes_read:,} of {size:,} bytes of this unit of work"
            log_line(f"{reading.name}: {number:,} documents, {done}")
        yield reading
