"""Look at a built set before training on it: samples as text, statistics, a picture.

Samples are drawn just as training draws them. In the text, {fox=>[MASK]} is a token to predict and
what the model sees in its place; {fox} is a token to predict that the model sees unchanged.

albert-ds inspect --data DATA
albert-ds inspect --run RUN --step N    what step N of a run reads: which documents,
                                        with which masks and labels
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds import cli
from albert_ds.cli import Number
from albert_ds.data.samples import Sample
from albert_ds.data.stream_config import OBJECTIVES, StreamConfig
from albert_ds.data.vocab import MASK
from albert_ds.errors import UserError
from albert_ds.json_files import check, read_json

if TYPE_CHECKING:
    from argparse import Namespace

    from albert_ds.data.shards import ShardSet


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--data",
        type=cli.path,
        metavar="DATA",
        help="folder made by `albert-ds shards` (required without --run)",
    )
    add(
        "--run",
        type=Path,
        metavar="RUN",
        help="pretraining run whose data, flags and step --step to show instead (default: none)",
    )
    add("--step", type=cli.positive, metavar="N", help="step of --run, from 1 (default: none)")
    add("--split", choices=("train", "heldout"), default="train", help="which split to look at")
    add("--show", type=cli.natural, default=2, metavar="SAMPLES", help="samples to print as text")
    add("--count", type=cli.positive, default=2000, metavar="SAMPLES", help="samples to count")
    add("--picture", type=cli.new_file, metavar="PNG", help="file to draw the distributions into")
    cli.add_flags(parser, StreamConfig)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if (args.run is None) != (args.step is None) or (args.run is None) == (args.data is None):
        raise UserError("--data or --run with --step: one of the two is needed, and not both")
    if args.picture:
        cli.require("matplotlib", "plots", "--picture")
    show_step(args.run, args.step) if args.run else show_set(args)


def show_step(run: Path, step: int) -> None:
    """Print every sample of one step of a run, with its place in the shards."""
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import MicroBatchReader

    name = f"{run / 'config.json'}"
    config = read_json(run / "config.json", name)
    schema = {"data": [str], "data_weights": [Number(above=0)], "stream": dict}
    check(config, {**schema, "batch_size": Number(low=1, whole=True)}, name)
    stream = StreamConfig.read(config["stream"], str(run))
    sources = [open_shards(folder, "train") for folder in config["data"]]
    reader = MicroBatchReader(sources, config["data_weights"], stream)
    size = config["batch_size"]
    for position in range((step - 1) * size, step * size):
        number, place, shard = reader.locate(position)
        source = sources[number]
        print(
            f"sample {position}: {source.folder}, {source.shards[place.shard].name}, record "
            f"{place.sample}, epoch {place.epoch}, document {shard[place.sample].document:016x}"
        )
        show_sample(as_drawn(reader.draw(position)), stream, source)


def show_sample(sample: "Drawn", config: StreamConfig, source: "ShardSet") -> None:
    print(f"  {len(sample.ids)} tokens, ", end="")
    labels = OBJECTIVES[config.objective].labels
    print(labels[sample.pair_label] if sample.pair_label in range(len(labels)) else "no pair")
    print_text(sample, source.vocab.pieces, segmented=source.segmented)


def show_set(args: "Namespace") -> None:
    """Print the first samples of a set as text, and counts over more of them."""
    from albert_ds.data.shards import open_shards, read_index
    from albert_ds.data.stream import MicroBatchReader

    source = open_shards(args.data, args.split)
    typed = {name: getattr(args, name) for name in cli.flags_of(StreamConfig)}
    typed["sequence_length"] = args.sequence_length or source.sequence_length
    typed["word_boundaries"] = args.word_boundaries or "scripts"
    config = StreamConfig(**typed)
    reader = MicroBatchReader([source], None, config)
    count = min(args.count, int(source.sizes.sum()))
    seen = Seen()
    for position in range(count):
        sample = as_drawn(reader.draw(position))
        if position < args.show:
            print(f"sample {position}:")
            show_sample(sample, config, source)
        seen.add(sample)
    print_statistics(seen, count, config, source.vocab.pieces)
    index = read_index(args.data)
    print_text_figures(index)
    if args.picture:
        draw_distributions(seen, config, unknown_share(index), args.picture)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One sample as plain numbers."""

    ids: list[int]  # as the model sees them
    first: int  # tokens of [CLS] A [SEP]
    labels: dict[int, int]  # masked position -> what stood there
    pair_label: int
    truncated_tokens: int  # stored tokens that a short draw left out
    starts: list[bool]  # whether each token starts a word


