"""Text to shards, in two passes over the disk, by any number of processes that may be killed.

    1  units of text -> sequences -> sorted runs                    (encode.py)
    2  all runs, one range of keys at a time -> some shards         (external_sort.py)

A shard is a range of keys, so every process can write any shard alone, and the bytes depend neither
on the number of processes nor on the order of reading. Memory: one run or one range, one document,
one vocabulary. Finished pieces of work of either pass are kept when a build is killed, and a part
of a build does some of one pass (`work_folder.py`).
"""

import shutil
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from albert_ds import __version__
from albert_ds.base.cli import as_flag
from albert_ds.base.errors import UserError
from albert_ds.base.files import publish, write_json
from albert_ds.base.json_files import check, read_json
from albert_ds.data.shards import INDEX_NAME
from albert_ds.text.encode import BuildConfig
from albert_ds.text.index import (
    check_whole,
    make_index,
    sum_up,
    warn_of_holdout,
    warn_of_packing,
)
from albert_ds.text.manifest import fingerprint
from albert_ds.text.passes import (
    NOT_IN_ENCODING,
    encode_units,
    list_units,
    plan_ranges,
    read_encoded,
    run_pass,
)
from albert_ds.text.pool import Pool
from albert_ds.text.progress import open_bar
from albert_ds.text.sources import Slice, cut_units, describe_tally, list_files
from albert_ds.text.survey import choose_word_mark, report_survey, survey_text
from albert_ds.text.work_folder import Part, part_folder, part_lock, work_folder
from albert_ds.vocab.vocab import Vocab

SURVEY_NAME = "survey.json"
LIMITS = "max_damaged max_unknown any_script".split()  # that the text of the survey must keep


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
            encoded = read_encoded(list_units(text.units, vocab, work, text.config), work)
        else:
            units = list_units(text.units, vocab, work, text.config)
            encoded = encode_units(units, vocab, text.config, pool)
        counts, tally, damage = sum_up(encoded, config)
        ranges, write = plan_ranges(encoded, counts, work, config)
        written = run_pass(pool, ranges, write, open_bar("writing", " shards"))
        index = make_index(written, counts, vocab, text.config)
        check_whole(index, work)
        index["input"] = list_files(text.units)
        index["text"] = text.figures
        _publish(output, work, index, vocab)
        warn_of_packing(index)
        warn_of_holdout(index)
    report = text.report
    for kind, place in damage.items():
        report.append(f"{kind}: {counts[f'damaged_{kind}']:,} dropped, first: {place}")
    return index, [*report, *describe_tally(tally)]


def encode_part(
    locations: list[str], vocab: Vocab, output: Path, config: BuildConfig, pool: Pool, part: Part
) -> str:
    """The first pass over a part of the text; a line on it. Raises what `build_shards` raises."""
    with _own_part(locations, vocab, output, config, "piece", part) as (work, text):
        units = list_units(text.units, vocab, work, text.config)
        own = part.of_items(units)
        counts = Counter()
        for note in encode_units(own, vocab, text.config, pool):
            counts.update(note["counts"])
    return (
        f"piece {part}: {len(own)} of {len(units)} units of text, {counts['documents']:,} "
        f"documents, {counts['sequences']:,} sequences, {counts['tokens']:,} tokens"
    )


def write_part(
    locations: list[str], vocab: Vocab, output: Path, config: BuildConfig, pool: Pool, part: Part
) -> str:
    """A part of the second pass; a line on it. Raises what `build_shards` raises."""
    with _own_part(locations, vocab, output, config, "join", part) as (work, text):
        encoded = read_encoded(list_units(text.units, vocab, work, text.config), work)
        counts, _, _ = sum_up(encoded, config)
        ranges, write = plan_ranges(encoded, counts, work, config)
        own = part.of_items(ranges)
        written = run_pass(pool, own, write, open_bar("writing", " shards"))
    shards = sum(len(note["shards"]) for note in written)
    return f"join {part}: {len(own)} of {len(ranges)} ranges, {shards:,} shards"


@contextmanager
def _own_part(
    locations: list[str], vocab: Vocab, output: Path, config: BuildConfig, step: str, part: Part
) -> Generator[tuple[Path, Text]]:
    """The folder of unfinished work and its text, while this process does one part."""
    with ExitStack() as locks:
        with part_folder(output, locations) as work:
            text = _survey(locations, vocab, work, config, must_be_same=True)
            locks.enter_context(part_lock(output, work, step, part))
        yield work, text


def _survey(
    locations: list[str], vocab: Vocab, work: Path, config: BuildConfig, *, must_be_same: bool
) -> Text:
    """The survey that the folder holds, if it is of this text and was held to these limits, or a
    new one.

    must_be_same: the folder may hold none of other text or settings.
    """
    units = cut_units(locations, config.text_field)
    settings = {k: v for k, v in asdict(config).items() if k not in NOT_IN_ENCODING}
    origin = {
        "version": __version__,
        "vocab": fingerprint(vocab.sha256, asdict(vocab.normalisation)),
        "settings": settings,
        "input": fingerprint(units),
    }
    limits = {name: getattr(config, name) for name in LIMITS}
    path = work / SURVEY_NAME
    if path.exists():
        kept = read_json(path)
        schema = dict.fromkeys(("origin", "limits", "figures"), dict)
        check(kept, {**schema, "word_mark": str, "report": [str]}, str(path))
        if kept["origin"] == origin and kept["limits"] == limits:
            config = replace(config, word_mark=kept["word_mark"])
            return Text(units, config, kept["figures"], kept["report"])
        if must_be_same and kept["origin"] != origin:
            difference = _name_difference(kept["origin"], origin)
            raise UserError(f"{work}: holds pieces {difference}; name another --output for these")
    config = choose_word_mark(units, config)
    survey = survey_text(units, config, vocab.normalisation)
    report = report_survey(survey, vocab, config)
    kept = {"origin": origin, "limits": limits, "word_mark": config.word_mark}
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
