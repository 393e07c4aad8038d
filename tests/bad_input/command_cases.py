"""Commands as a user types them, on inputs and machines that are broken by rule.

Each process of a case is forked from this one, which has imported the libraries, and works in a
room with a copy of every command's input. What a command should give is what two runs of it on a
sound machine have given alike.
"""

import argparse
import atexit
import builtins
import errno
import fcntl
import io
import json
import os
import resource
import shutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from albert_lab.ranks import find_port, rank_environment

from albert_ds import __main__ as albert_ds
from albert_ds.base import cli
from tests.bad_input.file_cases import HOW, damage
from tests.bad_input.judge import AS_PROMISED, HANG, TRACEBACK, WRONG
from tests.bad_input.room import READS, WRITES, content_of
from tools.lab.docs_hook import find_parser

LOST = "files lost"
VERDICTS = (AS_PROMISED, TRACEBACK, HANG, LOST, WRONG)
LIMIT = 300.0  # seconds after which a case hangs; most take one
MEMORY = 12 << 30
ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO),
    *(errno.ENOTCONN, errno.EREMOTEIO, errno.ESTALE, errno.EBUSY, errno.EROFS, errno.ETIMEDOUT),
    *(errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP),
)
CALLS = ("open", "replace", "rename", "mkdir", "unlink", "fsync", "scandir", "listdir", "stat")
LEFT_OUT = ("learn", "plan", "scaling plan", "gpu-check", "bench", "traffic")  # they start commands
COMMANDS = {
    **{
        name: (*words, "--output", "out" + Path(output).suffix)
        for name, (words, _, output) in WRITES.items()
        if name not in LEFT_OUT
    },
    **READS,
}
BESIDE = {  # commands that read what another is writing
    "train": (
        *("report out --output r.html", "fill-mask --checkpoint out [MASK]"),
        "export --checkpoint out --output hf2",
    ),
    "finetune": ("report out --output r.html", "export --checkpoint out --output hf2"),
    "shards": ("inspect --data out",),
    "vocab": ("shards --input text.txt --vocab out/spiece.model --output built",),
    "export": ("import --input out --output back",),
    "import": ("export --checkpoint out --output back",),
}
TRAINERS = ("train", "finetune")
OF_RANKS = ("--batch-size", 16)
NOTES = ("latest", "exit.json", "history.jsonl", ".lock", "metrics.jsonl", "logs", "tensorboard")
NUMBERS = ("0", "-1", "1", "3", "7", "0.5", "1e-9")
HUGE = str(2**40)  # for flags whose value costs no time and no processes
COSTLY = ("steps", "hours", "batch", "workers", "processes", "ranks", "samples", "count", "show",
          "epochs", "seeds", "updates", "layers", "cells", "memory", "gpus", "minutes")  # fmt: skip
NAMES = ("nowhere", "/dev/null", "text.txt", "ds.json", "data", "run", "hf", "tuned", "cola", ".")
NAMES += ("", "a\nb", "\udcff", "vocab/spiece.model", "http://127.0.0.1:9/x", "x" * 5000)
FREE = ("nonsense", "0", "all", "2@0,1@1", "1@0,9", "-", "[", "%s{}", "1,2", "1:2", "é" * 99)


def nothing(*_) -> None:
    """A sound machine."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One case. `others` are the words of further processes at the same time."""

    what: str
    words: tuple
    prepare: Callable[[Path], None] = nothing  # done to the room before
    fault: Callable[[], object] = nothing  # done in the process before the command
    others: tuple[tuple, ...] = ()
    ranks: bool = False  # the processes are ranks of one run
    signals: tuple[int, ...] = ()  # that may end a process
    must_equal: bool = True  # code 0 promises what a sound machine gives
    must_refuse: bool = False  # code 0 is wrong
    again: bool = True  # the same command then works
    variables: dict = field(default_factory=dict)  # of the environment
    check: Callable[[Path, list], str | None] = nothing  # what else is wrong in the room
    after: Callable[[Path], None] = nothing  # done to the room before the same command, and last


