"""Look at a built set before training on it: samples as text, and statistics.

Samples are drawn just as training draws them. In the text, {fox=>[MASK]} is a token to predict and
what the model sees in its place; {fox} is a token to predict that the model sees unchanged.

albert-ds inspect --data DATA
albert-ds inspect --run RUN --step N    what step N of a run reads: which documents,
                                        with which masks and labels
"""

import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, read_json
from albert_ds.base.plugin import PLUGIN, load_plugin
from albert_ds.base.storage import join
from albert_ds.data.samples import Sample, SampleReader
from albert_ds.data.segments import NO_LABEL
from albert_ds.data.shards import INDEX_NAME, ShardSet, open_shards, read_index
from albert_ds.data.stream_config import OBJECTIVES, DataPlan, StreamConfig
from albert_ds.text.survey import describe_figures
from albert_ds.vocab.vocab import MASK, SPECIAL_PIECES, WORD_MARK

# Of index.json what it says about the text, which only this command reads.
COUNTS = ("unknown_tokens", "tokens", "one_sentence_sequences", "sequences")
FIGURES = (
    *("sampled_sentences", "characters", "changed_characters", "lower_cased_characters"),
    *("words", "merged_words", "case_merged_words"),
)
TEXT = {
    "language": str,
    "form": str,
    "counts": dict.fromkeys(COUNTS, cli.non_negative),
    "text": {**dict.fromkeys(FIGURES, cli.non_negative), "merged_examples": [str], "script": str},
}


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    add = parser.add
    add("--data", "folder made by `albert-ds shards` (required without --run)", "DATA", cli.path)
    text = "pretraining run whose data, flags and step --step to show instead (default: none)"
    add("--run", text, "RUN", Path)
    add("--step", "step of --run, from 1 (default: none)", "N", cli.positive)
    add("--split", "which split to look at", choices=("train", "heldout"), default="train")
    add("--show", "samples to print as text", "SAMPLES", cli.non_negative, default=2)
    add("--count", "samples to count", "SAMPLES", cli.positive, default=2000)
    cli.add_flags(parser, StreamConfig)
    cli.add_flag(parser, "plugin", PLUGIN)
    return parser


def main(argv: list[str]) -> None:
    load_plugin(cli.find_word(argv, "--plugin"))  # it may add to the objectives
    parser = build_parser()
    args = parser.parse_args(argv)
    if (args.run is None) != (args.step is None) or (args.run is None) == (args.data is None):
        raise UserError("--data or --run with --step: one of the two is needed, and not both")
    if args.run is None:
        return show_set(args)
    for name in ("split", "show", "count", *cli.flags_of(StreamConfig)):
        if getattr(args, name, None) != parser.get_default(name):
            flag = cli.as_flag(name)
            raise UserError(f"{flag}: not with --run, whose samples are shown as it reads them")
    show_step(args.run, args.step)


def show_step(run: Path, step: int) -> None:
    """Print every sample of one step of a run, with its place in the shards."""
    path = run / "config.json"
    config = read_json(path)
    if "stream" not in config:
        raise UserError(f"--run {run}: {path} is not of a pretraining run")
    check(config, {"data": [str], "data_weights": [cli.Range(gt=0)]}, str(path))
    plan = DataPlan.read(config, str(run))
    if step > plan.steps:
        raise UserError(f"--step {step}: {run} has {plan.steps:,} steps")
    positions, stream = plan.batch_at(step - 1)
    sources = [open_shards(folder, "train") for folder in config["data"]]
    held = [source.fingerprint for source in sources]
    if config.get("data_sha256", held) != held:
        raise UserError(f"--run {run}: {', '.join(config['data'])}: no longer the data of this run")
    reader = SampleReader(sources, config["data_weights"], stream)
    for position in positions:
        number, place, shard = reader.locate(position)
        source = sources[number]
        print(
            f"sample {position}: {source.folder}, {source.shards[place.shard].name}, record "
            f"{place.sample}, epoch {place.epoch}, document {shard[place.sample].document:016x}"
        )
        show_sample(reader.draw(position), stream, source)


def show_sample(sample: Sample, config: StreamConfig, source: ShardSet) -> None:
    print(f"  {len(sample.ids)} tokens, ", end="")
    is_pair = sample.pair_label != NO_LABEL
    print(OBJECTIVES[config.objective].labels[sample.pair_label] if is_pair else "no pair")
    pieces = source.vocab.pieces
    hidden = masked_labels(sample)
    for name, begin, end in (("A", 0, sample.first), ("B", sample.first, len(sample.ids))):
        text = ""
        for i in range(begin, end):
            shown = pieces[sample.ids[i]]
            piece = pieces[hidden.get(i, sample.ids[i])]
            bare = piece.removeprefix(WORD_MARK) or piece
            # A segmented set has a space before each of its words.
            if piece.startswith(WORD_MARK) or (source.segmented and sample.starts[i]):
                text += " "
            if i in hidden:
                bare = f"{{{bare}}}" if shown == piece else f"{{{bare}=>{shown}}}"
            text += bare
        if text:
            print(f"  {name}: {text.strip()}")
    print()


