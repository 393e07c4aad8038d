"""index.json of a build: its content, proofs and warnings."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from albert_ds.base.cli import log_line
from albert_ds.base.errors import DamagedData
from albert_ds.data.shards import FORMAT, SPLITS, token_dtype
from albert_ds.text.documents import DAMAGE
from albert_ds.text.encode import COUNTS, BuildConfig
from albert_ds.text.external_sort import DUPLICATES
from albert_ds.vocab.vocab import Vocab

MIN_HELD_OUT, GOOD_HELD_OUT = 2_000, 10_000  # tokens
MAX_HOLDOUT = 0.5  # the largest share that a warning names
MASKED = 0.15  # of the tokens, by default of training
MAX_WITHOUT_PAIR, MIN_FILL = 0.05, 0.6  # beyond which a warning is printed


def sum_up(encoded: list[dict], config: BuildConfig) -> tuple[Counter, Counter, dict[str, str]]:
    """The counts of all units, what was read of them, and the first place of each damage."""
    counts = Counter(dict.fromkeys(COUNTS, 0))
    tally = Counter()
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


def make_index(
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


def check_whole(index: dict, work: Path) -> None:
    """Raise DamagedData if sequences were lost between the passes: a run's keys are damaged."""
    counts = index["counts"]
    expected = counts["sequences"] - counts["duplicate_sequences"] * index["dedup"]
    written = sum(entry["samples"] for entry in index["splits"].values())
    if written != expected:
        raise DamagedData(
            f"{work}: {written:,} of {expected:,} sequences were found again, so a file in it is "
            "damaged; delete the folder and build again"
        )


def warn_of_packing(index: dict) -> None:
    """Say on stderr if sequences are short or have no pair, why, and what to do."""
    counts = index["counts"]
    capacity = index["sequence_length"] - 3
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


def warn_of_holdout(index: dict) -> None:
    """Say on stderr if too little is held out to measure anything on, and what to do."""
    counts = index["counts"]
    held_out = index["splits"]["heldout"]
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