def as_drawn(sample: Sample) -> Drawn:
    return Drawn(
        ids=sample.ids.tolist(),
        first=sample.first,
        labels=dict(zip(sample.positions.tolist(), sample.labels.tolist(), strict=True)),
        pair_label=sample.pair_label,
        truncated_tokens=sample.available - sample.used,
        starts=sample.starts.tolist(),
    )


@dataclass(kw_only=True, slots=True)
class Seen:
    """Counts over all samples."""

    lengths: list[int] = field(default_factory=list)
    first_lengths: list[int] = field(default_factory=list)
    masked_shares: list[float] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)  # of masked words, by their number
    replaced: Counter[str] = field(default_factory=Counter)
    pair_labels: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)  # before masking
    truncated_tokens: int = 0

    def add(self, sample: Drawn) -> None:
        whole = [sample.labels.get(i, token) for i, token in enumerate(sample.ids)]
        self.lengths.append(len(whole))
        self.first_lengths.append(sample.first)
        self.masked_shares.append(len(sample.labels) / len(whole))
        self.pair_labels[sample.pair_label] += 1
        self.ids.update(whole)
        self.truncated_tokens += sample.truncated_tokens
        for position, label in sample.labels.items():
            shown = sample.ids[position]
            kind = "[MASK]" if shown == MASK else "kept" if shown == label else "another piece"
            self.replaced[kind] += 1
        self.runs.update(count_runs(sample.labels, sample.starts))


def count_runs(masked: dict[int, int], starts: list[bool]) -> Iterator[int]:
    """Words of every stretch of masked tokens; two n-grams side by side are one stretch."""
    words = 0
    for i in range(len(starts) + 1):
        if i < len(starts) and i in masked:
            words += starts[i] or not words
        elif words:
            yield words
            words = 0


def print_text(sample: Drawn, pieces: list[str], *, segmented: bool) -> None:
    """A segmented set has a space before each of its words."""
    for name, begin, end in (("A", 0, sample.first), ("B", sample.first, len(sample.ids))):
        text = ""
        for i in range(begin, end):
            piece = pieces[sample.labels.get(i, sample.ids[i])]
            # The word mark becomes a space, except where it is a whole piece.
            space, bare = (" ", piece[1:] or piece) if piece[0] == "\u2581" else ("", piece)
            space = " " if segmented and sample.starts[i] else space
            if i in sample.labels:
                shown = pieces[sample.ids[i]]
                bare = f"{{{bare}}}" if shown == piece else f"{{{bare}=>{shown}}}"
            text += space + bare
        if text:
            print(f"  {name}: {text.strip()}")
    print()