def masked_labels(sample: Sample) -> dict[int, int]:
    """Masked position -> what stood there."""
    return dict(zip(sample.positions.tolist(), sample.labels.tolist(), strict=True))


def show_set(args: Namespace) -> None:
    """Print the first samples of a set as text, and counts over more of them."""
    index = read_index(args.data)
    check(index, TEXT, join(args.data, INDEX_NAME))
    source = open_shards(args.data, args.split)
    args.sequence_length = args.sequence_length or source.sequence_length
    config = StreamConfig(**cli.values_of(args, StreamConfig))
    reader = SampleReader([source], None, config)
    count = min(args.count, int(source.sizes.sum()))
    seen = Statistics()
    for position in range(count):
        sample = reader.draw(position)
        if position < args.show:
            print(f"sample {position}:")
            show_sample(sample, config, source)
        seen.add(sample)
    print_statistics(seen, count, config, source.vocab.pieces)
    print_text_figures(index)


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Counts over all samples."""

    lengths: list[int] = field(default_factory=list)
    first_lengths: list[int] = field(default_factory=list)
    masked_shares: list[float] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)  # of masked words, by their number
    replaced: Counter[str] = field(default_factory=Counter)
    pair_labels: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)  # before masking
    used: int = 0  # of the stored tokens
    available: int = 0  # stored tokens

    def add(self, sample: Sample) -> None:
        hidden = masked_labels(sample)
        ids = sample.ids.tolist()
        self.lengths.append(len(ids))
        self.first_lengths.append(sample.first)
        self.masked_shares.append(len(hidden) / len(ids))
        self.pair_labels[sample.pair_label] += 1
        self.ids.update(hidden.get(i, token) for i, token in enumerate(ids))
        self.used += sample.used
        self.available += sample.available
        for position, label in hidden.items():
            shown = ids[position]
            kind = "[MASK]" if shown == MASK else "kept" if shown == label else "another piece"
            self.replaced[kind] += 1
        self.runs.update(count_runs(hidden, sample.starts.tolist()))


def count_runs(masked: dict[int, int], starts: list[bool]) -> Iterator[int]:
    """Words of every stretch of masked tokens; two n-grams side by side are one stretch."""
    words = 0
    for i in range(len(starts) + 1):
        if i < len(starts) and i in masked:
            words += starts[i] or not words
        elif words:
            yield words
            words = 0


def print_statistics(seen: Statistics, count: int, config: StreamConfig, pieces: list[str]) -> None:
    tokens = sum(seen.lengths)
    masked = seen.replaced.total()
    room = config.sequence_length * count
    print(f"{count:,} samples, {tokens:,} tokens")
    print(f"fill: {tokens / room:.1%} of {config.sequence_length} (no row is ever padded)")
    left_out = 1 - seen.used / seen.available
    print(f"truncated by short draws: {left_out:.1%} of the stored tokens")
    for name, values in (("length", seen.lengths), ("[CLS] A [SEP]", seen.first_lengths)):
        spread = f"{min(values)} / {statistics.median(values):.0f} / {max(values)}"
        print(f"{name}: min / median / max {spread}")
    print(f"masked: {masked / tokens:.2%} of the tokens; of these " + shares(seen.replaced))
    harmonic = sum(1 / n for n in range(1, config.max_ngram + 1))
    drawn = ", ".join(f"{n}: {1 / n / harmonic:.1%}" for n in range(1, config.max_ngram + 1))
    print(f"words of a masked stretch: {shares(seen.runs)} (n-grams are drawn as {drawn})")
    labelled = count - seen.pair_labels[NO_LABEL]
    if labelled:
        share = seen.pair_labels[1] / labelled
        error = 1.96 * (share * (1 - share) / labelled) ** 0.5
        without = f"samples without a pair: {seen.pair_labels[NO_LABEL]:,}"
        print(f"pairs with label 1: {share:.1%} +- {error:.1%}; {without}")
    special = ", ".join(f"{p} {seen.ids[i]:,}" for i, p in enumerate(SPECIAL_PIECES))
    print(f"special pieces: {special}")
    common = ", ".join(f"{pieces[i]} {n / tokens:.1%}" for i, n in seen.ids.most_common(12))
    print(f"most frequent: {common}")
    print(f"pieces that occur: {len(seen.ids):,} of {len(pieces):,}")


def print_text_figures(index: dict) -> None:
    """What index.json says about the text."""
    counts = index["counts"]
    unknown = counts["unknown_tokens"] / max(1, counts["tokens"])
    single = counts["one_sentence_sequences"]
    print(f"unknown: {unknown:.4%} of the tokens of the set")
    print(f"sequences with one sentence: {single:,} of {counts['sequences']:,}")
    print(f"language {index['language']}, normalisation {index['form']}")
    print(*describe_figures(index["text"]), sep="\n")


def shares(counts: Counter) -> str:
    return ", ".join(f"{name} {n / counts.total():.1%}" for name, n in sorted(counts.items()))
