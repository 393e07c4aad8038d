"""A small model in the time given: the commands it runs, and the whole of it once."""

import json
import re
import shlex
import signal
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import IO, cast

import psutil
import pytest
from albert_lab import neighbours, small_recipe
from albert_lab.commands import learn
from albert_lab.commands.learn import build_parser, flags_of, read_last_step
from albert_lab.small_recipe import (
    LOGGED_STEPS,
    MEASURED_STEPS,
    SIZE,
    Layout,
    choose_holdout,
    choose_layout,
    trainer,
)

from albert_ds.base.errors import UserError
from albert_ds.settings.pretrain import read_config
from tests.command import ROOT, run_command, run_python
from tests.data.corpus import SHARED
from tests.distributed import wait_for
from tests.finetuning import write_checkpoint


def parse(*flags: str) -> Namespace:
    return build_parser().parse_args(["--text", "text", "--output", "out", *flags])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_trainer_takes_the_recipe(data, tmp_path, ranks, precision):
    layout = Layout(ranks, 1, f"ds_configs/zero1_{precision}_muon.json", batch=64)
    words = trainer(flags_of(parse()), layout, data, tmp_path / "run")
    assert words[0] == sys.executable  # deepspeed need not be in PATH
    flags = words[words.index("--dropout") :]
    flags[flags.index("--sequence-length") + 1] = "64"  # of these shards
    flags += ["--steps", "100"]
    at = flags.index("--init-from")
    assert flags[at : at + 2] == ["--init-from", "out/start"]
    flags[at : at + 2] = []
    start = str(tmp_path / "start")
    alone = [*flags, *Layout(1, 1, layout.ds_config).flags, *SIZE, "--output", start]
    neighbours.main(alone)
    config = read_config([*flags, "--init-from", start], world_size=ranks)[0]
    assert config.batch_size == 64 and config.micro_batch_size == 64 // ranks
    assert config.deepspeed["optimizer"]["type"] == "Muon" and config.learning_rate == 0.003
    assert config.model.embedding_size == 256
    assert config.rate_at(99) < 0.02 * max(map(config.rate_at, range(100)))


def test_more_hours_begin_with_the_weights_and_other_masks():
    again = flags_of(parse("--init-from", "run"))
    assert again[-4:] == ["--init-from", "run", "--seed", "1"]
    assert not {*SIZE} & {*again}  # the weights have a size
    assert flags_of(parse("--init-from", "run", "--seed", "2"))[-1] == "2"


def test_more_hours_take_the_vocabulary_of_the_weights(tmp_path):
    text = tmp_path / "text"
    text.write_text("Some text.\n")
    command = ["--text", str(text), "--output", str(tmp_path / "learn"), "--init-from", "run"]
    with pytest.raises(UserError, match="--vocab-size: not with --init-from"):
        learn.main([*command, "--vocab-size", "2000"])


def test_the_speed_is_the_mean_of_the_second_half_of_the_trial(data, tmp_path, monkeypatch):
    seconds = [9.0, *[4.0] * 4, *[2.0] * 3, *[3.0] * 2]  # the first half warms up

    def fake_run(command, log, threads):
        run = Path(command[command.index("--output") + 1])
        run.mkdir()
        ends = range(LOGGED_STEPS, MEASURED_STEPS + 1, LOGGED_STEPS)
        records = [{"step": e, "step_seconds": s} for e, s in zip(ends, seconds, strict=True)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))

    monkeypatch.setattr(small_recipe, "run", fake_run)
    layout = Layout(1, 1, "ds_configs/zero1_fp32_muon.json")
    assert small_recipe.measure([], layout, data, tmp_path) == pytest.approx((3 * 2 + 2 * 3) / 5)