@dataclass
class Place:
    """The room, made anew for each case, and what commands give in it."""

    inputs: Path
    room: Path
    names: list[str]
    sound: dict[str, dict] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def clear(self) -> dict[str, bytes | None]:
        for path in self.room.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.inputs, self.room, dirs_exist_ok=True)
        return content_of(self.room)

    def run(
        self, case: Attempt, *, counted: Path | None = None
    ) -> list[tuple[int | None, str, str]]:
        """(exit code, stdout, stderr) of each process; None: it hung."""
        processes = [case.words, *case.others]
        meeting = find_port() if case.ranks else {}
        pids = []
        for number, words in enumerate(processes):
            given = meeting | rank_environment(number, len(processes), number) if meeting else {}
            given = {**given, **case.variables}
            pids.append(self._start(number, words, case.fault, given, counted))
        return [self._finish(number, pid) for number, pid in enumerate(pids)]

    def _start(self, number: int, words, fault, variables: dict, counted: Path | None) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            os.chdir(self.room)
            os.environ.update(variables)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream, name in enumerate(("stdout", "stderr"), start=1):
                path = self.room.parent / f"{name}-{number}"
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
                open_stream(stream)
            resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT), int(LIMIT)))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            sys.argv = ["albert-ds", *map(str, words)]
            sys.orig_argv = [sys.executable, "-m", "albert_ds", *map(str, words)]
            made = fault() if counted is None else break_calls(str(self.room), 0, 0)
            try:
                cli.run(albert_ds.main)
            finally:
                if counted is not None:
                    counted.write_text(str(len(made)))
        except SystemExit as ending:
            code = ending.code
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()  # which a forked process leaves out
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, AttributeError):
                    stream.flush()
            os._exit(code)

    def _finish(self, number: int, pid: int) -> tuple[int | None, str, str]:
        deadline = time.monotonic() + LIMIT
        code = None
        while code is None and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it left running
        if code is None:
            os.waitpid(pid, 0)
        said = [self.room.parent / f"{name}-{number}" for name in ("stdout", "stderr")]
        return code, *(path.read_text(errors="replace") for path in said)

    def learn_sound(self) -> None:
        """Run every command twice, and trainers on two ranks."""
        sound = {name: Attempt(what=name, words=find_words(name)) for name in self.names}
        for name in {*TRAINERS} & {*self.names}:
            words = (*find_words(name), *OF_RANKS)
            case = Attempt(what=f"{name}, 2 ranks", words=words, others=(words,), ranks=True)
            sound[case.what] = case
        for name, case in sound.items():
            outputs = []
            for _ in range(2):
                before = self.clear()
                counted = self.room.parent / "calls"
                ended = self.run(case, counted=counted)
                assert {code for code, _, _ in ended} == {0}, (name, ended)
                self.calls[name] = int(counted.read_text())
                names = {k for k in content_of(self.room) if k not in before}
                # A page says when it was made.
                new = {k: read_content(self.room / k) for k in names if not k.endswith(".html")}
                outputs.append({**new, "stdout": ended[0][1].encode()})
            one, other = outputs
            self.sound[name] = {k: v for k, v in one.items() if other.get(k, "none") == v}

    def judge(self, name: str, case: Attempt) -> tuple[str, str]:
        try:
            return self._judge(name, case)
        finally:
            case.after(self.room)

    def _judge(self, name: str, case: Attempt) -> tuple[str, str]:
        before = self.clear()
        case.prepare(self.room)
        damaged = content_of(self.room)
        changed = {k for k, v in damaged.items() if before.get(k, "none") != v}
        ended = self.run(case)
        said = "; ".join(f"{code}: {err.strip()[-600:]}" for code, _, err in ended)
        if any(code is None for code, _, _ in ended):
            return HANG, said
        allowed = (0, 2, 3, 4, 5, 75, *(-number for number in case.signals))
        for code, _, err in ended:
            if code not in allowed or "Traceback" in err:
                return TRACEBACK, said
        lost = self._find_lost(damaged)
        if lost:
            return LOST, f"{lost}; {said}"
        codes = {code for code, _, _ in ended}
        is_mute = [c for c, _, err in ended if c > 0 and "albert-ds: " not in err]
        if is_mute and not (case.ranks and len(is_mute) < len(ended)) and "stderr" not in case.what:
            return WRONG, f"no word of its cause: {said}"
        name = f"{name}, 2 ranks" if case.ranks else name
        if case.must_refuse and codes != {2} and (codes != {0} or self._find_other(name, ended)):
            return WRONG, said  # a flag may repeat the default
        if case.must_equal and 0 in codes and (other := self._find_other(name, ended)):
            return WRONG, f"code 0, and {other} is not what a sound machine gives; {said}"
        if message := case.check(self.room, ended):
            return WRONG, f"{message}; {said}"
        case.after(self.room)
        if case.again and codes != {0} and not changed:
            ((code, _, err),) = self.run(Attempt(what="", words=case.words))
            is_there = code == 2 and self._find_other(name, ()) is None
            if code != 0 and not is_there:
                return (TRACEBACK if code == 1 else WRONG), f"{said}; again: {code}: {err[-500:]}"
            if code == 0 and (other := self._find_other(name, ())):
                return WRONG, f"{said}; again, and {other} is not what a sound machine gives"
        return AS_PROMISED, said

    def _find_lost(self, before: dict) -> list[str]:
        after = content_of(self.room)
        return [
            path
            for path, content in before.items()
            if after.get(path, "gone") != content and not {*Path(path).parts} & {*NOTES}
        ]

    def _find_other(self, name: str, ended) -> str | None:
        for path, content in self.sound[name].items():
            if path == "stdout":
                if name in READS and ended and ended[0][1].encode() not in (content, b""):
                    return path
            elif {*Path(path).parts} & {*NOTES}:
                continue
            elif not os.path.lexists(self.room / path):
                return path
            elif content is not None and read_content(self.room / path) != content:
                return path
        return None


