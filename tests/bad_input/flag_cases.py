"""Every flag of every command with values that are wrong beyond doubt, one at a time."""

import argparse
import contextlib
import io
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bad_input.judge import Case, must_refuse
from tests.conftest import ROOT

COMMANDS = (
    *("albert_ds/train.py", "albert_ds/finetune.py"),
    *sorted(
        str(path.relative_to(ROOT))
        for folder in ("tools", "tools/lab", "tools/demo")
        for path in (ROOT / folder).glob("*.py")
    ),
)
NUMBERS = ("nan", "inf", "-inf", "1e999", "x", "", "9" * 5000, "0x10", "1,5")
NAMES = ("", " ", "a\0b", "\udcff")


class _Found(Exception):
    pass


def find_parser(command: str) -> argparse.ArgumentParser | None:
    """The parser of a command, as it is when --help is asked for."""
    from albert_ds.cli import Parser

    found: list[argparse.ArgumentParser] = []

    def stop(parser, *_):
        found.append(parser)
        raise _Found

    original, argv = Parser.parse_args, sys.argv
    Parser.parse_args, sys.argv = stop, [command]  # ty: ignore[invalid-assignment]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(str(ROOT / command), run_name="__main__")
    except (_Found, SystemExit):
        pass
    finally:
        Parser.parse_args, sys.argv = original, argv
    return found[0] if found else None


def list_flag_cases(folder: Path, data: Path, draw: random.Random, count: int) -> Iterator[Case]:
    """All those of the parsers of all commands, whatever `count`: nothing is run."""
    parsers = {command: find_parser(command) for command in COMMANDS}
    cases = [
        case
        for command, parser in parsers.items()
        if parser is not None
        for case in _list_cases(command, parser, ())
    ]
    yield from cases


def _list_cases(command: str, parser, words: tuple[str, ...]) -> Iterator[Case]:
    actions = [a for a in parser._actions if a.dest not in ("help", "version")]
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _list_cases(command, inner, (*words, name))
            return
    needed = [a for a in actions if a.required or not a.option_strings]
    for action in actions:
        if action.nargs == 0 or not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        for value in _wrong_values(action):
            others = [word for a in needed if a is not action for word in _fill(a)]
            argv = [*others, f"{action.option_strings[-1]}={value}"]
            what = " ".join([command, *words, argv[-1][:60]])
            yield Case(what, must_refuse(lambda p=parser, argv=argv: p.parse_args(argv)))
    yield Case(f"{command} --foo", must_refuse(lambda: parser.parse_args(["--foo", "1"])))


def _wrong_values(action) -> tuple[str, ...]:
    from albert_ds.cli import Number

    if action.choices is not None:
        return ("nonsense", "", "0")
    if isinstance(action.type, Number):
        is_bounded = action.type.low is not None or action.type.above is not None
        return (*NUMBERS, *(("-5", "-1e300") if is_bounded else ()))
    if action.type in (int, float):
        return NUMBERS
    name = f"{action.metavar or ''} {action.dest}".upper()
    is_name = action.type is Path or any(
        word in name for word in ("FILE", "DIR", "RUN", "DATA", "OUTPUT", "INPUT", "FOLDER")
    )
    return NAMES if is_name else ()


def _fill(action) -> list[str]:
    """A value that the parser accepts."""
    from albert_ds.cli import Number

    value = "x"
    if action.choices is not None:
        value = str(next(iter(action.choices)))
    elif isinstance(action.type, Number) or action.type in (int, float):
        value = "1"
    return [f"{action.option_strings[-1]}={value}"] if action.option_strings else [value]


def list_config_cases(folder: Path, data: Path, draw: random.Random, count: int) -> Iterator[Case]:
    """train.py's whole check of its command line: values that contradict each other or the data."""
    from albert_ds.settings.pretrain import build_parser, read_config
    from tests.conftest import train_command

    sound = {"data": data, "output": folder / "new_run", "num_heads": 4}

    def check(**flags):
        argv = train_command(**{**sound, **flags})[2:]
        return lambda: read_config(argv, world_size=2)

    check()()
    wrong: list[tuple[str, object]] = [
        *(("batch_size", n) for n in (1, 3, 7, 9, 10**18)),
        *(("micro_batch_size", n) for n in (3, 5, 16, 10**18)),
        *(("num_heads", n) for n in (3, 5, 64)),
        *(("tensor_parallel", n) for n in (3, 4, 100)),
        *(("warmup_steps", n) for n in (13, 10**8)),
        *(("sequence_length", n) for n in (4, 65, 512, 10**6)),
        *(("sharing", n) for n in ("groups:3", "groups:0", "groups:-1", "groups:x", "Groups:2")),
        *(("sharing", n) for n in ("loop:1,2x4,1", "loop:1,0x2,1", "loop:1,2", "loop:1,2x2,-1")),
        *(("data", n) for n in ("nowhere", "/dev/null", "/proc", "http://[::1", "x://y")),
        *(("data_weights", n) for n in (["1", "2"], ["0.5", "0.5", "1"])),
        *(("deepspeed_config", n) for n in ("nowhere", "/dev/null", "/", "README.md")),
        *(("init_from", n) for n in ("nowhere", "/dev/null", "/", "docs")),
        *(("output", n) for n in ("/dev/null", "README.md")),
    ]
    for name, value in wrong:
        yield Case(f"--{name} {value}", must_refuse(check(**{name: value})))
    numbers = [a.dest for a in build_parser()._actions if callable(a.type) and a.nargs is None]
    for _ in range(count):
        name = draw.choice(numbers)
        value = draw.choice((0, 1, 2, 3, 8, 64, 1000, 0.5, 1e-9, -1, 2**40))
        yield Case(f"--{name} {value}", check(**{name: value}))
