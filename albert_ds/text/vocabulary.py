"""From text to a vocabulary folder: what `albert-ds vocab` does."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from albert_ds.base.cli import Range, flag, integer
from albert_ds.base.files import check_folder, new_folder
from albert_ds.text.documents import SEED, TextConfig
from albert_ds.text.index import check_damage
from albert_ds.text.progress import open_bar
from albert_ds.text.segmented import split_into_words
from albert_ds.text.sources import Slice, cut_units, describe_tally, read_documents
from albert_ds.text.survey import choose_word_mark, report_survey, survey_text
from albert_ds.text.work_folder import WORK_NAME
from albert_ds.vocab.vocab import FILES, NUM_FIXED, Normalisation, train_vocab

TAKEN = (*FILES, WORK_NAME)  # in a folder that holds a vocabulary, or where shards are built


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabConfig(TextConfig):
    """How a vocabulary is made of text. Raises UserError, naming the flag, for a wrong value."""

    vocab_size: int = flag(
        "largest number of pieces, special ones included; little text yields fewer",
        "PIECES",
        integer(NUM_FIXED + 1, 10_000_000),
        default=30_000,
    )
    keep_case: bool = flag(
        "keep capital letters (by default text is lower-cased if its script has case)",
        default=False,
    )
    strip_accents: bool = flag(
        "the released English setting: take accents and all combining marks off letters; it makes "
        "different words of most languages one",
        default=False,
    )
    character_coverage: float = flag(
        "share (0 to 1) of all characters in the text that get a piece; the rest is unknown",
        "SHARE",
        Range(gt=0, le=1),
        default=0.99995,
    )
    byte_fallback: bool = flag(
        "write a character without a piece as the bytes of its UTF-8 form; takes 256 pieces",
        default=False,
    )
    sample_bytes: int = flag(
        "text to train on, as sentences that are drawn at random if there is more; takes about 22 "
        "times as much memory",
        "BYTES",
        integer(1, 1 << 40),
        default=64_000_000,
    )
    seed: int = flag("seed of that drawing", "N", SEED, default=0)

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(
            lower_case=not self.keep_case,
            keep_accents=not self.strip_accents,
            form="albert" if self.strip_accents else "nfkc",
        )


def build_vocab(locations: list[str], output: Path, config: VocabConfig) -> list[str]:
    """Train on the text at `locations` and write the folder; returns lines that report on it.

    Raises UserError for text that is not as the flags say or too little, DamagedData for too many
    damaged documents or a file that cannot be read through; then nothing is written.
    """
    check_folder(output, locations, names=TAKEN)
    units = cut_units(locations, config.text_field)
    config = choose_word_mark(units, config)
    survey = survey_text(units, config, config.normalisation)
    counts: Counter[str] = Counter()
    tally: Counter[str] = Counter()
    vocab = train_vocab(
        _read_sentences(units, config, counts, tally),
        config.normalisation,
        vocab_size=config.vocab_size,
        character_coverage=config.character_coverage,
        sample_bytes=config.sample_bytes,
        byte_fallback=config.byte_fallback,
        segmented=config.segmented,
        seed=config.seed,
    )
    report = report_survey(survey, vocab, config)
    check_folder(output, locations, names=TAKEN)  # another command may have begun there
    with new_folder(output) as partial:
        vocab.write(partial)
        vocab.write_pieces(partial)
    pieces = f"{vocab.size:,} pieces"
    if vocab.size < config.vocab_size:
        pieces += f", all that this text yields of --vocab-size {config.vocab_size}"
    if (size := counts.pop("bytes")) > config.sample_bytes:
        pieces += f", of a sample of {config.sample_bytes:,} of its {size:,} bytes (--sample-bytes)"
    dropped = "".join(
        f", {number:,} {kind.removeprefix('damaged_')} dropped"
        for kind, number in counts.items()
        if kind != "documents"
    )
    return [*report, pieces + dropped, *describe_tally(tally)]


def _read_sentences(
    units: list[list[Slice]], config: VocabConfig, counts: Counter[str], tally: Counter[str]
) -> Iterator[str]:
    slices = [part for unit in units for part in unit]
    places: dict[str, str] = {}
    with open_bar("reading", "B", sum(part.size for part in slices)) as bar:
        for reading in read_documents(slices, config.text_field, tally):
            document = reading.document
            bar.update(reading.bytes_read - bar.n)
            if document.damage:
                counts[f"damaged_{document.damage}"] += 1
                if document.damage not in places:
                    places[document.damage] = reading.place + reading.cause
            elif document.lines:
                counts["documents"] += 1
                sentences = config.split(document.lines)
                counts["bytes"] += sum(len(sentence.encode()) for sentence in sentences)
                if config.segmented:
                    yield from split_into_words(sentences, config.space(document.lines))
                else:
                    yield from sentences
    check_damage(counts, places, config.max_damaged)
