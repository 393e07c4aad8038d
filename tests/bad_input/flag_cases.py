"""Every flag of every command with values that are wrong beyond doubt, one at a time."""

import argparse
import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

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

    parsers: list[argparse.ArgumentParser] = []

    def stop(parser, *_):
        parsers.append(parser)
        sys.exit()

    with patch.object(Parser, "parse_args", stop), patch.object(sys, "argv", [command]):
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / command), run_name="__main__")
    return parsers[0] if parsers else None


def list_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Those of its sub-commands, or itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [each for inner in action.choices.values() for each in list_parsers(inner)]
    return [parser]


def list_wrong(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """A flag that has a wrong value, and the words of a command that is right but for it."""
    actions = [a for a in parser._actions if a.dest not in ("help", "version")]
    needed = [a for a in actions if a.required or not a.option_strings]
    for action in actions:
        if action.nargs == 0 or not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        flag = action.option_strings[-1]
        others = [word for a in needed if a is not action for word in _fill(a)]
        for value in _wrong_values(action):
            yield flag, [*others, f"{flag}={value}"]


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