@pytest.mark.parametrize(
    ("hours", "batch"), [(0.1, 32), (3.4, 32), (3.5, 64), (6.8, 64), (7.0, 128), (100, 128)]
)
def test_a_larger_batch_only_with_six_thousand_steps(hours, batch, data, tmp_path, monkeypatch):
    """At a second for 32 sequences 6,000 steps of 64 take 12,000 s, 96 % of 3.47 hours."""
    monkeypatch.setattr(small_recipe, "measure", lambda *given: given[1].batch / 32)
    layout, seconds = choose_layout([], data, tmp_path, hours)
    assert (layout.batch, seconds) == (batch, batch / 32)
    monkeypatch.undo()
    assert choose_layout([], data, tmp_path, hours) == (layout, seconds)  # the run goes on


def test_trials_wait_for_those_of_a_killed_command(data, tmp_path, monkeypatch):
    trial = ["--output", str(tmp_path / "trials" / "1x1-zero1_fp32_muon-32")]
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)", *trial])
    ended = []

    def fake_run(command, log, threads):
        ended.append(orphan.poll())
        raise UserError("train ended with 2; see log: --output run: in use by process 9 on node")

    monkeypatch.setattr(small_recipe, "run", fake_run)
    with pytest.raises(UserError, match="in use by process 9"):  # no word about the layout
        choose_layout([], data, tmp_path, 1)
    assert ended == [0] and not (tmp_path / "layout.json").exists()


