"""python -m tests.golden: run the cases and compare them with the record, or record them."""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tests.golden.cases import (
    LAYOUTS,
    NAMES,
    PRETRAINED,
    TASKS,
    THREADS,
    Cases,
    Failure,
    find_difference,
)

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("golden.json")
AT_ONCE = 2


def describe_machine() -> str:
    """What decides how sums are rounded: the processor, torch and the threads."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.is_file() else []
    about = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    name = about.get("model name") or platform.processor() or platform.machine()
    numbers = "/".join(about.get(key, "?") for key in ("cpu family", "model", "stepping"))
    units = {"avx2", "avx512f", "avx512_bf16", "amx_tile"} & set(about.get("flags", "").split())
    threads = (f"{name}={value}" for name, value in THREADS.items())
    return ", ".join([f"{name} {numbers}", *sorted(units), f"torch {version('torch')}", *threads])


def read_git(folder: Path, *argv: str) -> str:
    """What a command of git prints; empty outside a clone."""
    done = subprocess.run(["git", "-C", str(folder), *argv], capture_output=True, text=True)
    return done.stdout.strip()


def run_case(cases: Cases, name: str, recorded: dict | None, is_record: bool):
    """Run one case, print its line; returns its hashes, and whether all is well."""
    start = time.monotonic()
    try:
        hashes = cases.run(name)
        difference = None
    except (Failure, OSError, subprocess.TimeoutExpired) as failure:
        hashes = None
        line = f"FAILED   {name}: {failure}"
    else:
        if recorded is not None:
            expected = {file: digests.split() for file, digests in recorded["files"].items()}
            difference = find_difference(expected, hashes)
        line = f"DIFFERS  {name}: {difference}" if difference else f"equal    {name}"
        if is_record:
            line = f"recorded {name}" + (f", which was other: {difference}" if difference else "")
        elif recorded is None:
            line = f"DIFFERS  {name}: it was never recorded"
            difference = "all"
    print(f"{line} ({time.monotonic() - start:.0f} s)", flush=True)
    return hashes, hashes is not None and (is_record or not difference)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the hashes to golden.json")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="these cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--code", type=Path, default=ROOT, help="clone to run (default: this one)")
    parser.add_argument("--output", type=Path, help="new folder to keep what the commands leave")
    args = parser.parse_args()
    if args.list:
        print("\n".join(NAMES))
        return 0
    chosen = args.only or NAMES
    record = json.loads(RECORD.read_text())
    machine = describe_machine()
    if not args.record and machine not in record:
        # The commit that wrote the record agrees with it.
        base = read_git(ROOT, "log", "-1", "--format=%h", "--", str(RECORD)) or "COMMIT"
        print(
            f"golden: nothing is compared, because no run on this machine ({machine}) is in "
            f"{RECORD.relative_to(ROOT)}; record the older code first: git worktree add ../base "
            f"{base} && python -m tests.golden --record --code ../base",
            file=sys.stderr,
        )
        return 2
    recorded = record.setdefault(machine, {})
    needed = chosen
    if {"export", *TASKS} & set(chosen) and PRETRAINED not in chosen:
        needed = [PRETRAINED, *chosen]
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        if args.output:
            args.output.mkdir(parents=True)
        cases = Cases(args.code, args.output or Path(temporary))
        try:
            cases.build_english()
        except Failure as failure:
            print(f"FAILED   all: {failure}")
            return 1
        done = {}
        # Exports and fine-tunings start from a run of the first group.
        first = [name for name in needed if name in LAYOUTS or name.startswith("shards")]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for group in (first, [name for name in needed if name not in first]):
                results = pool.map(
                    lambda name: run_case(cases, name, recorded.get(name), args.record),
                    group,
                )
                done |= dict(zip(group, results, strict=True))
    if args.record:
        commit = read_git(args.code, "describe", "--always", "--dirty", "--exclude", "*")
        for name, (hashes, _) in done.items():
            if hashes is not None:
                files = {file: " ".join(items.values()) for file, items in hashes.items()}
                recorded[name] = {"commit": commit, "files": files}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    bad = [name for name, (_, is_well) in done.items() if not is_well]
    word = "recorded" if args.record else "equal"
    print(f"golden: {len(done) - len(bad)} of {len(done)} cases are {word}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
