"""--help of every command explains every flag, with its unit and default, and loads little."""

import argparse
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest

from albert_ds.__main__ import COMMANDS, run
from albert_ds.cli import Number, Parser, flags_of
from albert_ds.settings.pretrain import RunConfig, build_parser
from tests.conftest import ROOT
from tools.lab.docs_hook import as_reference, list_actions

TRAINERS = ["albert-ds train", "albert-ds finetune"]
USERS = ["albert-ds", *(f"albert-ds {name}" for group in COMMANDS.values() for name in group)]
OTHERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*/*.py"))
# Not for one day of one GPU, nor the examples, which are to be copied and take plain argparse.
OTHERS = [name for name in OTHERS if not {"gpu_kit", "examples"} & {*name.split("/")}]
ALL = USERS + [name for name in OTHERS if "Parser(" in (ROOT / name).read_text()]


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
    is_number = isinstance(action.type, Number) or action.type in (int, float)
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
            "/".join(action.option_strings) or action.dest: found
            for action in list_actions(parser)
            if (found := faults_of(action))
        }
        assert not faults, command
        shown = " ".join(parser.format_help().split())
        # No "(default: [...": a list stands as it is typed.
        for wrong in ("%(", str(ROOT), "(default: [", "(default: ("):
            assert wrong not in shown, command


def test_help_answers_without_heavy_libraries():
    heavy = {"torch", "deepspeed", "megatron", "transformers", "webdataset", "scipy"}
    for command in USERS:
        slow = heavy | {"numpy"} if command in TRAINERS else heavy
        script = (
            f"import sys; sys.argv = {[*command.split(), '--help']}\n"
            f"from albert_ds.__main__ import run\n"
            f"try: run()\n"
            f"finally: assert not set(sys.modules) & {slow}, set(sys.modules) & {slow}"
        )
        program = [sys.executable, "-c", script]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        assert "--version" in done.stdout and done.stdout.startswith(f"usage: {command} ")


def test_a_flag_without_help_unit_or_default_is_a_fault():
    parser = Parser()
    complete = dict(type=Number(low=1, whole=True), metavar="STEPS", help="steps (default: all)")
    assert not faults_of(parser.add_argument("--a", **complete))
    for number, left_out in enumerate(("metavar", "help")):
        given = {key: value for key, value in complete.items() if key != left_out}
        assert faults_of(parser.add_argument(f"--{number}", **given))
    assert faults_of(parser.add_argument("--c", **{**complete, "help": "steps"}))


def test_the_reference_is_the_declaration():
    """One row a flag, with its unit, range, default and meaning."""
    rows = as_reference(build_parser()).splitlines()
    cells = {row.split(" | ")[0].strip("| `"): row for row in rows[2:]}
    for name, declared in flags_of(RunConfig).items():
        row = cells[declared.name or "--" + name.replace("_", "-")]
        assert declared.help.replace("|", "\\|") in row
    assert cells["--steps"].endswith("| STEPS, at least 1 and at most 1000000000 | required |")
    assert cells["--masked-fraction"].endswith("| SHARE, above 0 and below 1 | 0.15 |")
    assert cells["--max-hours"].endswith(" | no limit |")
    assert cells["--deterministic"].endswith(" | off |")


def test_the_bounds_of_a_range():
    allowed = Number(above=0, high=1)
    assert 0.5 in allowed and 1 in allowed
    assert not [value for value in (0, float("nan"), float("inf")) if value in allowed]
    assert str(allowed) == "above 0 and at most 1"
    assert float("inf") not in Number() and 10**400 in Number()
    assert 1 not in replace(allowed, below=1)