def test_the_line_a_minute_says_what_is_left(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("pretraining: 0 of 9 steps done\n")
    assert read_last_step(log) == "no step yet"
    newest = "step  4 of 9  mlm  6.5  9.2%  left   10 s"
    log.write_text(f"step  2 of 9  left  20 s\n{newest}\nstep  4 of 9  mlm  6.4  held out\n")
    assert read_last_step(log) == newest


def test_other_text_or_settings_are_refused(tmp_path):
    """What is there would be taken for theirs: the vocabulary is the first thing made."""
    text, out = tmp_path / "text", tmp_path / "learn"
    text.write_text("Some text.\n")
    command = ["--text", str(text), "--output", str(out), "--vocab-size"]
    with pytest.raises(UserError, match="vocab ended with 2; see .*prepare.log: .*[Vv]ocab"):
        learn.main([*command, "5"])  # its own error, not the machine's
    with pytest.raises(UserError, match="--vocab-size 6: "):  # nothing was made: begun anew
        learn.main([*command, "6"])
    with pytest.raises(UserError, match="--vocab-size 5: "):
        learn.main([*command, "5"])
    (out / "vocab").mkdir()
    with pytest.raises(UserError, match="--vocab-size: was 5, but .*learn was begun with it"):
        learn.main([*command, "6"])
    with pytest.raises(UserError, match="--text-field: was text, but .*learn was begun with it"):
        learn.main([*command, "5", "--text-field", "body"])
    pairs = [tmp_path / "pairs", tmp_path / "others"]
    for folder in pairs:
        folder.mkdir()
        (folder / "a.jsonl").write_text('{"sentence_good": "a b", "sentence_bad": "b a"}\n')
    # What was not measured may be; what was stands in the report.
    for given in (["--minimal-pairs", str(pairs[0])], []):
        with pytest.raises(UserError, match="vocab ended with 2"):
            learn.main([*command, "5", *given])
    with pytest.raises(UserError, match="--minimal-pairs: was .*/pairs, but "):
        learn.main([*command, "5", "--minimal-pairs", str(pairs[1])])
    text.write_text("Some other text.\n")
    with pytest.raises(UserError, match="--text: the text has changed"):
        learn.main([*command, "5"])


def test_more_seeds_are_more_runs(tmp_path, monkeypatch):
    """`finetune` knows what is done, and whether of these data."""

    def fake_run(command, log, threads):
        words = [str(word) for word in command]
        output, runs = (words[words.index(flag) + 1] for flag in ("--output", "--seeds"))
        Path(output).mkdir(parents=True, exist_ok=True)
        values = {"accuracy": {"values": [*range(int(runs))]}}
        (Path(output) / "results.json").write_text(json.dumps({"dev": values}))

    monkeypatch.setattr(learn, "run", fake_run)
    (tmp_path / "RTE").mkdir()
    for runs in (3, 5):
        args = parse("--tasks", str(tmp_path), "--seeds", str(runs))
        args.output = tmp_path / "out"
        (row,) = learn.fine_tune(args, tmp_path, Layout(1, 1, "ds_configs/zero1_fp32_muon.json"))
        assert f".. {runs - 1}.000)" in row[1]


def test_text_may_be_a_folder_of_tables_or_a_pattern(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.csv").write_text("id,body\n1,Some text.\n2,More.\n")
    command = ["--text", str(tmp_path / "corpus"), "--output", str(tmp_path / "learn")]
    with pytest.raises(UserError, match="a.csv: has no column 'text'; it has id, body; --text-f"):
        learn.main(command)
    with pytest.raises(UserError, match="vocab ended with 2; see .*: --vocab-size 10"):
        learn.main([*command, "--text-field", "body", "--vocab-size", "10"])
    command[1] = f"{tmp_path}/corpus/*.csv"
    with pytest.raises(UserError, match="vocab ended with 2; see .*: --vocab-size 10"):
        learn.main([*command, "--text-field", "body", "--vocab-size", "10"])
    (tmp_path / "learn" / "vocab").mkdir()
    (tmp_path / "corpus" / "b.csv").write_text("id,body\n3,Another text.\n")
    with pytest.raises(UserError, match="--text: the text has changed"):
        learn.main([*command, "--text-field", "body", "--vocab-size", "10"])


def test_what_is_missing_is_said_before_hours_of_work(vocab, tmp_path):
    (tmp_path / "text").write_text("Some text.\n")
    (tmp_path / "empty").mkdir()
    short = write_checkpoint(tmp_path / "short", vocab, max_position_embeddings=127)
    command = ["learn", "--output", tmp_path / "none", "--text"]
    for given, said in (
        ([f"{tmp_path}/*.txt"], "--text .*/[*].txt: matches no file"),
        ([tmp_path / "empty"], "--text .*/empty: matches no file"),
        (
            [tmp_path / "text", "--minimal-pairs", tmp_path / "no"],
            "--minimal-pairs .*/no: no .*jsonl",
        ),
        (
            [tmp_path / "text", "--tasks", tmp_path / "empty"],
            "--tasks .*: has none of .* CoLA, SST-2",
        ),
        ([tmp_path / "text", "--init-from", short], "--init-from .*: has 127 positions; must be"),
        ([tmp_path / "text", "--seed", 1 << 63], "--seed .*: must be at least 0 and at most"),
        ([tmp_path / "text", "--seeds", 10_001], "--seeds .*: must be at least 1 and at most"),
    ):
        done = run_command(*command, *given)
        assert done.code == 2 and re.search(said, done.err), done.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_do_not_share_a_folder_and_a_stopped_one_goes_on(text_file, tmp_path, number):
    out = tmp_path / "learn"
    command = ["tools/learn.py", "--text", str(text_file), "--hours", "0.01"]
    command += ["--vocab-size", "2000", "--output", str(out)]
    started = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, *command], **started)
    try:
        wait_for((out / "prepare.log").exists, "the first command")
        second = run_python(*command)
        assert second.returncode == 2 and f"in use by process {first.pid}" in second.stderr
        process = psutil.Process(first.pid)
        children = wait_for(lambda: process.children(recursive=True), "one of its commands")
        first.send_signal(number)
        _, err = first.communicate(timeout=240)
        assert first.returncode == 75 and "the same command continues" in err
        assert not psutil.wait_procs(children, timeout=240)[1]
    finally:
        first.kill()