def print_statistics(seen: Seen, count: int, config: StreamConfig, pieces: list[str]) -> None:
    from albert_ds.data.vocab import SPECIAL_PIECES

    tokens, masked = sum(seen.lengths), seen.replaced.total()
    room = config.sequence_length * count
    print(f"{count:,} samples, {tokens:,} tokens")
    print(f"fill: {tokens / room:.1%} of {config.sequence_length} (no row is ever padded)")
    print(
        f"truncated by short draws: "
        f"{seen.truncated_tokens / (tokens + seen.truncated_tokens):.1%} of the tokens"
    )
    for name, values in (("length", seen.lengths), ("[CLS] A [SEP]", seen.first_lengths)):
        spread = f"{min(values)} / {statistics.median(values):.0f} / {max(values)}"
        print(f"{name}: min / median / max {spread}")
    print(f"masked: {masked / tokens:.2%} of the tokens; of these " + shares(seen.replaced))
    harmonic = sum(1 / n for n in range(1, config.max_ngram + 1))
    drawn = ", ".join(f"{n}: {1 / n / harmonic:.1%}" for n in range(1, config.max_ngram + 1))
    print(f"words of a masked stretch: {shares(seen.runs)} (n-grams are drawn as {drawn})")
    labelled = count - seen.pair_labels[-100]
    if labelled:
        share = seen.pair_labels[1] / labelled
        error = 1.96 * (share * (1 - share) / labelled) ** 0.5
        print(f"pairs with label 1: {share:.1%} +- {error:.1%}; samples without a pair: ", end="")
        print(f"{seen.pair_labels[-100]:,}")
    print(
        "special pieces: " + ", ".join(f"{p} {seen.ids[i]:,}" for i, p in enumerate(SPECIAL_PIECES))
    )
    common = ", ".join(f"{pieces[i]} {n / tokens:.1%}" for i, n in seen.ids.most_common(12))
    print(f"most frequent: {common}")
    print(f"pieces that occur: {len(seen.ids):,} of {len(pieces):,}")


def unknown_share(index: dict) -> float:
    return index["counts"]["unknown_tokens"] / max(1, index["counts"]["tokens"])


def print_text_figures(index: dict) -> None:
    """What index.json says about the text; sets of earlier versions say less."""
    counts = index["counts"]
    print(f"unknown: {unknown_share(index):.4%} of the tokens of the set")
    print(
        f"sequences with one sentence: {counts['one_sentence_sequences']:,} of "
        f"{counts['sequences']:,}"
    )
    text = index.get("text")
    if text is None:
        print("normalisation: not recorded; built by an earlier version")
        return
    characters, words = max(1, text["characters"]), max(1, text["words"])
    examples = "".join(f"; {example}" for example in text["merged_examples"])
    print(f"language {index['language']}, most letters {text['script']}")
    print(
        f"normalisation {index['form']}: "
        f"{text['changed_characters'] / characters:.2%} of the characters changed, "
        f"{text['lower_cased_characters'] / characters:.2%} lower-cased"
    )
    print(
        f"words that became equal: {text['merged_words'] / words:.2%}, by lower case alone "
        f"{text['case_merged_words'] / words:.2%}{examples}"
    )


def shares(counts: Counter) -> str:
    total = counts.total()
    ranked = sorted(counts.items(), key=lambda item: (str(type(item[0])), item[0]))
    return ", ".join(f"{name} {number / total:.1%}" for name, number in ranked)


def draw_distributions(seen: Seen, config: StreamConfig, unknown: float, path: Path) -> None:
    """Lengths, masked share, words of a masked stretch, and the frequency of each piece."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(18, 4))
    axes[0].hist(seen.lengths, bins=range(0, config.sequence_length + 17, 16), color="0.4")
    axes[0].set(xlabel="tokens of a sample", ylabel="samples", yscale="log")
    axes[1].hist([100 * share for share in seen.masked_shares], bins=40, color="0.4")
    axes[1].set(xlabel="masked tokens of a sample (%)", ylabel="samples")
    axes[2].bar(list(seen.runs), list(seen.runs.values()), color="0.4")
    axes[2].set(xlabel="words of a masked stretch", ylabel="stretches", yscale="log")
    frequencies = sorted(seen.ids.values(), reverse=True)
    axes[3].loglog(range(1, len(frequencies) + 1), frequencies, color="0.2")
    title = f"unknown tokens: {unknown:.3%}"
    axes[3].set(xlabel="rank of the piece", ylabel="occurrences", title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
