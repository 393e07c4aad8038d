"""From text, a machine and hours to the commands to type, with their reasons.

A sample of the text becomes a vocabulary and shards, which tell how many tokens the text has. On
this machine's CPU the commands are those of `albert-ds learn`, whose layouts are timed on the
sample. On GPUs they train a size of the paper by the paper's recipe, in the layout and the time
that `albert-ds plan --model` predicts.
"""

import json
import shlex
import signal
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from albert_ds.base.errors import UserError
from albert_ds.base.files import PACKAGE, check_folder
from albert_ds.base.storage import find_files, refuse_within
from albert_ds.model.config import SIZES
from albert_ds.process.world import name_device
from albert_ds.text.encode import BuildConfig
from albert_ds.text.pipeline import build_shards
from albert_ds.text.pool import Pool
from albert_ds.text.sources import Slice, cut_units, read_documents
from albert_ds.text.survey import survey_text
from albert_ds.text.vocabulary import VocabConfig, build_vocab
from albert_ds.vocab.vocab import MODEL_NAME, read_vocab
from albert_lab import small_recipe as small
from albert_lab.scaling.planner import Plan
from albert_lab.scaling.report import DATA, RUN, command_lines, name_config

SAMPLED_UNITS = 8
READ_BYTES = 8 << 20  # of each
SAMPLE_BYTES = 4 << 20  # of all
HELD_OUT_TOKENS = 2_000_000  # at most: 300,000 masked ones tell a fifth of a point
PAPER = ("albert-base", "albert-large", "albert-xlarge", "albert-xxlarge")
LENGTH = 512
PIECES = 30_000
RATE = 0.00176
BATCHES = (512, 1024, 2048, 4096)  # RATE is of the last; it goes with the root (LAMB's Table 4)
# Tokens to see for each weight of the blocks that a pass uses (Hoffmann et al. 2022, of decoders),
# and how often to read the text at most (BERT's 40, Devlin et al. 2018).
TOKENS_A_WEIGHT, READINGS = 20, 40
PROGRAMS = {small.COMMAND: "albert-ds", small.LAUNCHER: "deepspeed", (sys.executable,): "python"}
# Layouts that fit, the one to use first, for flags of `albert-ds plan --model`.
Planner = Callable[[Namespace], list[Plan]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A vocabulary and shards of a sample of the text, and what they tell of all of it."""

    data: Path
    size: float  # bytes of all the text, unpacked
    tokens: float  # of all the text
    sequence: float  # tokens of a sample of training, on average

    @property
    def holdout(self) -> float:
        return float(f"{min(small.choose_holdout(self.size), HELD_OUT_TOKENS / self.tokens):.1g}")

    def tell_reading(self, samples: int) -> str:
        seen = samples * self.sequence
        return f"{_round(seen)} tokens: the text about {seen / self.tokens:.2g} times"


def plan_text(args: Namespace, find_plans: Planner) -> str:
    """The block of commands for args.text, args.hours and args.gpus (None: this CPU).

    Raises UserError for what `vocab` and `shards` would refuse, and where no size suits the GPUs.
    """
    refuse_within(args.output, args.text, "TEXT")
    check_folder(args.output, args.text)
    files = find_files(args.text, "TEXT")
    for number in small.STOPS:
        signal.signal(number, small.stop)
    with TemporaryDirectory(prefix="albert-ds-plan-") as folder:
        pieces, length = (small.PIECES, small.LENGTH) if args.gpus is None else (PIECES, LENGTH)
        sample = take_sample(args, files, Path(folder), pieces, length)
        if args.gpus is None:
            training = train_here(args, sample, Path(folder))
        else:
            training = train_on_gpus(args, sample, find_plans)
    text = small.text_flags(args.text, args.text_field, args.language)
    out = args.output
    nodes = 1 if args.gpus is None else -(-args.gpus // args.gpus_a_node)
    shards = small.shards_command(
        text, _vocab(out), out / "data", holdout=sample.holdout, length=length
    )
    size = f"{_round(sample.size)} bytes and {_round(sample.tokens)} tokens by a sample"
    head = [f"Text: {size}, files: {len(files):,}. Time: {args.hours:g} h of training."]
    held = f"Sequences of {length} tokens; {sample.holdout:.1%} of the documents are held out."
    pieces_of = f"At most {pieces:,} pieces, as the recipe had; little text yields fewer."
    probe = [*small.COMMAND, "probe", "--checkpoint", out / "run", "--data", out / "data"]
    export = [*small.COMMAND, "export", "--checkpoint", out / "run", "--output", out / "hf"]
    report = out / "probe.json"
    parts = [
        _say(*head, "DeepSpeed's JSONs, to edit:"),
        _type([*small.COMMAND, "recipes", "--output", out], out),
        _say(pieces_of),
        _type(small.vocab_command(text, out / "vocab", pieces), out),
        _say(held),
        *_in_pieces(_type(shards, out), nodes),
        *training,
        _say("What it has learned, and the folder for Hugging Face:"),
        _type([*probe, "--output", report], out),
        _type([*export, "--probe", report], out),
    ]
    return "\n".join(parts)


def take_sample(args: Namespace, files: list[str], work: Path, pieces: int, length: int) -> Sample:
    """Make the sample's vocabulary and shards in `work`. Raises what `vocab` and `shards` do."""
    kind = {"language": args.language}
    config = VocabConfig(**kind, text_field=args.text_field)
    units = cut_units(files, args.text_field)
    survey_text(units, config, config.normalisation)
    text = work / "sample.jsonl"
    sampled, size = write_sample(units, args.text_field, text)
    build_vocab([str(text)], work / "vocab", VocabConfig(**kind, vocab_size=pieces))
    made = BuildConfig(**kind, sequence_length=length, holdout=small.HOLDOUT)
    vocab = read_vocab(str(_vocab(work)))
    index, _ = build_shards([str(text)], vocab, work / "data", made, Pool())
    tokens, sequences = (index["counts"][name] for name in ("tokens", "sequences"))
    return Sample(work / "data", size, tokens / sampled * size, tokens / sequences + 3)


def write_sample(units: list[list[Slice]], text_field: str, path: Path) -> tuple[int, float]:
    """Write documents of units spread over the text as JSON lines.

    Returns their bytes, and those of all the text: its size as stored times what the units hold.
    """
    chosen = units[:: -(-len(units) // SAMPLED_UNITS)]
    sampled = text_bytes = stored = 0
    with path.open("w") as file:
        for number, unit in enumerate(chosen, 1):
            done = 0
            for reading in read_documents(unit, text_field):
                text = "\n".join(reading.document.lines)
                text_bytes += len(text.encode())
                if text and sampled < SAMPLE_BYTES * number // len(chosen):
                    file.write(json.dumps({"text": text}) + "\n")
                    sampled += len(text.encode())
                if (done := reading.bytes_read) > READ_BYTES:
                    break
            else:
                done = sum(part.size for part in unit)
            stored += done
    if not sampled:
        raise UserError("TEXT: the files hold no text")
    return sampled, text_bytes / stored * sum(part.size for unit in units for part in unit)


def train_here(args: Namespace, sample: Sample, work: Path) -> list[str]:
    """The training of `albert-ds learn` on this machine, timed on the sample."""
    out = args.output
    small.run(small.start_command(sample.data, work / "start", 0), work / "prepare.log")
    with redirect_stdout(sys.stderr):
        flags = small.recipe(work / "start", 0)
        layout, seconds = small.choose_layout(flags, sample.data, work, args.hours)
    steps = small.fit_steps(args.hours, seconds)
    command = small.trainer(small.recipe(out / "start", 0), layout, out / "data", out / "run")
    command += [*small.schedule(steps), *small.rhythm(steps)]
    more = ", ".join(map(str, small.LARGER))
    size = small.FLAGS
    return [
        _say("Four heads begin at the neighbouring tokens, which a small model finds late:"),
        _type(small.start_command(out / "data", out / "start", 0), out),
        _say(
            f"Size: {size['num-layers']} shared layers of width {size['hidden-size']}, the best of "
            "the trials in hours of a CPU; so are rate, masks and length.",
            f"Batch: {layout.batch}; {more} where the time is enough for {small.LEAST_STEPS:,} "
            f"steps of it, else {small.BATCH}.",
            f"Steps: {small.TRAINING_SHARE:.0%} of the time at {seconds:.3f} s, measured on "
            f"{name_device()} in the fastest layout of those tried.",
            f"They read {sample.tell_reading(steps * layout.batch)}.",
        ),
        f"export OMP_NUM_THREADS={layout.threads}",
        _type(command, out),
    ]


def train_on_gpus(args: Namespace, sample: Sample, find_plans: Planner) -> list[str]:
    """The training of a size of the paper, in the predicted layout and time."""
    plan, steps = choose_size(args, sample, find_plans)
    layout = plan.layout
    out = args.output
    config = name_config(layout)
    names = {DATA: out / "data", RUN: out / "run", config: PACKAGE / config}
    words = " ".join(command_lines(plan, steps, schedules={})).split()
    command = [names.get(word, word) for word in words]
    rate = RATE * (layout.batch_size / BATCHES[-1]) ** 0.5
    command += ["--learning-rate", f"{rate:.3g}", *small.schedule(steps)[2:], *small.rhythm(steps)]
    wanted = _round(TOKENS_A_WEIGHT * count_used(layout.name))
    size = "as asked for" if args.model else "the largest that the time and the text are enough for"
    said = [
        f"Size: {layout.name}, {size}: {TOKENS_A_WEIGHT} tokens to see for each weight that a pass "
        f"uses, {wanted} in all, in at most {READINGS} readings of the text.",
        f"Batch: {layout.batch_size:,}, the largest of {', '.join(map(str, BATCHES))} that gets "
        f"{small.LEAST_STEPS:,} steps, else the least, in multiples of {layout.ranks} GPUs. Rate: "
        f"{RATE} for {BATCHES[-1]:,}, by the root of the batch.",
        f"Steps: {small.TRAINING_SHARE:.0%} of the time at {plan.step.total:.3f} s, PREDICTED and "
        f"not measured, {plan.memory.peak / 1e9:.1f} GB a GPU.",
        f"They read {sample.tell_reading(steps * layout.batch_size)}.",
    ]
    if layout.nodes > 1:
        slots = f"`NAME slots={layout.ranks_a_node}`"
        said.append(f"HOSTFILE has a line {slots} for each of the {layout.nodes} nodes.")
    if args.price is not None:
        cost = args.hours * layout.ranks * args.price
        said.append(
            f"Price: {args.hours:g} h x {layout.ranks} GPUs x {args.price:g} = {cost:,.2f}."
        )
    return [_say(*said), _type(command, out)]


def choose_size(args: Namespace, sample: Sample, find_plans: Planner) -> tuple[Plan, int]:
    """The largest size that the time and the text are enough for, or --model; and its steps."""
    for name in [args.model] if args.model else reversed(PAPER):
        try:
            plan, steps = choose_batch(args, name, find_plans)
        except UserError:  # the smallest size says what is wrong
            if name in (args.model, PAPER[0]):
                raise
            continue
        seen = steps * plan.layout.batch_size * sample.sequence
        enough = min(seen, READINGS * sample.tokens)
        if args.model or enough >= TOKENS_A_WEIGHT * count_used(name):
            return plan, steps
    raise UserError(
        f"--gpus {args.gpus}: {_round(enough)} tokens, in {args.hours:g} h and {READINGS} readings "
        f"at most of the text, are too few for {name}, which wants "
        f"{_round(TOKENS_A_WEIGHT * count_used(name))}; allowed: without --gpus a small model, "
        "more text or hours, or a size by --model"
    )


def choose_batch(args: Namespace, name: str, find_plans: Planner) -> tuple[Plan, int]:
    """The layout and the steps with the largest batch that gets enough steps, else the least."""
    batches = [batch - batch % args.gpus for batch in BATCHES if batch >= args.gpus]
    if not batches:
        most = f"more than the {BATCHES[-1]:,} samples of the largest batch"
        raise UserError(f"--gpus {args.gpus}: {most}")
    model = {"model": name, "sequence_length": LENGTH, "steps": 1}
    for batch in reversed(batches):
        plan = find_plans(Namespace(**vars(args) | model | {"batch_size": batch}))[0]
        steps = small.fit_steps(args.hours, plan.step.total)
        if steps >= small.LEAST_STEPS:
            break
    return plan, steps


def count_used(name: str) -> int:
    """Weights of the blocks that a pass uses: a shared one counts once a layer."""
    h = SIZES[name].hidden_size
    f = SIZES[name].ffn_size
    return SIZES[name].num_layers * (4 * h * h + 2 * h * f)


def _vocab(folder: Path) -> Path:
    return folder / "vocab" / MODEL_NAME


def _in_pieces(shards: str, nodes: int) -> list[str]:
    """The build by the processors of one node, or a piece of it by each of several."""
    processes = ' \\\n    --processes "$(nproc)"'
    if nodes == 1:
        return [shards + processes]
    return [
        _say("Each piece on a node of its own, or one after the other:"),
        f'for piece in $(seq {nodes}); do\n{shards}{processes} --piece "$piece/{nodes}"\ndone',
        f"{shards}{processes} --join",
    ]


def _say(*reasons: str) -> str:
    return "\n".join(
        textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="#   ") for text in reasons
    )


def _type(words: Sequence[object], output: Path) -> str:
    """A command as it is typed, in lines, with DeepSpeed's JSON of `albert-ds recipes`."""
    jsons, copies = (str(folder / "ds_configs") for folder in (PACKAGE, output))
    typed = [str(word).replace(jsons, copies) for word in words]
    for words, name in PROGRAMS.items():
        if tuple(typed[: len(words)]) == words:
            typed[: len(words)] = [name]
    lines: list[str] = [""]
    for group in _groups(typed):
        if len(lines[-1]) + len(group) > 96:
            lines.append("   ")
        lines[-1] += f" {group}"
    return " \\\n".join(lines).strip()


def _groups(words: Iterable[str]) -> list[str]:
    """Each flag with its values."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return [shlex.join(group) for group in groups]


def _round(number: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.0f}"