STOP = """
import subprocess
from albert_lab.small_recipe import Stopped, stop
launcher = "sleep 5 >/dev/null 2>&1 & echo $!; exec sleep 100"
print(subprocess.Popen(["sh", "-c", launcher], stdout=subprocess.PIPE).stdout.readline().decode())
try:
    stop(15, None)
except Stopped:
    pass
"""


def test_a_stop_waits_for_what_outlives_its_launcher():
    """The same command, given at once, would find the run in use."""
    done = subprocess.run([sys.executable, "-c", STOP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not psutil.pid_exists(int(done.stdout))


@pytest.mark.nightly
@pytest.mark.timeout(2400)  # four trials of 40 steps at full size come first
def test_text_becomes_a_report_and_the_command_can_be_given_again(text_file, tmp_path):
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    pair = {"sentence_good": "The class is a name.", "sentence_bad": "The is class a name."}
    (pairs / "order.jsonl").write_text(json.dumps(pair) + "\n")
    begin = ("tools/learn.py", "--text", text_file, "--hours", "0.005", "--output")
    command = (*begin, tmp_path / "learn", "--vocab-size", "2000", "--minimal-pairs", pairs)
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "learn" / "report.md").read_text()
    assert report in done.stdout
    for words in ("MLM accuracy", "SOP accuracy", "| order |", "--learning-rate 0.003"):
        assert words in report
    (typed,) = re.findall("^    albert-ds train (.*)", report, re.MULTILINE)
    config = read_config(shlex.split(typed)[:-1] + [str(tmp_path / "again")], world_size=1)[0]
    assert config.data == [str(tmp_path / "learn" / "data")]
    weights = tmp_path / "learn" / "run" / "checkpoints" / "latest"
    before = weights.stat().st_mtime_ns
    again = run_python(*command)
    assert again.returncode == 0 and (tmp_path / "learn" / "report.md").read_text() == report
    assert weights.stat().st_mtime_ns == before
    done = run_python(*begin, tmp_path / "more", "--init-from", tmp_path / "learn" / "run")
    assert done.returncode == 0, done.stderr
    shards = [tmp_path / folder / "data" / "index.json" for folder in ("learn", "more")]
    vocabularies = [json.loads(path.read_text())["vocab_sha256"] for path in shards]
    assert vocabularies[0] == vocabularies[1]
    losses = [json.loads((tmp_path / f / "probe.json").read_text()) for f in ("learn", "more")]
    assert losses[1]["heldout_mlm_loss"] < losses[0]["heldout_mlm_loss"]


@pytest.mark.parametrize(
    ("size", "share"), [(0, 0.02), (1, 0.1), (10**6, 0.1), (2_500_000, 0.04), (10**7, 0.02)]
)
def test_more_of_little_text_is_held_out(size, share):
    """About 20,000 tokens, up to a tenth; never less than two hundredths."""
    assert choose_holdout(size) == share


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("code", ["ko", "vi"])
def test_one_megabyte_of_a_language_is_learned_from(tmp_path, code):
    """With a vocabulary as large as the text gives, to more than the most frequent piece."""
    packed = SHARED / "languages.tar.xz"
    if not packed.is_file():
        pytest.skip(f"no real text: {packed} is absent")
    with tarfile.open(packed, "r:xz") as tar:
        content = cast(IO[bytes], tar.extractfile(f"languages/{code}.txt")).read(1_000_000)
    (tmp_path / "text").write_text(content.decode(errors="ignore"))
    words = ("--text", tmp_path / "text", "--language", code, "--hours", 0.05)
    done = run_python("tools/learn.py", *map(str, words), "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "all that this text yields of --vocab-size 12000" in done.stdout
    assert "bytes: 9" in done.stdout
    row = r"^\| (?:MLM accuracy|always guessing .*?) \| ([\d.]+) \| .*? \| (\d+)"
    (learned, masked), (guessed, _) = re.findall(row, done.stdout, re.M)
    assert float(learned) > float(guessed) and int(masked) > 300, done.stdout
