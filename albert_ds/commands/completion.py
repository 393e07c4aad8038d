"""Print what makes a shell complete commands and flags.

albert-ds completion bash > ~/.local/share/bash-completion/completions/albert-ds
"""

import argparse
from importlib import import_module
from typing import Any

from albert_ds.base import cli
from albert_ds.commands.names import COMMANDS

SHELLS = ("bash", "zsh", "tcsh")
# Where a parser does not stand in the module that runs the command.
PARSERS = {"train": "albert_ds.settings.pretrain", "finetune": "albert_ds.settings.finetune"}


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    parser.add("shell", ", ".join(SHELLS), "SHELL", choices=SHELLS)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    cli.require("shtab", "completion", "completion")
    import shtab

    parser = argparse.ArgumentParser(prog="albert-ds")
    commands = parser.add_subparsers(dest="command")
    for name, (_, says) in [each for group in COMMANDS.values() for each in group.items()]:
        commands.add_parser(name, help=says)
        commands.choices[name] = find_parser(name)
    _list_choices(parser)
    print(shtab.complete(parser, args.shell))


def find_parser(name: str) -> Any:
    """The parser of a command, which may be one of several in its module."""
    module = next(group[name][0] for group in COMMANDS.values() if name in group)
    parser = import_module(PARSERS.get(name, module)).build_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and name in action.choices:
            return action.choices[name]
    return parser


def _list_choices(parser: argparse.ArgumentParser) -> None:
    """As lists: shtab takes a dictionary of choices for commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _list_choices(inner)
        elif action.choices is not None:
            action.choices = list(action.choices)
