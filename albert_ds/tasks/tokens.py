"""`--task tokens`: tags of the user's own for words: named entities, B-TYPE, I-TYPE and O.

The first piece of a word decides its tag. In training the others have I-TYPE or O, as if the word
went on: so Hugging Face's pipeline, which joins pieces, gives whole words. A sentence that is
longer than a sequence is cut between words into several. Scores are nervaluate's, over whole
entities ("strict": boundaries and type).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from albert_ds.base.cli import require
from albert_ds.base.errors import UserError
from albert_ds.base.files import write_file
from albert_ds.tasks.features import FeatureBuilder, Features, Split, encode_examples
from albert_ds.tasks.labelled import Sentence, find_file, need_one, read_sentences, write_scores
from albert_ds.tasks.recipes import Lengths
from albert_ds.vocab.vocab import Vocab

ENDINGS = (".conll", ".txt", ".jsonl")
OUTSIDE = "O"
MAX_WORDS = 5_000  # of a sentence that is scored: nervaluate's time grows faster than their square
NO_PIECE = -1  # of a word without a piece, such as an invisible character


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensTask:
    """Tags by their words, O first."""

    labels: tuple[str, ...]

    head = "tokens"
    metrics = ("f1", "precision", "recall")
    dev_splits = ("dev",)
    test_splits = ("test",)
    has_test_labels = True  # if the file has them
    published = {}

    @classmethod
    def open(cls, data: Path) -> "TokensTask":
        """The task of the types in the training set."""
        require("nervaluate", "ner", "--task tokens")
        types: set[str] = set()
        for sentence in _read(data, "train"):
            for where, tag in zip(sentence.where, sentence.tags or (), strict=True):
                kind, dash, name = tag.partition("-")
                if tag != OUTSIDE and not (kind in ("B", "I") and dash and name):
                    raise UserError(f"{where}: tag {tag!r}: must be O, B-TYPE or I-TYPE")
                types |= {name} - {""}
        if not types:
            raise UserError(f"--data {data}: no word of the training set has a tag but O")
        return cls(labels=(OUTSIDE, *(f"{kind}-{name}" for name in sorted(types) for kind in "BI")))

    def files(self, data: Path, split: str) -> list[Path]:
        return [find_file(data, split, ENDINGS)]

    def count_examples(self, data: Path) -> int:
        """Sentences of the training set."""
        return sum(1 for _ in _read(data, "train"))

    def build(self, data: Path, split: str, vocab: Vocab, lengths: Lengths) -> Features:
        """Tokenise a split; a test set may have no tags."""
        builder = FeatureBuilder()
        starts: list[int] = []  # of each word in `ids`, or NO_PIECE
        tags: list[int] = []  # of each word
        sizes: list[int] = []  # words of each sentence
        total = 0
        encoded = encode_examples(_read(data, split), lambda sentence: sentence.words, vocab)
        for sentence, words in encoded:
            ids: list[int] = []
            cuts = []  # where words begin in `ids`
            for pieces in words:
                starts.append(total + len(ids) if pieces else NO_PIECE)
                cuts.append(len(ids))
                ids += pieces
            text = builder.add_text(ids)
            limit = lengths.sequence - 2
            for begin, end in _cut(cuts, len(ids), limit):
                builder.add_row(len(sizes), (text, begin, end))
            if len(ids) > limit:
                builder.count("cut into several sequences")
            total += len(ids)
            sizes.append(len(sentence.words))
            tags += self._read_tags(sentence)
        builder.count("examples", len(sizes))
        builder.count("words", len(starts))
        if len(tags) not in (0, len(starts)):
            raise UserError(
                f"{self.files(data, split)[0]}: tags must be there for all sentences or none"
            )
        if NO_PIECE in starts:
            builder.count("words without a piece, taken as O", starts.count(NO_PIECE))
        arrays = {"starts": np.array(starts, np.int64), "sizes": np.array(sizes, np.int64)}
        if tags:
            counts = Counter(self.labels[tag] for tag in tags)
            for label in self.labels[1:]:
                builder.count(label, counts[label])
            arrays["word_tags"] = np.array(tags, np.int32)
            arrays["tags"] = _spread(arrays["word_tags"], arrays["starts"], total)
        return builder.build(choices=1, **arrays)

    def _read_tags(self, sentence: Sentence) -> list[int]:
        for where, tag in zip(sentence.where, sentence.tags or (), strict=bool(sentence.tags)):
            if tag not in self.labels:
                known = ", ".join(self.labels)[:200]
                raise UserError(f"{where}: tag {tag!r} is not in the training set: {known}")
        return [self.labels.index(tag) for tag in sentence.tags or ()]

    def name_tags(self, split: Split, outputs: dict) -> list[list[str]]:
        """The predicted tag of every word, by sentence."""
        arrays = split.features.arrays
        lengths = split.features.lengths
        stops = np.cumsum(lengths)
        inner = np.ones(int(stops[-1]), bool)  # all tokens but [CLS] and [SEP]
        inner[stops - lengths] = inner[stops - 1] = False
        chosen = outputs["logits"][inner].argmax(1)  # of each of `ids`: windows leave out nothing
        tags = np.where(arrays["starts"] == NO_PIECE, 0, chosen[arrays["starts"]])
        return self._split(split, tags)

    def _split(self, split: Split, tags: np.ndarray) -> list[list[str]]:
        cuts = np.cumsum(split.features.arrays["sizes"])[:-1]
        return [[self.labels[tag] for tag in part] for part in np.split(tags, cuts)]

    def _evaluate(self, split: Split, outputs: dict):
        """nervaluate's results and, of each sentence, entities that are right, said and there."""
        from nervaluate import Evaluator

        truth = self._split(split, split.features.arrays["word_tags"])
        types = [label[2:] for label in self.labels[1::2]]
        evaluator = Evaluator(truth, self.name_tags(split, outputs), tags=types, loader="list")
        results = evaluator.evaluate()
        right = Counter(n for n, _ in results["overall_indices"]["strict"].correct_indices)
        counts = [
            (right[n], len(said), len(there))
            for n, (said, there) in enumerate(zip(evaluator.pred, evaluator.true, strict=True))
        ]
        return results, np.array(counts, np.int64)

    def score(self, split: Split, outputs: dict) -> dict[str, float]:
        """Precision, recall and F1 of whole entities; none for a test set without tags."""
        if "word_tags" not in split.features.arrays:
            return {}
        strict = self._evaluate(split, outputs)[0]["overall"]["strict"]
        return {name: float(getattr(strict, name)) for name in self.metrics}

    def write(self, split: Split, outputs: dict, folder: Path, metrics: dict) -> None:
        """Write each word with its tag, if there is one, and the predicted one; and the scores."""
        lines = []
        sentences = _read(split.data, split.name)
        for sentence, tags in zip(sentences, self.name_tags(split, outputs), strict=True):
            columns = [sentence.words, *([sentence.tags] if sentence.tags else []), tags]
            lines += ["\t".join(row) for row in zip(*columns, strict=True)] + [""]
        write_file(folder / f"predictions.{split.name}.conll", "\n".join(lines))
        if "word_tags" in split.features.arrays:
            results, counts = self._evaluate(split, outputs)
            entities = {
                name: {schema: asdict(result) for schema, result in by_schema.items()}
                for name, by_schema in sorted(results["entities"].items())
            }
            overall = {schema: asdict(result) for schema, result in results["overall"].items()}
            write_scores(
                folder / f"scores.{split.name}.json",
                len(counts),
                lambda picks: _measure(*counts[picks].sum(0).tolist()),
                overall=overall,
                entities=entities,
            )


