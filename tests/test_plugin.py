"""Code of the user's own, by `--plugin`: trained with, recorded, asked for again, never unasked."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.command import ROOT, run_on_rank, run_python
from tests.conftest import finish, start_each, train_command
from tests.distributed import run_ranks
from tests.finetuning import draw_sentences

EXAMPLE = ROOT / "tools" / "examples" / "plugin.py"
TASK = EXAMPLE.with_name("plugin_task.py")


def run(*words, ranks: int = 1):
    """A command in new processes, each with the tables as they are installed."""
    return run_ranks(run_on_rank, ranks, [str(word) for word in words])[0]


def refused(*words) -> str:
    done = run(*words)
    assert (done.code, done.err.count("\n")) == (2, 1), done
    return done.err


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    return shutil.copy(EXAMPLE, tmp_path_factory.mktemp("code") / "mine.py")


@pytest.fixture(scope="module")
def command(data, plugin, tmp_path_factory) -> list:
    """Words of a training with a pattern, an optimizer and a term of the loss of the plugin."""
    folder = tmp_path_factory.mktemp("runs")
    ds_config = {
        "optimizer": {"type": "Sign", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 1},
    }
    (folder / "sign.json").write_text(json.dumps(ds_config))
    flags = {"plugin": plugin, "sharing": "ends", "num_layers": 3, "learning_rate": 0.0625}
    flags |= {"warmup_steps": 0, "steps": 2, "save_every": 1, "num_workers": 0}
    words = train_command(data, folder / "run", deepspeed_config=folder / "sign.json", **flags)
    return ["train", *words[2:]]


@pytest.fixture(scope="module")
def trained(command) -> Path:
    done = run(*command, ranks=2)
    assert done.code == 0, done.err
    return Path(command[command.index("--output") + 1])


def test_rows_of_a_plugin_are_trained_with_and_recorded(trained, plugin):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    parts = ("mlm_loss", "sop_loss", "size_loss")
    assert all(row["loss"] == pytest.approx(sum(map(row.get, parts))) for row in lines[:2])
    first, second = (
        load_file(trained / f"checkpoints/step-0000000{step}/weights.safetensors")
        for step in (1, 2)
    )
    assert sum("self_attention.query.weight" in name for name in first) == 2  # blocks of 3 layers
    moved = {name: (second[name] - first[name]).abs() for name in first}
    rate = max(float(x.max()) for x in moved.values())
    assert all(((x - rate).abs() < 1e-6).logical_or(x == 0).all() for x in moved.values())
    config = json.loads((trained / "config.json").read_text())
    assert config["plugin"] == str(plugin)
    assert config["plugin_sha256"] == hashlib.sha256(EXAMPLE.read_bytes()).hexdigest()
    assert (trained / "plugin.py").read_bytes() == EXAMPLE.read_bytes()


def test_who_reads_the_run_is_asked_for_the_plugin(trained, plugin, data, tmp_path):
    """Its copy in RUN is executed only where it is typed; an export needs none of it."""
    reading = [
        ("probe", "--checkpoint", trained, "--data", data, "--samples", 8),
        ("fill-mask", "--checkpoint", trained, "A [MASK] here."),
        ("export", "--checkpoint", trained, "--output", tmp_path / "hf"),
    ]
    for words in reading:
        assert f"had --plugin {plugin}, sha256" in refused(*words)
        done = run(*words, "--plugin", trained / "plugin.py")
        assert (done.code, "differs" in done.err) == (0, False), done.err
    written = "".join(path.read_text() for path in (tmp_path / "hf").glob("*.json"))
    assert "plugin" not in written
    assert run("fill-mask", "--checkpoint", tmp_path / "hf", "A [MASK] here.").code == 0
    other = tmp_path / "other.py"
    other.write_bytes(EXAMPLE.read_bytes() + b"# more\n")
    done = run(*reading[1], "--plugin", other)
    assert done.code == 0 and "the one that is typed differs" in done.err


def test_what_a_file_names_is_not_executed(trained, data, tmp_path):
    """Neither what --config names, nor what a folder of Hugging Face says of itself."""
    evil, ran = tmp_path / "evil.py", tmp_path / "ran"
    evil.write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "flags.yaml").write_text(f"plugin: {evil}\n")
    start = ("train", "--output", tmp_path / "run", "--config")
    assert "plugin: must be typed, not in a file" in refused(*start, tmp_path / "flags.yaml")
    assert "type --plugin as well" in refused(*start, trained / "config.json")
    copied = tmp_path / "copied"
    shutil.copytree(trained, copied)
    record = json.loads((copied / "config.json").read_text())
    record |= {"plugin": str(evil), "plugin_sha256": hashlib.sha256(evil.read_bytes()).hexdigest()}
    (copied / "config.json").write_text(json.dumps(record))
    shutil.copy(evil, copied / "plugin.py")
    assert "type --plugin as well" in refused("fill-mask", "--checkpoint", copied, "A [MASK].")
    unknown = refused("import", "--plugin", evil, "--input", "x", "--output", tmp_path / "y")
    assert "--plugin: no such flag" in unknown
    assert not ran.exists()


def test_a_resumed_run_has_the_same_plugin(trained, command, plugin, tmp_path):
    longer = [*command, "--steps", 3]
    at = longer.index("--plugin")
    without = [*longer[:at], *longer[at + 2 :]]
    assert f"--plugin: must be the one that {trained} was started with" in refused(*without)
    other = tmp_path / "other.py"
    assert f"--plugin {other}: no such file" in refused(*without, "--plugin", other)
    for name in ("", "\udcff", "a\0b"):
        words = ("--plugin", name)
        assert "--plugin " in refused(*without, *words)
        assert "--plugin " in refused("inspect", "--data", "x", *words)
    other.write_bytes(EXAMPLE.read_bytes() + b"# more\n")
    assert "--plugin: must be the one that" in refused(*without, "--plugin", other)
    done = run(*without, "--plugin", trained / "plugin.py")
    assert done.code == 0, done.err
    assert json.loads((trained / "exit.json").read_text())["step"] == 3


def test_all_ranks_have_the_same_plugin(data, tmp_path, capsys):
    commands = []
    for number in (1, 2):
        plugin = tmp_path / f"{number}.py"
        plugin.write_bytes(EXAMPLE.read_bytes() + b"\n" * number)
        commands.append(train_command(data, tmp_path / "run", steps=1, plugin=plugin))
    ranks = start_each(commands)
    assert finish(ranks) == [2, 2]
    said = capsys.readouterr().out
    assert "are not those of rank 0; they must be the same on all ranks" in said
    assert not (tmp_path / "run").exists()


def test_a_head_and_its_task_come_from_a_plugin(checkpoint, tmp_path):
    data, tuned = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for split, count, seed in (("train", 160, 1), ("dev", 40, 2)):
        names = ("class", "type", "string")
        lines = [
            ",".join(name for name in names if name in text.split()) + f"\t{text}"
            for text in draw_sentences(count, seed)
        ]
        (data / f"{split}.txt").write_text("\n".join(lines) + "\n")
    words = ["finetune", "--task", "several", "--data", data, "--checkpoint", checkpoint]
    words += ["--output", tuned, "--dropout", 0, "--seeds", 2]
    assert "--task: invalid choice: 'several'" in refused(*words)
    done = run(*words, "--plugin", TASK)
    assert done.code == 0, done.err
    assert (tuned / "seed-1" / "plugin.py").read_bytes() == TASK.read_bytes()
    members = ["ensemble", "--members", tuned, "--output", tmp_path / "both"]
    assert "must be fine-tuned on one task" in refused(*members)
    done = run(*members, "--plugin", TASK)
    assert done.code == 0 and json.loads(done.out)["dev"]["right"] > 0.5, done.err


WRONG = {
    "raise KeyError('x')": "line 2: KeyError: 'x'",
    "import no_such_module": "line 2: ModuleNotFoundError: No module named 'no_such_module'",
    "raise SystemExit(0)": "line 2: SystemExit: 0",
    "PATTERNS['all'] = row": "line 2: Pattern 'all': is there already; use another name",
    "PATTERNS['x'] = row; PATTERNS |= {'x': row}": "line 2: Pattern 'x': is there already",
    "PATTERNS.update(x=row)": "line 2: TypeError",
    "PATTERNS['x'] = 'all'": "line 2: 'x' 'all': must be of class Pattern",
    "def f(:": "line 2: no Python: invalid syntax",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_plugin_is_one_line(tmp_path, line):
    plugin = tmp_path / "wrong.py"
    head = "from albert_ds.model.sharing import PATTERNS; row = PATTERNS['none']"
    plugin.write_text(f"{head}\n{line}\n")
    said = refuse(plugin, tmp_path)
    assert f"albert-ds: --plugin {plugin}: {WRONG[line]}" in said


def test_what_is_no_python_file_is_one_line(tmp_path):
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    assert ": no Python: " in refuse(tmp_path / "binary.py", tmp_path)
    assert ": not a file" in refuse(tmp_path, tmp_path)
    assert ": no such file" in refuse(tmp_path / "gone.py", tmp_path)


def refuse(plugin: Path, folder: Path) -> str:
    """The one line of a training with this plugin, which leaves nothing behind."""
    words = ("--model", "albert-tiny", "--data", folder, "--output", folder / "run")
    done = run_python("-m", "albert_ds", "train", *words, "--plugin", plugin)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert not (folder / "run").exists()
    return done.stderr
