"""All cases that run whole commands, by class, and how each ended."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bad_input import surroundings
from tests.bad_input.command_cases import (
    COMMANDS,
    Attempt,
    Place,
    find_words,
    list_damage,
    list_environments,
    list_failing_calls,
    list_flags,
    list_full_disks,
    list_kills,
    list_lasting_failures,
    list_limits,
    list_locks,
    list_ranks,
    list_streams,
    list_two_at_once,
)
from tests.conftest import ROOT

CLASSES = {
    "a call of the system fails": list_failing_calls,
    "a file system that stays broken": list_lasting_failures,
    "killed at a call": list_kills,
    "a full disk": list_full_disks,
    "no locks": list_locks,
    "lost streams": list_streams,
    "few open files": list_limits,
    "odd environments": list_environments,
    "two commands at once": list_two_at_once,
    "ranks with other arguments": list_ranks,
    "flags": list_flags,
    "damaged inputs": list_damage,
    **surroundings.CLASSES,
}
NEED_MOUNT = (list_full_disks, surroundings.list_full_inodes)


def list_cases(place: Place, share: float, seed: int) -> list[tuple[str, str, Attempt]]:
    """(class, command, case): of each class and command `share`, the same every time.

    In mixed order: what is cut off has tried some of each.
    """
    sample = []
    for kind, make in CLASSES.items():
        for name in place.names:
            draw = random.Random(f"{kind} {name} {seed}")
            made = make(place, draw, name, find_words(name))
            cases = [*{case.what: case for case in made}.values()]
            count = round(share * len(cases) + draw.random() * (share < 1))
            sample += [(kind, name, case) for case in draw.sample(cases, min(len(cases), count))]
    random.Random(seed).shuffle(sample)
    return sample


def try_commands(
    folder: Path, share: float = 1.0, seed: int = 0, only: list[str] | None = None
) -> Iterator[tuple]:
    """(class, command and case, verdict, what was said); those in folder/tried.jsonl are done.

    A disk can be filled by root alone, who may mount one.
    """
    record, room = folder / "tried.jsonl", folder / "room"
    room.mkdir(parents=True, exist_ok=True)
    if not (folder / "inputs").exists():
        # Elsewhere: SentencePiece starts OpenMP's threads, and a process that has had some cannot
        # be forked for another training.
        command = [sys.executable, "-m", "tests.bad_input.room", folder]
        subprocess.run(command, cwd=ROOT, check=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(room)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        place = Place(folder / "inputs", room, only or [*COMMANDS])
        place.learn_sound()
        lines = record.read_text().splitlines() if record.exists() else []
        done = {tuple(row[:2]): row for row in map(json.loads, lines)}
        with open(record, "a", encoding="utf-8") as writer:
            for kind, name, case in list_cases(place, share, seed):
                key = (kind, f"{name}: {case.what}".encode(errors="replace").decode())
                if CLASSES[kind] in NEED_MOUNT and not is_mounted:
                    continue
                if key not in done:
                    done[key] = [*key, *place.judge(name, case)]
                    writer.write(json.dumps(done[key]) + "\n")
                    writer.flush()
                yield tuple(done[key])
    finally:
        if is_mounted:
            subprocess.run(["umount", str(room)], check=True)
