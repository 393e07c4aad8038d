"""One way in and out of every command: the parser, checked flag values, errors and exit codes.

A flag is declared once. Where it fills a field of a configuration, `flag` declares it beside that
field and `add_flags` gives it to a parser. `--help`, the defaults, the ranges, the resume check and
the reference in the docs are all read from that declaration.
"""

import argparse
import importlib.util
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO, cast

from albert_ds.base.errors import (
    ENDINGS,
    UserError,
    escape_controls,
    hide_passwords,
    name_os_error,
    name_system_error,
)
from albert_ds.base.files import may_replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A range of finite numbers: the type of a flag, and the check of the field that it fills."""

    ge: float | None = None  # greater or equal
    gt: float | None = None  # greater
    le: float | None = None  # less or equal
    lt: float | None = None  # less
    is_integer: bool = False

    def __call__(self, text: str) -> int | float:
        """Read a typed value; raise ArgumentTypeError for text that is no number in the range."""
        try:
            value = int(text) if self.is_integer else float(text)
        except ValueError:
            kind = "a whole number" if self.is_integer else "a number"
            raise argparse.ArgumentTypeError(f"{text}: must be {kind}, {self}") from None
        if value not in self:
            raise argparse.ArgumentTypeError(f"{text}: must be {self}")
        return value

    def __contains__(self, value: float) -> bool:
        is_finite = isinstance(value, int) or math.isfinite(value)
        return (
            is_finite
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        words = {
            "at least": self.ge,
            "above": self.gt,
            "at most": self.le,
            "below": self.lt,
        }
        bounds = [f"{word} {_show(bound)}" for word, bound in words.items() if bound is not None]
        return " and ".join(bounds) or "finite"


def integer(low: int, high: int | None = None) -> Range:
    """The whole numbers from `low` on, up to `high` if it is given."""
    return Range(ge=low, le=high, is_integer=True)


non_negative, positive = integer(0), integer(1)


def utf8(text: str) -> str:
    """Text. What is not UTF-8 comes with surrogates, which no JSON and not every library takes."""
    if text != text.encode(errors="ignore").decode():
        raise argparse.ArgumentTypeError(f"{text!r}: must be UTF-8")
    return text


def path(text: str) -> str:
    """The name of a file or folder. An empty name would mean the current folder."""
    if not utf8(text).strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: must be the name of a file or folder in UTF-8")
    return text


def new_file(text: str) -> Path:
    """The name of a file to write, checked before the work whose result it will hold."""
    file = Path(path(text))
    folder = file.absolute().parent
    is_free = file.is_file() or not os.path.lexists(file)
    if not is_free or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(
            f"{text}: must be a file in a folder that exists and may be written to"
        )
    if not may_replace(file):
        raise argparse.ArgumentTypeError(
            f"{text}: must be a new file, or a report or picture of albert-ds"
        )
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """How the command line fills a field."""

    help: str  # what it does
    type: Callable[[str], Any] = str  # a `Range` also checks the range
    choices: Iterable[str] | None = None
    nargs: str | None = None
    metavar: str | None = None  # the unit of a number, or what a word names
    shown_default: str | None = None  # where the default depends on something else
    group: str = ""  # heading in --help
    name: str | None = None  # where it is not the field's name in kebab case
    may_change: bool = False  # whether a resumed run may have another value


def flag(
    declared: str | Flag,
    metavar: str | None = None,
    type: Callable[[str], Any] = str,
    *,
    default: Any = MISSING,
    **changes: Any,
) -> Any:
    """A dataclass field that a flag fills.

    `declared` is the flag's help, or a `Flag` that several commands share, of which `how` changes
    fields. Without `default` and `shown_default` the flag must be typed.
    """
    if isinstance(declared, Flag):
        made = replace(declared, **changes)
    else:
        made = Flag(help=declared, metavar=metavar, type=type, **changes)
    return field(default=default, metadata={"flag": made})


def flags_of(config: Any) -> dict[str, Flag]:
    """Field name -> flag, of every field of a dataclass that `flag` declared."""
    return {f.name: f.metadata["flag"] for f in fields(config) if "flag" in f.metadata}


def values_of(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Field name -> parsed value, of every flag of a dataclass that the namespace has."""
    return {name: getattr(args, name) for name in flags_of(config) if hasattr(args, name)}


