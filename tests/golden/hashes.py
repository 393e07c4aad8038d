"""Hashes of what a file means: of each tensor, the members of a tar, each value of a JSON."""

import hashlib
import json
import tarfile
from collections import defaultdict
from pathlib import Path

# What the clock decides, in metrics.jsonl.
CLOCK = {
    "step_seconds",
    "step_seconds_p90",
    "samples_per_second",
    "tokens_per_second",
    "mfu",
    "data_wait_fraction",
}
# state.json also has checksums of the files, which depend on the metadata in them.
STATE = {"step", "samples", "updates", "loss_scale"}
DIGITS = 12


def hash_files(folder: Path, *patterns: str) -> dict[str, dict[str, str]]:
    """Name of each file in `folder` that matches a pattern -> item in the file -> its hash."""
    paths = [sorted(folder.glob(pattern)) for pattern in patterns]
    missing = [pattern for pattern, matches in zip(patterns, paths, strict=True) if not matches]
    if missing:
        raise FileNotFoundError(f"nothing matches {folder / missing[0]}")
    return {str(path.relative_to(folder)): hash_items(path) for path in sorted(sum(paths, []))}


def hash_items(path: Path) -> dict[str, str]:
    """Name of each item in a file -> hash of its name and content, in the order of the names."""
    if path.suffix == ".safetensors":
        items = read_tensors(path)
    elif path.suffix == ".tar":
        with tarfile.open(path) as tar:
            contents = ((member.name, tar.extractfile(member).read()) for member in tar)
            members = [[name, hashlib.sha256(content).hexdigest()] for name, content in contents]
        items = {"members": as_bytes(members)}
    elif path.suffix == ".jsonl":
        items = {name: as_bytes(values) for name, values in read_columns(path).items()}
    elif path.suffix == ".json":
        leaves = flatten(json.loads(path.read_text("utf-8")))
        if path.name == "state.json":
            leaves = {name: leaves[name] for name in STATE}
        items = {name: as_bytes(value) for name, value in leaves.items()}
    else:
        items = {"content": path.read_bytes()}
    return {
        name: hashlib.sha256(name.encode() + b"\0" + items[name]).hexdigest()[:DIGITS]
        for name in sorted(items)
    }


def read_tensors(path: Path) -> dict[str, bytes]:
    """Name of each tensor -> its type, shape and values. Metadata of the file is left out."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        first, last = (start + offset for offset in about["data_offsets"])
        tensors[name] = as_bytes([about["dtype"], about["shape"]]) + content[first:last]
    return tensors


def read_columns(path: Path) -> dict[str, list]:
    """Each metric of a metrics.jsonl -> its [step, value] in order, without those of the clock."""
    columns = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for name in record.keys() - CLOCK:
            columns[name].append([record["step"], record[name]])
    return columns


def flatten(value, name: str = "") -> dict:
    """A JSON object as one level: {"a": {"b": 1}} gives {"a.b": 1}."""
    if not isinstance(value, dict):
        return {name: value}
    parts = (flatten(value[key], f"{name}.{key}" if name else key) for key in value)
    return {key: leaf for part in parts for key, leaf in part.items()}


def as_bytes(value) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
