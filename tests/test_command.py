"""One command for everything: what it finds, says, writes and imports; the --help of each."""

import argparse
import runpy
import sys
import sysconfig

import pytest

from albert_ds.__main__ import COMMANDS, main, run
from albert_ds.base.cli import Parser, Range, flags_of, require
from albert_ds.base.errors import UserError
from albert_ds.commands import path, recipes
from albert_ds.settings.pretrain import RunConfig, build_parser
from tests.command import ROOT, run_python
from tests.conftest import train_command
from tools.lab.docs_hook import as_reference, list_actions

BENCHMARK = str(ROOT / "docs/raw/bench_base_2.json")


@pytest.mark.parametrize(("argv", "says"), [(["vocabs"], "'vocabs'"), ([], "COMMAND")])
def test_a_wrong_command_is_one_line(argv, says):
    with pytest.raises(UserError, match=says) as error:
        main(argv)
    assert "\n" not in str(error.value)


def test_every_tool_of_a_clone_is_a_command():
    modules = {module for commands in COMMANDS.values() for module, _ in commands.values()}
    for tool in (ROOT / "tools").glob("*.py"):
        started = {m for m in modules if f'start("{m}")' in tool.read_text()}
        assert len(started) == 1 and tool.read_text().count("\n") < 10, tool


def test_where_the_files_are(capsys):
    for name, place in (("train", "albert_ds/train.py"), ("slurm", "slurm")):
        path.main([name])
        assert (ROOT / place).samefile(capsys.readouterr().out.strip())


def test_recipes_are_written_and_never_replaced(tmp_path, capsys):
    recipes.main(["--output", str(tmp_path / "new")])
    for file in ("slurm/base.sh", "slurm/site.env.example", "ds_configs/zero1_bf16.json"):
        assert (tmp_path / "new" / file).read_bytes() == (ROOT / file).read_bytes()
    recipes.main(["--output", str(tmp_path / "new")])
    edited = tmp_path / "new" / "slurm" / "base.sh"
    edited.write_text("mine")
    (tmp_path / "new" / "slurm" / "common.sh").unlink()
    with pytest.raises(UserError, match="base.sh: is there already and differs"):
        recipes.main(["--output", str(tmp_path / "new")])
    assert edited.read_text() == "mine" and not edited.with_name("common.sh").exists()


def test_a_missing_extra_is_one_line_that_says_how_to_get_it(tmp_path):
    """In a process that has no extra at all: what a plain installation lacks."""
    extras = ("mpi4py", "matplotlib", "wandb", "s3fs", "transformers", "huggingface_hub")
    script = (
        "import sys, importlib.util as u\n"
        f"find = u.find_spec; lacking = {[*extras, 'nervaluate']}\n"
        "u.find_spec = lambda name, *a: None if name in lacking else find(name, *a)\n"
        "from albert_ds.__main__ import run\n"
        "run()\n"
    )
    folder = str(tmp_path)
    tagger = ["finetune", "--task", "tokens", "--data", folder, "--checkpoint", folder]
    for words, extra in (
        (["plots", "traffic", "--input", BENCHMARK, "--output", f"{folder}/x.png"], "plots"),
        ([*tagger, "--output", f"{folder}/out"], "ner"),
        (["vocab", "--input", "s3://bucket/x", "--output", folder], "s3"),
    ):
        done = run_python("-c", script, *words)
        assert done.returncode == 2 and f"pip install 'albert-ds[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    with pytest.raises(UserError, match=r"--x: the package absent_x is .*'albert-ds\[y\]'"):
        require("absent_x", "y", "--x")


PROGRAM = """
import sys
from albert_ds.train import main
code = main(sys.argv[1:])
print("imported:", [name for name in NAMES if name in sys.modules])
sys.exit(code)
"""
NAMES = ("torch._dynamo", "torch._inductor", "functorch.compile", "megatron")