def check_ranges(config: Any) -> None:
    """Raise UserError for the first field of a dataclass whose value its flag does not allow."""
    for name, declared in flags_of(config).items():
        value = getattr(config, name)
        choices = declared.choices
        where = f"{declared.name or as_flag(name)} {value}: must be"
        if isinstance(declared.type, Range) and value is not None and value not in declared.type:
            raise UserError(f"{where} {declared.type}")
        if choices is not None and value not in (None, *choices):
            raise UserError(f"{where} one of {', '.join(choices)}")


class HelpFormatter(argparse.HelpFormatter):
    """Shows "(required)" or the default of every flag whose help does not say it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():  # a docstring, wrapped already
            return "".join(indent + line for line in text.strip().splitlines(keepends=True))
        return super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if not action.option_strings or "default:" in text:
            return text
        if action.required:
            return f"{text} (required)"
        has_none = action.default is None or action.default is False
        if has_none or action.default == argparse.SUPPRESS:
            return text
        if isinstance(action.default, list | tuple):  # as it is typed
            return f"{text} (default: {' '.join(map(str, action.default))})"
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, ours, no abbreviations, and --version."""

    def __init__(self, **options: Any):
        options |= {"allow_abbrev": False, "formatter_class": HelpFormatter}
        super().__init__(**options)
        self.register("type", Path, lambda text: Path(path(text)))
        self.register("action", None, _Store)
        if options.get("add_help", True):
            self.add_argument(
                "--version", action=_PrintVersion, help="print the version of albert-ds and exit"
            )

    def add(
        self,
        name: str,
        help: str,
        metavar: str | None = None,
        type: Callable[[str], Any] | None = None,
        **options: Any,
    ) -> None:
        """`add_argument`, in the order of `flag`: what it does, what it names or its unit, type."""
        given = {"metavar": metavar, "type": type}
        options |= {key: value for key, value in given.items() if value is not None}
        self.add_argument(name, help=help, **options)

    def parse_args(self, args=None, namespace=None):
        """A mistyped flag is named before one that is missing."""
        words = sys.argv[1:] if args is None else args
        self._refuse_unknown(words)
        return super().parse_args(words, namespace)

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        parts = self._subparsers._group_actions if self._subparsers else ()
        for number, word in enumerate(words):
            name = word.partition("=")[0]
            if name == "--":
                return
            if re.fullmatch(r"--\S+", name) and name not in known:
                raise UserError(f"{name}: no such flag{suggest(name, known)}")
            for part in parts:
                if isinstance(part.choices, dict) and word in part.choices:
                    return part.choices[word]._refuse_unknown(words[number + 1 :])

    def _check_value(self, action, value):
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += suggest(str(value), map(str, action.choices))
            raise

    def error(self, message: str):
        # "argument --steps: 0: must be ..." -> "--steps 0: must be ..."
        raise UserError(re.sub(r"^argument (\S+): (.*: must be )", r"\1 \2", message))


