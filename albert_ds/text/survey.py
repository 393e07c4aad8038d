"""A look at a sample of the text before work begins: its script, and what normalisation does to it.

Up to SURVEY_SENTENCES sentences, the first ones of units spread over the whole text, so the same
text gives the same figures. What is wrong with the text as a whole (its encoding, its script) ends
the command here, before anything is written.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.text.documents import NO_TEXT_FIELD, NUL_BYTES, WRONG_ENCODING, TextConfig
from albert_ds.text.languages import SCRIPTS, WITHOUT_SPACES, default_ends
from albert_ds.text.segmented import SPACE, ZERO_WIDTH
from albert_ds.text.sources import Slice, read_documents
from albert_ds.vocab.vocab import UNK, Normalisation, Vocab

T = TypeVar("T", bound=TextConfig)
SURVEY_SENTENCES = 20_000
SURVEY_UNITS = 50
MIN_SCRIPT_SHARE = 0.1  # of the letters; technical text in Korean can have 70 % of Latin letters
CODED_SHARE = 0.1  # of the documents: no damage, but text in another encoding or another field
WHOLLY_WRONG = (WRONG_ENCODING, NUL_BYTES, NO_TEXT_FIELD)
MAX_MERGED = 0.001  # share of the words, above which a warning is printed
_KEEPING = Normalisation(lower_case=False)
_RUNS = re.compile("[\u30a0-\u30ff]+|[^\u30a0-\u30ff]+")  # Katakana words stand out without spaces


class Survey(NamedTuple):
    """A sample of the text."""

    sentences: list[str]
    # For index.json. Changed characters and merged words (made equal to another word) are the work
    # of anything but lower-casing.
    figures: dict[str, Any]


def survey_text(
    units: list[list[Slice]], config: TextConfig, normalisation: Normalisation
) -> Survey:
    """Figures of a sample of the text.

    Raises UserError for text in another encoding than UTF-8 or in another script than that of the
    language.
    """
    sentences = _read_sample(units, config)
    kept = list(map(_KEEPING.build(b""), sentences))
    shares = _count_scripts(kept)
    script = next(iter(shares), "none")
    scripts = SCRIPTS[config.language]
    own = sum(shares[name] for name in scripts) if shares else 1.0
    # Names and technical terms in Latin letters are part of the text of every language.
    foreign = sum(share for name, share in shares.items() if name not in (*scripts, "LATIN"))
    if (own < foreign or own < MIN_SCRIPT_SHARE) and not config.any_script:
        expected = ", ".join(scripts)
        raise UserError(
            f"--language {config.language}: {own:.0%} of the letters of the text are {expected}, "
            f"and {shares[script]:.0%} are {script}; name the language of the text, or accept it "
            "with --any-script"
        )
    uncased = replace(normalisation, lower_case=False).build()
    normalise = normalisation.build()
    before = [uncased(sentence) for sentence in sentences]
    after = [normalise(sentence) for sentence in sentences]
    words = Counter(word for sentence in kept for word in _split_words(sentence))
    spelled = {word: uncased(word) for word in words}
    cased: Counter[str] = Counter()
    for word, number in words.items():
        cased[spelled[word]] += number
    merged, examples = _find_merged(words, spelled)
    figures = {
        "sampled_sentences": len(sentences),
        "characters": sum(map(len, sentences)),
        "changed_characters": sum(map(_count_changed, sentences, before)),
        "lower_cased_characters": sum(map(_count_changed, before, after)),
        "words": len(words),
        "merged_words": merged,
        "merged_examples": examples,
        "case_merged_words": _find_merged(cased, {word: normalise(word) for word in cased})[0],
        "script": script,
    }
    return Survey(sentences, figures)


def choose_word_mark(units: list[list[Slice]], config: T) -> T:
    """The settings with what marks the words of segmented text: what it has more of.

    Raises UserError if that is spaces, which end the sentences of the language.
    """
    if not config.segmented:
        return config
    text = "".join(_read_sample(units, replace(config, segmented=False)))
    mark = ZERO_WIDTH if _has_marked_words(text) else SPACE
    ends = config.sentence_ends or default_ends(config.language)
    if mark == SPACE and ends == "spaces" and config.lines != "sentence":
        raise UserError(
            f"--segmented with --language {config.language}: a segmenter's spaces do not end "
            "sentences; write one sentence a line and pass --lines sentence"
        )
    return replace(config, word_mark=mark)


def report_survey(survey: Survey, vocab: Vocab, config: TextConfig) -> list[str]:
    """Lines that say what normalisation did; warns on stderr; UserError for too many unknown."""
    ids = vocab.encode(survey.sentences)
    unknown = sum(line.count(UNK) for line in ids) / max(1, sum(map(len, ids)))
    if unknown > config.max_unknown:
        raise UserError(
            f"{unknown:.1%} of the tokens are unknown, over --max-unknown {config.max_unknown:g}: "
            "the vocabulary lacks characters of this text; train it on text of the same language "
            "with the same normalisation, with more pieces, a higher --character-coverage or "
            "--byte-fallback"
        )
    lines = [*describe_figures(survey.figures), f"unknown: {unknown:.4%} of the tokens"]
    if config.segmented:
        name = "zero-width spaces" if config.word_mark == ZERO_WIDTH else "spaces"
        lines.append(f"words: marked by {name}, which are taken out")
    elif config.language in WITHOUT_SPACES and _has_marked_words("".join(survey.sentences)):
        log_line(
            "warning: zero-width spaces mark the words of the text, and are removed; --segmented "
            "keeps the words for whole-word masking"
        )
    merged = survey.figures["merged_words"] / max(1, survey.figures["words"])
    if merged > MAX_MERGED:
        log_line(
            f"warning: {merged:.1%} of the different words became equal to another"
            f"{_quote(survey.figures)}; without --strip-accents they stay apart"
        )
    return lines


def describe_figures(figures: dict[str, Any]) -> list[str]:
    """The figures of a sample, as lines for people."""
    characters, words = max(1, figures["characters"]), max(1, figures["words"])
    return [
        f"sample: {figures['sampled_sentences']:,} sentences, {figures['words']:,} different "
        f"words, most letters {figures['script']}",
        f"normalisation: {figures['changed_characters'] / characters:.2%} of the characters "
        f"changed, and {figures['lower_cased_characters'] / characters:.2%} lower-cased",
        f"words that became equal: {figures['merged_words']:,} "
        f"({figures['merged_words'] / words:.2%}){_quote(figures)}; by lower case alone: "
        f"{figures['case_merged_words']:,} ({figures['case_merged_words'] / words:.2%})",
    ]


def _has_marked_words(text: str) -> bool:
    """Whether writers have marked words by zero-width spaces."""
    return text.count(ZERO_WIDTH) > text.count(SPACE)


def _quote(figures: dict[str, Any]) -> str:
    examples = ", ".join(figures["merged_examples"])
    return examples and f": {examples}"


def _read_sample(units: list[list[Slice]], config: TextConfig) -> list[str]:
    step = max(1, len(units) // SURVEY_UNITS)
    chosen = units[::step][:SURVEY_UNITS]
    sentences: list[str] = []
    documents = wrong = 0
    first = None
    for number, unit in enumerate(chosen, 1):
        for reading in read_documents(unit, config.text_field):
            documents += 1
            if reading.document.damage in WHOLLY_WRONG:
                wrong += 1
                first = first or reading
            elif not reading.document.damage:
                sentences += config.split(reading.document.lines)
            if len(sentences) + 100 * wrong >= SURVEY_SENTENCES * number // len(chosen):
                break
    if first is not None and wrong > max(config.max_damaged, CODED_SHARE) * documents:
        is_absent = first.document.damage == NO_TEXT_FIELD
        what = f"no text in {config.text_field!r}" if is_absent else "not UTF-8"
        raise UserError(
            f"{first.place}: {what}{first.cause} ({wrong:,} of the first {documents:,} "
            f"documents; --max-damaged {config.max_damaged:g})"
        )
    return sentences[:SURVEY_SENTENCES]


def _count_scripts(texts: Iterable[str]) -> Counter[str]:
    """The share of the letters that are of each script, the most frequent script first."""
    letters = Counter(char for text in texts for char in text)
    scripts: Counter[str] = Counter()
    for char, number in letters.items():
        if unicodedata.category(char) in ("Lu", "Ll", "Lt", "Lo"):
            scripts[unicodedata.name(char, "unnamed").split()[0]] += number
    total = scripts.total()
    return Counter({name: number / total for name, number in scripts.most_common()})


def _count_changed(before: str, after: str) -> int:
    """Characters of `before` that are not in `after` any more."""
    return 0 if before == after else (Counter(before) - Counter(after)).total()


def _split_words(text: str) -> list[str]:
    spaced = "".join(char if _is_of_word(char) else " " for char in text)
    return [word for part in spaced.split() for word in _RUNS.findall(part)]


@lru_cache(maxsize=1 << 16)
def _is_of_word(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM"


def _find_merged(words: Counter[str], forms: dict[str, str]) -> tuple[int, list[str]]:
    """How many words became equal to another one; the most frequent of them, "schon = schön"."""
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(forms[word], []).append(word)
    equal = [group for group in groups.values() if len(group) > 1]
    # The second most frequent spelling tells how much is lost.
    ranked = sorted(equal, key=lambda group: -sorted(words[word] for word in group)[-2])
    examples = [" = ".join(sorted(group, key=lambda w: -words[w])[:3]) for group in ranked[:3]]
    return sum(map(len, equal)), examples
