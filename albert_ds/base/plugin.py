"""--plugin FILE: Python of the user's own that adds rows to the tables.

A process executes the file once, before it reads the rest of its command line. Only a typed
--plugin names it: no run, model or file of flags has code executed.
"""

import hashlib
import sys
import traceback
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from albert_ds.base.cli import Flag, log_line, path
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import read_bytes

Row = TypeVar("Row")
PLUGIN = Flag(
    help="Python file of your own, executed first: rows that it adds to tables of albert-ds, such "
    "as a pattern of sharing, an optimizer, a term of the loss, a head",
    type=path,
    metavar="FILE",
    shown_default="none",
)
COPY = "plugin.py"  # in a RUN; it is read only where --plugin names it
# sha256 -> content of what this process has executed.
EXECUTED: dict[str, bytes] = {}


class Table(dict[str, Row], Generic[Row]):
    """Rows of one class by name. A row is added, none is replaced: a name is taken once."""

    def __init__(self, kind: type[Row]):
        self._kind = kind

    def __setitem__(self, name: str, row: Row) -> None:
        if name in self:
            raise UserError(f"{self._kind.__name__} {name!r}: is there already; use another name")
        if not isinstance(row, self._kind):
            raise UserError(f"{name!r} {row!r}: must be of class {self._kind.__name__}")
        super().__setitem__(name, row)

    def update(self, rows: Mapping[str, Row]) -> None:  # ty: ignore[incompatible-method-override]
        for name, row in rows.items():
            self[name] = row

    def __ior__(self, rows: Mapping[str, Row]):  # ty: ignore[incompatible-method-override]
        self.update(rows)
        return self

    def __or__(self, rows: Mapping[str, Row]) -> "Table[Row]":
        made = Table(self._kind)
        made.update(self)
        made.update(rows)
        return made


def load_plugin(file: str | None) -> str | None:
    """Execute what --plugin names; its sha256, None where it is not typed.

    Raises UserError, with the line of the file, for whatever it raises.
    """
    if file is None:
        return None
    try:
        content = read_bytes(Path(path(file)), f"--plugin {file}")
    except ArgumentTypeError as error:  # the command line is not parsed yet
        raise UserError(f"--plugin {error}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 in EXECUTED:
        return sha256
    module = ModuleType("albert_ds_plugin")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses and pickle look
    try:
        exec(compile(content, file, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserError(f"--plugin {file}: {_describe(error, file)}") from None
    EXECUTED[sha256] = content
    return sha256


def _describe(error: BaseException, file: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
        what = f"no Python: {error.msg}"
    elif isinstance(error, UserError):
        what = str(error)
    return f"line {lines[-1]}: {what}" if lines and lines[-1] else what


def check_plugin(record: dict[str, Any], name: str) -> None:
    """Raise UserError if a run, whose config.json is `record`, had a plugin and none is typed.

    A line on stderr says it if another one is typed, or this one has changed.
    """
    sha256, file = record.get("plugin_sha256"), record.get("plugin")
    if sha256 is None or sha256 in EXECUTED:
        return
    what = f"{name}: its run had --plugin {file}, sha256 {str(sha256)[:12]}"
    if not EXECUTED:
        raise UserError(f"{what}: type --plugin as well; no file has code executed unasked")
    log_line(f"{what}; the one that is typed differs")