class _Store(argparse._StoreAction):
    """Lists of a flag that is typed again add up; the first takes the place of the default."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest, self.default)
        if isinstance(values, list) and before is not self.default:
            values = [*before, *values]
        setattr(namespace, self.dest, values)


class _PrintVersion(argparse.Action):
    """Reads the version only where it is asked for: importlib.metadata takes a while to import."""

    def __init__(self, option_strings, dest, help: str | None = None):
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"albert-ds {version('albert-ds')}")
        parser.exit()


def add_flags(
    parser: argparse.ArgumentParser,
    config: Any,
    *,
    instead: Mapping[str, Flag] | None = None,
    suppress: bool = False,
) -> None:
    """Add every field of the dataclass `config` that `flag` declared, under its group's heading.

    `instead` declares some of them anew, by their names. `suppress` leaves a flag that was not
    typed out of the parsed namespace.
    """
    for filled in fields(config):
        if "flag" not in filled.metadata:
            continue
        declared = (instead or {}).get(filled.name, filled.metadata["flag"])
        has_default = filled.default is not MISSING and declared.shown_default is None
        default = filled.default if has_default else None
        add_flag(
            parser,
            filled.name,
            declared,
            default=argparse.SUPPRESS if suppress else default,
            required=not (has_default or declared.shown_default or suppress),
            is_switch=filled.type in (bool, "bool"),
        )


def add_flag(
    parser: argparse.ArgumentParser,
    name: str,
    declared: Flag,
    *,
    default: Any = None,
    required: bool = False,
    is_switch: bool = False,
) -> None:
    """Add one flag, whose value the parsed namespace holds as `name`."""
    groups = {group.title: group for group in parser._action_groups}
    if declared.group and declared.group not in groups:
        groups[declared.group] = parser.add_argument_group(declared.group)
    target = groups.get(declared.group, parser)
    text = (
        declared.help
        if declared.shown_default is None
        else f"{declared.help} (default: {declared.shown_default})"
    )
    common: dict[str, Any] = {"dest": name, "default": default, "help": text.replace("%", "%%")}
    typed = declared.name or as_flag(name)
    if is_switch:
        target.add_argument(typed, action="store_true", **common)
        return
    common |= {"choices": declared.choices, "nargs": declared.nargs, "metavar": declared.metavar}
    target.add_argument(typed, type=declared.type, required=required, **common)


def add_instead(parser: argparse.ArgumentParser, first: str, name: str, declared: Flag) -> None:
    """Add a flag that may be typed in place of the flag of `first`, and not with it."""
    add_flag(parser, name, declared)
    pair = [action for action in parser._actions if action.dest in (first, name)]
    one_of = parser.add_mutually_exclusive_group(required=any(a.required for a in pair))
    for action in pair:
        if action.required:
            action.required = False
            action.help = f"{action.help} (default: as {as_flag(name)} says)"
        one_of._group_actions.append(action)


def require(module: str, extra: str, what: str) -> None:
    """Raise UserError where `module`, which `what` needs and the extra brings, is not installed."""
    if importlib.util.find_spec(module) is None:
        install = f"pip install 'albert-ds[{extra}]'"
        raise UserError(f"{what}: the package {module} is not installed; {install}")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command and leave the process: one line on stderr and the exit code for an ending.

    If the reader of its output goes away, it ends as any Unix command does: by SIGPIPE.
    """
    open_closed_streams()
    sys.stdout.reconfigure(errors="backslashreplace")  # ty: ignore[missing-union-attribute]
    sys.stdout = cast(TextIO, EscapingStream(sys.stdout))
    try:
        try:
            code = main(sys.argv[1:]) or 0
            sys.stdout.flush()
        except BrokenPipeError as error:
            if has_reader(sys.stdout):  # another pipe, to a process of this command's own
                raise name_os_error(error) from None
            drop_output(sys.stdout)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        except (OSError, RuntimeError) as error:
            if (named := name_system_error(error)) is error:
                raise
            raise named from None
    except ENDINGS as ending:
        log_line(str(ending))
        code = ending.code
    sys.exit(code)


def open_closed_streams() -> None:
    """Give a process that was started without them (cron, `>&-`) streams that go nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def has_reader(stream: TextIO) -> bool:
    """False if `stream` is a pipe, or a socket, that nobody reads."""
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def drop_output(stream: TextIO) -> None:
    """Send what `stream` holds and will be given nowhere, so that no later flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class EscapingStream:
    """A stream on which no control character of a name reaches the terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(escape_controls(text))


class LastingStream:
    """A stream whose process goes on when nobody reads it any more, or its disk is full.

    What is lost from then on is said once, on stderr.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._keep(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._keep(self._stream.flush)

    def _keep(self, work: Callable, *given: str) -> None:
        try:
            work(*given)
        except OSError as error:
            drop_output(self._stream)
            name = self._stream.name.strip("<>")
            log_line(f"{name}: {error.strerror}; the run goes on, its lines there are lost")


def log_line(message: str) -> None:
    """One line on stderr. If it is lost, the exit code still tells the ending."""
    line = escape_controls(hide_passwords(" ".join(message.split())))
    try:
        print(f"albert-ds: {line}", file=sys.stderr, flush=True)
    except OSError:
        drop_output(sys.stderr)


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def suggest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for a word that is nearly a known one, else nothing."""
    import difflib

    near = difflib.get_close_matches(word, list(known), 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


def find_word(argv: list[str], name: str) -> str | None:
    """The value of a flag in a command line that may be wrong elsewhere; None where it has none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value", nargs="?")
    return parser.parse_known_args(argv)[0].value


def peek_output(argv: list[str]) -> Path | None:
    """The RUN folder of a command line that may be wrong elsewhere; None where it names none."""
    output = find_word(argv, "--output")
    return Path(output) if output and output.strip() else None


def _show(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