def test_a_training_imports_neither_torchs_compiler_nor_megatron(data, tmp_path):
    words = train_command(data, tmp_path / "run", steps=1)[2:]
    done = run_python("-c", PROGRAM.replace("NAMES", repr(NAMES)), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"


def test_every_tool_starts_where_only_the_dependencies_are_installed():
    # -S: no .pth file is read, so an editable installation of the project is not found.
    environ = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    for tool in sorted((ROOT / "tools").glob("*.py")):
        done = run_python("-S", tool, "--help", cwd="/", **environ)
        assert done.stdout.startswith(f"usage: {tool.name} "), done.stderr


TRAINERS = ["albert-ds train", "albert-ds finetune"]
USERS = ["albert-ds", *(f"albert-ds {name}" for group in COMMANDS.values() for name in group)]
# Not for one day of one GPU, nor the examples, which are to be copied and take plain argparse.
OTHERS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tools").glob("*/*.py"))
    if path.parent.name not in ("gpu_kit", "examples") and "Parser(" in path.read_text()
]
ALL = USERS + OTHERS


def parser_of(command: str, monkeypatch) -> Parser:
    """The parser that prints the command's --help."""
    asked = []
    program, *words = [*command.split(), "--help"]
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.setattr(Parser, "print_help", lambda parser, file=None: asked.append(parser))
    with pytest.raises(SystemExit) as ending:
        run() if program == "albert-ds" else runpy.run_path(program, run_name="__main__")
    assert not ending.value.code and len(asked) == 1
    return asked[0]


def faults_of(action: argparse.Action) -> list[str]:
    """What --help leaves unsaid about one argument."""
    text = action.help or ""
    meaning = text.partition("(default:")[0].strip()
    faults = [] if len(meaning) > 3 else ["does not say what it does"]
    if not action.option_strings:
        return faults
    is_number = isinstance(action.type, Range) or action.type in (int, float)
    has_default = action.default not in (None, argparse.SUPPRESS) or "default:" in text
    if is_number and action.metavar is None:
        faults.append("does not say its unit")
    if is_number and not has_default and not action.required:
        faults.append("does not say its default")
    if "None)" in text or "(default: )" in text:
        faults.append("has an empty default")
    return faults


def test_help_says_what_each_flag_does_its_unit_and_its_default(monkeypatch):
    for command in ALL:
        parser = parser_of(command, monkeypatch)
        faults = {
            "/".join(action.option_strings) or action.dest: action_faults
            for action in list_actions(parser)
            if (action_faults := faults_of(action))
        }
        assert not faults, command
        shown = " ".join(parser.format_help().split())
        # No "(default: [...": a list stands as it is typed.
        for wrong in ("%(", str(ROOT), "(default: [", "(default: ("):
            assert wrong not in shown, command


def test_a_list_may_be_typed_in_parts(monkeypatch):
    """Of every command, every flag that takes one: its lists add up, in place of the default."""
    names = set()
    for command in ALL:
        for action in list_actions(parser_of(command, monkeypatch)):
            if action.nargs not in ("+", "*") or not action.option_strings:
                continue
            value = next(iter(action.choices)) if action.choices else "1"
            typed = action.option_strings[-1]
            lone = Parser(add_help=False)
            lone._add_action(action)
            once = lone.parse_args([typed, value, value, value])
            assert lone.parse_args([typed, value, value, typed, value]) == once, (command, typed)
            assert len(getattr(once, action.dest)) == 3
            names.add(f"{command} {typed}")
    assert {f"albert-ds {name}" for name in LISTS} <= names


LISTS = ("shards --input", "vocab --input", "train --data", "train --data-weights")
LISTS += ("ensemble --members", "learn --text")


def test_help_answers_without_heavy_libraries():
    heavy = {"torch", "deepspeed", "megatron", "transformers", "webdataset", "scipy", "pandas"}
    heavy |= {"matplotlib", "sklearn", "datasets", "pyarrow", "PIL"}
    for command in USERS:
        slow = heavy | {"numpy"} if command in TRAINERS else heavy
        script = (
            f"import sys; sys.argv = {[*command.split(), '--help']}\n"
            f"from albert_ds.__main__ import run\n"
            f"try: run()\n"
            f"finally: assert not set(sys.modules) & {slow}, set(sys.modules) & {slow}"
        )
        done = run_python("-c", script)
        assert done.returncode == 0, (command, done.stderr)
        assert "--version" in done.stdout and done.stdout.startswith(f"usage: {command} ")


def test_the_reference_is_the_declaration():
    """One row a flag, with its unit, range, default and meaning."""
    rows = as_reference(build_parser()).splitlines()
    cells = {row.split(" | ")[0].strip("| `"): row for row in rows[2:]}
    for name, declared in flags_of(RunConfig).items():
        row = cells[declared.name or "--" + name.replace("_", "-")]
        assert declared.help.replace("|", "\\|") in row
    assert cells["--steps"].endswith(
        "| STEPS, at least 1 and at most 1000000000 | as --epochs says |"
    )
    assert cells["--masked-fraction"].endswith("| SHARE, above 0 and below 1 | 0.15 |")
    assert cells["--max-hours"].endswith(" | no limit |")
    assert cells["--deterministic"].endswith(" | off |")
