"""Damaged files: bytes flipped, cut, moved, doubled or put in; and texts in every packing."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

HOW = ("flip", "cut", "zeros", "double", "swap", "insert", "text")


def damage(content: bytes, kind: str, draw: random.Random) -> bytes:
    """`content`, damaged at a random place; never as it was."""
    at = draw.randrange(len(content))
    size = min(draw.choice((1, 7, 512, 1024)), len(content) - at)
    begin = content[:at]
    part = content[at : at + size]
    end = content[at + size :]
    match kind:
        case "flip":
            damaged = begin + bytes([part[0] ^ (1 << draw.randrange(8))]) + part[1:] + end
        case "cut":
            damaged = begin
        case "zeros":
            damaged = begin + bytes(size) + end
        case "double":
            damaged = begin + part + part + end
        case "swap":
            damaged = part + begin + end
        case "insert":
            damaged = begin + draw.randbytes(size) + part + end
        case _:
            damaged = begin + b"\xff<doc >{[\"'" + end
    return damaged if damaged != content else content[:-1] + bytes([content[-1] ^ 1])


def with_content(path: Path, content: bytes, read: Callable[[], object]) -> Callable[[], object]:
    """`read` while `path` holds `content`."""

    def run():
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            return read()
        finally:
            path.write_bytes(before)

    return run


def make_texts() -> dict[str, bytes]:
    """Forty documents in each form and packing, by name."""
    plain = "".join(f'<doc id="{n}">\nOne {n}. Two.\n</doc>\n' for n in range(40)).encode()
    lines = "".join(f'{{"text": "One {n}.\\nTwo."}}\n' for n in range(40)).encode()
    tar = make_tar({"a.txt": plain, "b.jsonl.gz": gzip.compress(lines)})
    return {
        **{"a.txt": plain, "a.jsonl": lines, "a.txt.gz": gzip.compress(plain)},
        **{"a.txt.bz2": bz2.compress(lines), "a.jsonl.xz": lzma.compress(lines)},
        **{"a.tar": tar, "a.tgz": gzip.compress(tar)},
        **make_tables([f"One {n}.\nTwo." for n in range(40)]),
    }


def make_tables(texts: list[str]) -> dict[str, bytes]:
    """A CSV, a Parquet file of several row groups and a stream of Arrow."""
    import pyarrow
    from pyarrow import parquet

    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(texts))
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    of_parquet, of_arrow = io.BytesIO(), io.BytesIO()
    parquet.write_table(table, of_parquet, row_group_size=9)
    with pyarrow.ipc.new_stream(of_arrow, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    return {
        "a.csv": b"id,text\n" + rows.encode(),
        "a.parquet": of_parquet.getvalue(),
        "a.arrow": of_arrow.getvalue(),
    }


def make_tar(files: dict[str, bytes]) -> bytes:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as writer:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            writer.addfile(member, io.BytesIO(content))
    return tar.getvalue()
