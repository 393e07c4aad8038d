"""Commands in the documentation work: each is parsed by its own parser, the cheap ones are run."""

import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from albert_ds import __main__ as albert_ds
from albert_ds.base.cli import Parser, Range
from albert_ds.base.errors import UserError
from albert_ds.settings.config_file import parse as parse_with_config
from albert_ds.settings.pretrain import RunConfig
from tests.conftest import ROOT
from tests.models import copy_old_run, run_export
from tests.test_command import ALL, parser_of
from tests.test_docs import CURRENT, PAGES
from tools.lab.docs_hook import find_parser, list_actions

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SCRIPTS = sorted(path for folder in ("slurm", "tools") for path in (ROOT / folder).rglob("*.sh"))
FAILURES = (AssertionError, OSError, StopIteration, SyntaxError)  # of a check
LAUNCHERS = {"python", "deepspeed", "torchrun", "mpirun", "sbatch", "bash"}
SHELL = {"cp", ".", "cd", "touch", "tail", "export", "for", "done", "mkdir"}
SHELL |= {"docker", "apptainer", "pip", "hf"}  # not ours to check
# Flags that the pages name and that are of other programs.
FOREIGN = {
    *("--num_gpus", "--hostfile", "--module", "--launcher"),  # DeepSpeed
    *("--node-rank", "--nproc-per-node"),  # torchrun
    *("--test-only", "--no-kill", "--array", "--nodes", "--gpus-per-node", "--gpus-per-task"),
    *("--ntasks-per-node", "--signal", "--time", "--mpi", "--overlap", "--kill-on-bad-exit"),
    *("--wait", "--spares", "--dependency"),  # Slurm and our recipes
    *("--container-image", "--container-workdir", "--container-mounts", "--build-arg", "--ipc"),
    *("--shm-size", "--allow-run-as-root", "--oversubscribe", "--logdir", "--help"),
    *("--extra-index-url", "--revision", "--short"),
}


@cache
def parser_for(program: str) -> Parser:
    """The parser of a script, or of a command of albert-ds."""
    if not program.endswith(".py"):
        return find_parser(program)
    with pytest.MonkeyPatch.context() as patch:
        return parser_of(program, patch)


