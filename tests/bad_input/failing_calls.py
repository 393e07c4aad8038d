"""A command whose Nth call of the file system inside FOLDER fails, once.

failing_calls.py FOLDER N ERRNO COUNTED COMMAND...     N 0: none; the calls are listed in COUNTED
"""

import builtins
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

CALLS = ("open", "replace", "rename", "mkdir", "unlink", "fsync", "scandir", "listdir", "stat")


def break_calls(folder: str, number: int, error: int | Callable, for_ever=False) -> list[str]:
    """Wrap the calls; the list grows by each that is made in `folder`.

    error: what the call fails with, or what happens instead of an error. for_ever: all later ones
    fail too.
    """
    made: list[str] = []

    def wrap(name: str, call):
        def checked(*given, **how):
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
            return call(*given, **how)

        return checked

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    builtins.open = io.open = wrap("open", io.open)
    return made


def main() -> None:
    folder, number, error, counted, *words = sys.argv[1:]
    made = break_calls(folder, int(number), int(error))
    from albert_ds import __main__, cli

    sys.argv = ["albert-ds", *words]
    try:
        cli.run(__main__.main)
    finally:
        if number == "0":
            Path(counted).write_text("\n".join(made))


if __name__ == "__main__":
    main()
