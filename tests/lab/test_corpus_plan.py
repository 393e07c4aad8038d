"""`albert-ds plan TEXT`: the block of commands, its rules, and what is refused."""

import gzip
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
from albert_lab import corpus_plan, small_recipe
from albert_lab.commands.scaling_model import build_parser, choose_plans
from albert_lab.corpus_plan import Sample, choose_size, write_sample

from albert_ds.base.errors import UserError
from albert_ds.commands.names import COMMANDS
from albert_ds.settings import pretrain
from albert_ds.text.sources import cut_units
from tests.command import run_bash, run_command, run_program

PROGRAMS = ("albert-ds", "deepspeed", "python")


def plan(*words) -> str:
    done = run_command("plan", *words)
    assert done.code == 0, done.err
    return done.out


def list_commands(block: str, tmp_path: Path) -> list[list[str]]:
    """The words of each command of a block, which bash expands."""
    stand_ins = [f'{name}() {{ printf "%q " {name} "$@"; echo; }}' for name in PROGRAMS]
    script = tmp_path / "block.sh"
    script.write_text("\n".join([*stand_ins, block]))
    done = run_bash("-eu", script)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def parse(words: list[str]):
    """What the command's own parser makes of its words."""
    program, name, *flags = words
    if program == "albert-ds" and name != "train":
        modules = {known: row[0] for rows in COMMANDS.values() for known, row in rows.items()}
        flags = [name, *flags] if name == "export" else flags
        return import_module(modules[name]).build_parser().parse_args(flags)
    module = {"python": "albert_lab.neighbours", "deepspeed": "albert_ds.train"}.get(program)
    at = words.index(module) + 1 if module else 2
    return pretrain.build_parser().parse_args(words[at:])


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # a vocabulary, shards, two starts of the trainer at full size
def test_the_block_of_a_cpu_runs_as_printed(text_file, tmp_path, monkeypatch):
    """On a machine that takes half a minute for a step, so that the run has the fewest steps."""
    monkeypatch.setattr(small_recipe, "measure", lambda flags, layout, *rest: layout.batch)
    block = plan(text_file, "--hours", 0.1, "--output", "it is here")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    (tmp_path / "block.sh").write_text(block)
    done = run_program("bash", "-e", tmp_path / "block.sh", cwd=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "it is here"
    record = json.loads((out / "run" / "exit.json").read_text())
    assert record["code"] == 0 and record["step"] == 20
    assert json.loads((out / "hf" / "config.json").read_text())["model_type"] == "albert"
    assert json.loads((out / "probe.json").read_text())["heldout_mlm_loss"] > 0
    # Nothing of it runs twice over what is there.
    again = run_program("bash", "-e", tmp_path / "block.sh", cwd=tmp_path, PATH=path)
    assert again.returncode == 2 and "holds spiece.model" in again.stderr.splitlines()[-1]


@pytest.mark.parametrize(("hours", "batch"), [(3.4, 32), (3.5, 64), (7, 128)])
def test_a_cpu_gets_what_learn_would_train(text_file, tmp_path, monkeypatch, hours, batch):
    """At a second for 32 sequences; the steps of learn take 96 % of the hours."""
    monkeypatch.setattr(small_recipe, "measure", lambda flags, layout, *rest: layout.batch / 32)
    commands = list_commands(plan(text_file, "--hours", hours, "--output", "out"), tmp_path)
    names = [words[1] if words[0] == "albert-ds" else words[0] for words in commands]
    assert [*names[:4], *names[-2:]] == "recipes vocab shards python probe export".split()
    vocab, shards, start, train = map(parse, commands[1:5])
    assert (vocab.vocab_size, shards.sequence_length, shards.holdout) == (12_000, 128, 0.1)
    assert (train.batch_size, train.steps) == (batch, int(hours * 3600 * 0.96 / (batch / 32)))
    assert (train.masked_fraction, train.learning_rate) == (0.3, 0.003)
    assert (start.hidden_size, start.num_layers) == (256, 3)
    assert str(train.init_from) == str(start.output) and train.data == start.data == ["out/data"]


@pytest.mark.parametrize("gpus", [1, 8, 32])
def test_the_block_of_gpus_is_one_that_the_commands_take(text_file, tmp_path, gpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--model", "albert-large", "--gpus", gpus, "--link", 100, "--hours", 24)
    block = plan(text_file, *flags, "--output", "a b", "--price", 2.5)
    commands = list_commands(block, tmp_path)
    (tmp_path / "a b").mkdir()
    parsed = list(map(parse, commands))
    (train,) = (
        each for words, each in zip(commands, parsed, strict=True) if "albert_ds.train" in words
    )
    assert train.size == "albert-large" and train.output == "a b/run"
    assert train.learning_rate == pytest.approx(
        0.00176 * (train.batch_size / 4096) ** 0.5, rel=1e-2
    )
    assert train.warmup_steps == train.steps // 40
    shards = [each for words, each in zip(commands, parsed, strict=True) if words[1] == "shards"]
    nodes = max(1, gpus // 8)
    pieces = [f"{each.piece.number}/{each.piece.of}" for each in shards if each.piece]
    assert pieces == [f"{n}/{nodes}" for n in range(1, nodes + 1)] * (nodes > 1)
    assert {each.sequence_length for each in shards} == {512}
    assert f"Price: 24 h x {gpus} GPUs x 2.5 = {60 * gpus:,.2f}." in block
    # The steps are those that `plan --model` predicts the time for.
    layout = ("--batch-size", train.batch_size, "--micro-batch-size", train.micro_batch_size)
    words = ("--model", "albert-large", "--gpus", gpus, "--link", 100, "--steps", train.steps)
    hours = re.search(r"hours for .*? \| ([\d.]+)", plan(*words, *layout))[1]
    assert float(hours) == pytest.approx(0.96 * 24, rel=0.01)


def choose(tokens: float, *flags) -> tuple[str, int]:
    words = ["plan", "text", *map(str, flags)]
    args = build_parser().parse_args(words)
    sample = Sample(Path("data"), 4 * tokens, tokens, 500)
    best, _ = choose_size(args, sample, lambda given: choose_plans(given)[0])
    return best.layout.name.removeprefix("albert-"), best.layout.batch_size


def test_the_size_is_the_largest_that_text_and_time_are_enough_for():
    """Twenty tokens for each weight: 1.7, 6.0, 24 and 48 G; of the text forty readings."""
    week = ("--hours", 168, "--gpus", 64, "--link", 400)
    sizes = [choose(tokens, *week)[0] for tokens in (0.05e9, 0.2e9, 0.7e9, 1.3e9, 1e12)]
    assert sizes == ["base", "large", "xlarge", "xxlarge", "xxlarge"]
    assert [choose(1e12, "--hours", h, "--gpus", 8)[0] for h in (0.5, 4, 40)] == [
        "base",
        "large",
        "xlarge",
    ]
    assert choose(1e12, "--hours", 0.5, "--gpus", 8)[1] < choose(1e12, *week)[1] == 4096
    assert choose(1e12, "--hours", 40, "--gpus", 6, "--model", "albert-base")[1] % 6 == 0
    with pytest.raises(
        UserError, match="--gpus 8: 400 M tokens, in 168 h .* albert-base, .* 1.7 G"
    ):
        choose(1e7, "--hours", 168, "--gpus", 8)


def test_a_sample_tells_the_size_of_large_and_packed_text(text_file, tmp_path):
    text = text_file.read_bytes() + b"\n\n"
    whole = sum(len(line.strip()) for line in text.split(b"\n")) + text.count(b"\n\n")
    (tmp_path / "large.txt").write_bytes(100 * text)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(100 * text, 1))
    for name in ("large.txt", "packed.txt.gz"):
        units = cut_units([str(tmp_path / name)])
        sampled, size = write_sample(units, "text", tmp_path / "sample")
        assert size == pytest.approx(100 * whole, rel=0.05)
        assert sampled <= corpus_plan.SAMPLE_BYTES + (1 << 17)


def test_text_that_learn_refuses_is_refused(tmp_path):
    texts = {
        "blank": (b" \n\n", "TEXT: the files hold no text"),
        "latin": ("Grüße aus Köln.\n\n".encode("latin-1") * 99, "not UTF-8; it looks like"),
        "greek": ("Καλημέρα σας.\n\n".encode() * 99, "--language en: 0% of the letters"),
    }
    for name, (content, says) in texts.items():
        (tmp_path / name).write_bytes(content)
        done = run_command("plan", tmp_path / name)
        assert (done.code, done.out) == (2, "") and says in done.err, done.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("no-such",), "TEXT no-such: matches no file"),
        (("{text}", "--output", "{folder}"), "--output .*: holds the input .*text.txt"),
        (("{text}", "--steps", 9), "--steps: not with TEXT"),
        (("{text}", "--link", 100), "--link: only with --gpus"),
        (("{text}", "--price", 2), "--price: only with --gpus"),
        (("{text}", "--gpus", 16), "arguments are required: --link"),
        (
            ("{text}", "--gpus", 5000, "--link", 9, "--gpus-a-node", 1),
            "--gpus 5000: more than the 4",
        ),
        (
            ("{text}", "--gpus", 8, "--model", "albert-tiny"),
            "--model albert-tiny: must be, with TEXT",
        ),
        (("{text}", "--gpus", 8, "--hardware", "v100"), "--hardware v100: no such file"),
        (("{text}", "--gpus", 8, "--gpu-memory", 0.1), "--gpu-memory: no layout fits"),
        (("{text}", "--hours", 0), "--hours 0: must be above 0"),
        (("--price", 2, "--model", "albert-base"), "--price: only with TEXT"),
        (("--model", "albert-base", "--gpus", 8), "arguments are required: --link, --steps"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, text_file, flags, says):
    (tmp_path / "text.txt").write_bytes(text_file.read_bytes()[:100_000])
    names = {"{text}": tmp_path / "text.txt", "{folder}": tmp_path}
    done = run_command("plan", *(names.get(word, word) for word in flags))
    lines = [line for line in done.err.splitlines() if "warning" not in line]
    assert done.code == 2 and not done.out and len(lines) == 1, done.err
    assert re.search(says, lines[0]), done.err