def _spread(tags: np.ndarray, starts: np.ndarray, total: int) -> np.ndarray:
    """The tag of each of `total` pieces: of the first of a word its own, then I-TYPE or O."""
    has_piece = starts != NO_PIECE
    tags, starts = tags[has_piece], starts[has_piece]
    inside = tags + tags % 2  # labels are O, then B and I of each type
    spread = np.repeat(inside, np.diff(starts, append=total))
    spread[starts] = tags
    return spread


def _measure(right: int, said: int, there: int) -> dict[str, float]:
    return {
        "f1": 2 * right / max(1, said + there),
        "precision": right / max(1, said),
        "recall": right / max(1, there),
    }


def _read(data: Path, split: str) -> Iterator[Sentence]:
    """The sentences of a split; only those of a test set may be without tags."""
    path = find_file(data, split, ENDINGS)
    for sentence in need_one(path, read_sentences(path)):
        if split != "train" and len(sentence.words) > MAX_WORDS:  # its scores would take hours
            raise UserError(
                f"{sentence.where[0]}: a sentence of {len(sentence.words):,} words; allowed: at "
                f"most {MAX_WORDS:,}, with an empty line after each sentence"
            )
        if sentence.tags is None and split != "test":
            raise UserError(f"{sentence.where[0]}: no tag")
        yield sentence


def _cut(starts: list[int], total: int, limit: int) -> Iterator[tuple[int, int]]:
    """Parts of at most `limit` pieces that together are all, cut between words if there is one."""
    begin = 0
    while total - begin > limit:
        last = starts[bisect_right(starts, begin + limit) - 1]
        end = last if last > begin else begin + limit
        yield begin, end
        begin = end
    yield begin, total