def open_stream(number: int) -> None:
    """stdout or stderr on this descriptor, as Python opens them."""
    name = ("stdin", "stdout", "stderr")[number]
    stream = open(number, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    stream.buffer.raw.name = f"<{name}>"
    setattr(sys, name, stream)


def find_words(name: str) -> tuple:
    return (*name.split(), *COMMANDS[name])


def read_content(path: Path) -> bytes | None:
    """What is in a file; of tensors without the order of their metadata, which is random."""
    if not path.is_file():
        return None
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        return content
    size = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:size]), sort_keys=True).encode() + content[size:]


def break_calls(folder: str, number: int, error: int | Callable, for_ever=False) -> list[str]:
    """Wrap the calls; the list grows by each that is made in `folder`.

    error: what the call fails with, or what happens instead of an error. for_ever: all later ones
    fail too.
    """
    made: list[str] = []

    def wrap(name: str, call):
        def checked(*given, **options):
            target = given[0] if given else ""
            if isinstance(target, int):  # a descriptor
                link = f"/proc/self/fd/{target}"
                target = os.readlink(link) if os.path.lexists(link) else ""
            if isinstance(target, (str, os.PathLike)):
                path = os.path.abspath(target)
                if path.startswith(folder):
                    made.append(f"{name} {path}")
                    if len(made) == number or for_ever and len(made) > number:
                        if callable(error):
                            error()
                        else:
                            raise OSError(error, os.strerror(error), os.fspath(target))
            return call(*given, **options)

        return checked

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    builtins.open = io.open = wrap("open", io.open)
    return made