def blocks_of(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def commands_of(text: str) -> Iterator[list[str]]:
    """The simple commands of a piece of shell, as words, without variables set before them."""
    text = re.sub(r"\$\(albert-ds path (\w+)\)", r"albert_ds/\1.py", text)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("&|;"):
                words.append(word)
                continue
            while words and (re.match(r"\w+=", words[0]) or words[0] == "do"):
                words.pop(0)
            if words:
                yield words
            words = []


def check(words: list[str]) -> None:
    """Fail if no program of ours, or of LAUNCHERS and SHELL, takes these words."""
    program, *rest = words
    if program in SHELL or words == ["albert-ds", "--help"]:
        return
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert [word for word in rest if "=" not in word][0] in targets
    elif program.rpartition("/")[2] in LAUNCHERS:
        check_launched(rest)
    elif program.endswith(".sh"):
        check_script(program, rest)
    elif program == "albert-ds":
        parse(rest[0], rest[1:])
    elif program.startswith("tools/examples/"):
        known = re.findall(r'"(--[a-z-]+)"', (ROOT / program).read_text())
        assert {word for word in rest if word.startswith("--")} <= {*known}
    else:
        parse(program, rest)


def check_launched(words: list[str]) -> None:
    """Check what a launcher starts; its own flags stand before that."""
    starts = re.compile(r"-c|-m|--module|albert-ds|\S+\.(py|sh)").fullmatch
    begin = next(number for number, word in enumerate(words) if starts(word))
    started, *rest = words[begin:]
    if started == "-c":
        compile(rest[0], "-c", "exec")
    elif started not in ("-m", "--module"):
        check([started, *rest])
    elif rest[0] == "albert_ds":
        check(["albert-ds", *rest[1:]])
    elif rest[0].startswith("albert_ds."):
        check([rest[0].replace(".", "/") + ".py", *rest[1:]])
    elif rest[0] == "pytest":
        assert all((ROOT / word).exists() for word in rest[1:] if "/" in word)
    elif rest[0] != "build":
        path = ROOT / rest[0].replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def check_script(script: str, words: list[str]) -> None:
    """Flags after a recipe of slurm/ go to the command that it starts."""
    text = (ROOT / script).read_text()
    if script.startswith("slurm/"):
        started = re.search(r"^(?:launch|build=).* -m albert_ds ([\w-]+)", text, re.M)
        trainer = "finetune" if re.search("^finetune ", text, re.M) else "train"
        flags = {word for word in words if word.startswith("--")} - {"--spares"}
        assert flags <= flags_of(started[1] if started else trainer)


def parse(program: str, words: list[str]) -> None:
    parser = parser_for(program)
    for action in list_actions(parser):
        if not isinstance(action.type, Range):
            action.type = None  # a file need not exist
    if "..." in words:
        assert {word for word in words if word.startswith("--")} <= flags_of(program)
    elif "recipes/small.yaml" in words:
        parse_with_config(find_parser(program), words, RunConfig)
    else:
        parser.parse_args(words)


def flags_of(program: str) -> set[str]:
    return {flag for action in list_actions(parser_for(program)) for flag in action.option_strings}


def refused(commands: Iterable[tuple[Path, list[str]]]) -> list[str]:
    """The commands that no program takes, with the page or script that shows them."""
    refusals = []
    for source, words in commands:
        try:
            check(words)
        except (*FAILURES, SystemExit, UserError) as error:
            refusals.append(f"{source.relative_to(ROOT)}: {shlex.join(words)}: {error!r}")
    return refusals


def commands_shown() -> list[tuple[Path, list[str]]]:
    return [
        (page, words)
        for page in CURRENT
        for body in blocks_of(page, "bash")
        for words in commands_of(body)
    ]


def test_every_command_of_a_page_is_accepted():
    assert len(commands_shown()) > 80
    assert refused(commands_shown()) == []


def test_every_command_in_the_head_of_a_script_is_accepted():
    commands = []
    for script in SCRIPTS:
        text = script.read_text()
        lines = re.findall(r"^# (?:Command|Plan): +(.*?)(?:  |$)", text, re.M)
        lines += re.findall(r"^#   ((?:\w+=\S+ )*(?:bash|sbatch) .*?)(?:  |$)", text, re.M)
        commands += [(script, words) for line in lines for words in commands_of(line)]
    assert len(commands) > 10
    assert refused(commands) == []


def test_code_stands_in_fences_that_name_its_language():
    for page in PAGES:
        text = page.read_text()
        names = re.findall(r"^```(.*)\n(?:.*\n)*?```$", text, re.M)
        assert set(names) <= {"bash", "python", "text", "mermaid"}, page
        assert not re.search(r"\n\n {4}", FENCE.sub("", text)), page


def test_every_flag_in_a_sentence_exists():
    programs = [name.removeprefix("albert-ds ") for name in ALL if name != "albert-ds"]
    known = FOREIGN.union(*map(flags_of, programs))
    named = {
        (str(page.relative_to(ROOT)), flag)
        for page in CURRENT
        for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
    }
    assert {(page, flag) for page, flag in named if flag not in known} == set()


def test_the_python_of_a_page_runs(tmp_path, monkeypatch):
    """On a small run, its shards and its export, under the names of the page."""
    runs = copy_old_run(tmp_path / "runs")
    (runs / "lamb").rename(runs / "base")
    (runs / "data").rename(tmp_path / "data")
    (tmp_path / "hf").mkdir()
    run_export(runs / "base", tmp_path / "hf/base")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for body in blocks_of(ROOT / "docs/python.md", "python"):
        exec(body, names)
    assert len(names["states"]) == 3 and names["states"][0].shape[-1] == 16
    assert [len(part) for part in names["of_each"]] == names["lengths"].tolist()
    assert names["losses"]["mlm_loss_sum"] > 0
    # Without padding and with it: the same states.
    with_padding = names["padded"].last_hidden_state
    for number, part in enumerate(names["of_each"]):
        assert torch.allclose(part, with_padding[number, : len(part)], atol=1e-4)


def test_the_plans_of_the_pages_can_be_made(capsys):
    """All but those of text, which is not here, and one that takes a measured report.

    docs/scaling.md shows the rows that are printed.
    """
    shown = {tuple(words) for _, words in commands_shown()}
    plans = {words[2:] for words in shown if words[:2] == ("albert-ds", "plan")}
    plans = {words for words in plans if words[0].startswith("--")}
    page = (ROOT / "docs/scaling.md").read_text()
    table = page.partition("| | | error of the model |")[2].partition("\n\n")[0]
    for words in sorted(plan for plan in plans if "report/hardware.json" not in plan):
        albert_ds.main(["plan", *words])
        printed = capsys.readouterr().out
        assert "PREDICTED, not measured" in printed, words
        if "albert-xxlarge" in words:
            assert [row for row in table.splitlines()[2:] if row not in printed] == []
