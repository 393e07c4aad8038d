"""Every flag of every command with values that are wrong beyond doubt, one at a time."""

import argparse
import contextlib
import io
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from albert_ds.base.errors import UserError
from tests.bad_input.judge import Case, SilentlyWrong, must_refuse
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


def find_parser(command: str) -> argparse.ArgumentParser | None:
    """The parser of a command, as it is when --help is asked for."""
    from albert_ds.base.cli import Parser

    found: list[argparse.ArgumentParser] = []

    def stop(parser, *_):
        found.append(parser)
        sys.exit()

    with patch.object(Parser, "parse_args", stop), patch.object(sys, "argv", [command]):
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / command), run_name="__main__")
    return found[0] if found else None


def list_flag_cases(folder: Path, data: Path, draw: random.Random, count: int) -> Iterator[Case]:
    """All those of the parsers of all commands, whatever `count`: nothing is run."""
    for command, parser in [(command, find_parser(command)) for command in COMMANDS]:
        if parser is not None:
            yield from _list_cases(command, parser, ())


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
            yield Case(what, _must_name(action, lambda p=parser, argv=argv: p.parse_args(argv)))
    yield Case(f"{command} --foo", must_refuse(lambda: parser.parse_args(["--foo", "1"])))


def _must_name(action, parse: Callable[[], object]) -> Callable[[], object]:
    """Refuse with words that begin with the flag."""

    def run():
        try:
            must_refuse(parse)()
        except UserError as error:
            if not str(error).removeprefix("argument ").startswith(action.option_strings[-1]):
                raise SilentlyWrong(f"{action.option_strings[-1]} is not named: {error}") from None
            raise

    return run


def _wrong_values(action) -> tuple[str, ...]:
    from albert_ds.base.cli import Range

    if action.choices is not None:
        return ("nonsense", "", "0")
    if isinstance(action.type, Range):
        kind = action.type
        beyond = [x for x in (kind.gt, kind.lt) if x is not None]
        beyond += [x - 1 for x in (kind.ge, kind.gt) if x is not None]
        beyond += [x + 1 for x in (kind.le, kind.lt) if x is not None]
        return (*NUMBERS, *map(str, beyond))
    if action.type in (int, float):
        return NUMBERS
    name = f"{action.metavar or ''} {action.dest}".upper()
    is_name = action.type is Path or any(
        word in name for word in ("FILE", "DIR", "RUN", "DATA", "OUTPUT", "INPUT", "FOLDER")
    )
    return NAMES if is_name else ()


def _fill(action) -> list[str]:
    """A value that the parser accepts."""
    from albert_ds.base.cli import Range

    value = "x.svg"
    if action.choices is not None:
        value = str(next(iter(action.choices)))
    elif isinstance(action.type, Range) or action.type in (int, float):
        value = "1"
    return [f"{action.option_strings[-1]}={value}"] if action.option_strings else [value]