def at_a_call(
    place: Place, draw, name, words, error, what: str, *, is_lasting: bool = False, **fields
) -> Iterator[Attempt]:
    """The case that meets `error` at a call drawn of those that the command makes."""
    if place.calls[name]:
        number = draw.randint(1, place.calls[name])
        yield Attempt(
            what=what.format(number),
            words=words,
            fault=lambda: break_calls(str(place.room), number, error, is_lasting),
            **fields,
        )


def list_failing_calls(*given) -> Iterator[Attempt]:
    """A full disk's note of history or TensorBoard is done without, and said."""
    for error in (*ERRORS, *ERRORS, *ERRORS):  # at three calls each
        yield from at_a_call(*given, error, f"{errno.errorcode[error]} at call {{}}")


def list_lasting_failures(*given) -> Iterator[Attempt]:
    for error in 2 * (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EROFS):
        what = f"{errno.errorcode[error]} from call {{}} on"
        yield from at_a_call(*given, error, what, is_lasting=True)


def kill_me(sent: signal.Signals) -> None:
    os.kill(os.getpid(), sent)


def list_kills(*given) -> Iterator[Attempt]:
    for sent in 2 * (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        yield from at_a_call(
            *given, partial(kill_me, sent), f"{sent.name} at call {{}}", signals=(sent,)
        )


def list_full_disks(place: Place, draw, name, words) -> Iterator[Attempt]:
    for number in range(4):
        left = 4096 * draw.choice((0, 1, 2, 5, 13, 34, 89, 233))

        def fill(room: Path, left: int = left) -> None:
            disk = os.statvfs(room)
            size = disk.f_bavail * disk.f_frsize - left
            with open(room / "filler", "wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, size)

        what = f"{left} bytes free, {number}"
        yield Attempt(what=what, words=words, prepare=fill, again=False)


def list_locks(place: Place, draw, name, words) -> Iterator[Attempt]:
    for error in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):

        def refuse(error: int = error) -> None:
            def flock(*_):
                raise OSError(error, os.strerror(error))

            fcntl.flock = flock

        yield Attempt(what=f"flock: {errno.errorcode[error]}", words=words, fault=refuse)


def lose(number: int, state: str) -> Callable[[], None]:
    """As a process finds it that is started so."""

    def fault() -> None:
        name = ("stdin", "stdout", "stderr")[number]
        if state == "closed":
            os.close(number)
            setattr(sys, name, None)
            return
        if state == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        else:
            reader, writer = os.pipe()
            os.dup2(writer, number)
            os.close(reader), os.close(writer)
        open_stream(number)

    return fault


def list_streams(place: Place, draw, name, words) -> Iterator[Attempt]:
    for number, stream in ((1, "stdout"), (2, "stderr")):
        for state in ("closed", "full", "without a reader"):
            what = f"{stream} {state}"
            fault = lose(number, state)
            yield Attempt(what=what, words=words, fault=fault, signals=(signal.SIGPIPE,))


def list_limits(place: Place, draw, name, words) -> Iterator[Attempt]:
    for files in (24, 28, 32, 40, 48, 64):  # with fewer Python itself cannot import

        def limit(files: int = files) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        yield Attempt(what=f"{files} open files", words=words, fault=limit)


def list_environments(place: Place, draw, name, words) -> Iterator[Attempt]:
    variables = ({"HOME": "/nowhere", "TMPDIR": "/nowhere"}, {"LC_ALL": "C", "LANG": "C"})
    for given in (*variables, {"COLUMNS": "x", "TERM": ""}, {"TMPDIR": "/proc"}):
        what = " ".join(f"{key}={value}" for key, value in given.items())
        yield Attempt(what=what, words=words, fault=lambda given=given: os.environ.update(given))
    yield Attempt(
        what="the current folder is deleted",
        words=words,
        fault=lambda: (os.mkdir("gone"), os.chdir("gone"), os.rmdir(place.room / "gone")),
        again=False,
    )


def list_two_at_once(place: Place, draw, name, words) -> Iterator[Attempt]:
    if name not in READS:
        for number in range(3):
            yield Attempt(what=f"twice at once, {number}", words=words, others=(words,))
    for other in BESIDE.get(name, ()):
        other = tuple(other.split())
        for number in range(2):
            what = f"beside {' '.join(other)}, {number}"
            yield Attempt(what=what, words=words, others=(other,), again=False)


def list_ranks(place: Place, draw, name, words) -> Iterator[Attempt]:
    """The second of two ranks is given another flag."""
    if name not in TRAINERS:
        return
    words = (*words, *OF_RANKS)
    for action, typed in list_typed(name, at_most=3):
        yield Attempt(
            what=f"rank 1 with {' '.join(typed)[:90]}",
            words=words,
            others=((*words, *typed),),
            ranks=True,
            must_refuse=not ({*words} >= {*typed}) and action.dest != "output",
            again=False,
        )


def list_actions(command: list[str]) -> list[argparse.Action]:
    parser = find_parser(command[0])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[command[1] if len(command) > 1 else command[0]]
    hidden = ("help", argparse.SUPPRESS, "wandb")
    return [a for a in parser._actions if a.dest not in hidden and a.option_strings]


def list_values(action: argparse.Action, name: str) -> list:
    """None: a switch. Neither a value that costs hours nor a place outside the room is written."""
    if action.nargs == 0:
        return [None]
    if action.choices is not None:
        return [*map(str, action.choices)]
    if isinstance(action.type, cli.Range):
        is_costly = any(word in action.dest for word in COSTLY) and name not in ("plan",)
        return [*NUMBERS, *([] if is_costly else [HUGE])]
    kind = f"{action.metavar} {action.dest} {action.help}".lower()
    return [*NAMES] if "file" in kind or "folder" in kind or "run" in kind else [*FREE]


def list_typed(name: str, at_most: int | None = None) -> Iterator[tuple[argparse.Action, tuple]]:
    """Each flag of a command with the words that type it, once for each value."""
    for action in list_actions(name.split()):
        for value in list_values(action, name)[:at_most]:
            yield action, (action.option_strings[-1], *([] if value is None else [value]))


def list_flags(place: Place, draw, name, words) -> Iterator[Attempt]:
    for _, typed in list_typed(name):
        what = " ".join(typed)[:90]
        yield Attempt(what=what, words=(*words, *typed), must_equal=False, again=False)


def list_damage(place: Place, draw, name, words) -> Iterator[Attempt]:
    """Each input of the command, damaged, gone, empty, a folder, or a link to itself."""
    named = [place.inputs / str(word) for word in words]
    files = {p for path in named for p in (path, *path.rglob("*")) if p.is_file()}
    for path in sorted(files):
        local = path.relative_to(place.inputs)
        has_checksum = local.suffix == ".tar" or "checkpoints" in local.parts
        for kind in (*HOW, "gone", "empty", "folder", "link", "pipe", "socket", "device"):
            content = damage(path.read_bytes() or b"x", kind, draw) if kind in HOW else b""

            def prepare(room: Path, local=local, kind=kind, content=content) -> None:
                target = room / local
                target.unlink()
                if kind == "folder":
                    target.mkdir()
                elif kind == "link":
                    target.symlink_to(target.name)
                elif kind == "pipe":
                    os.mkfifo(target)  # a reader waits for ever
                elif kind == "socket":
                    os.mknod(target, stat.S_IFSOCK | 0o644)
                elif kind == "device":
                    target.symlink_to("/dev/zero")  # without end
                elif kind != "gone":
                    target.write_bytes(content)

            yield Attempt(
                what=f"{local}: {kind}",
                words=words,
                prepare=prepare,
                must_equal=has_checksum,
                again=False,
            )
