"""Damaged text, bytes flipped, cut, moved, doubled or put in; and variables of launchers."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bad_input.judge import Case, must_refuse

HOW = ("flip", "cut", "zeros", "double", "swap", "insert", "text")


def damage(content: bytes, how: str, draw: random.Random) -> bytes:
    """`content`, damaged at a random place; never as it was."""
    at = draw.randrange(len(content))
    size = min(draw.choice((1, 7, 512, 1024)), len(content) - at)
    begin, part, end = content[:at], content[at : at + size], content[at + size :]
    match how:
        case "flip":
            found = begin + bytes([part[0] ^ (1 << draw.randrange(8))]) + part[1:] + end
        case "cut":
            found = begin
        case "zeros":
            found = begin + bytes(size) + end
        case "double":
            found = begin + part + part + end
        case "swap":
            found = part + begin + end
        case "insert":
            found = begin + draw.randbytes(size) + part + end
        case _:
            found = begin + b"\xff<doc >{[\"'" + end
    return found if found != content else content[:-1] + bytes([content[-1] ^ 1])


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


def list_text_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """Text in any packing, damaged anywhere: documents, some marked as damaged, or code 3."""
    from albert_ds.text.sources import cut_units, read_documents

    plain = "".join(f'<doc id="{n}">\nOne {n}. Two.\n</doc>\n' for n in range(40)).encode()
    lines = "".join(f'{{"text": "One {n}.\\nTwo."}}\n' for n in range(40)).encode()
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as writer:
        for name, content in (("a.txt", plain), ("b.jsonl.gz", gzip.compress(lines))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            writer.addfile(member, io.BytesIO(content))
    texts = {
        **{"a.txt": plain, "a.jsonl": lines, "a.txt.gz": gzip.compress(plain)},
        **{"a.txt.bz2": bz2.compress(lines), "a.jsonl.xz": lzma.compress(lines)},
        **{"a.tar": tar.getvalue(), "a.tgz": gzip.compress(tar.getvalue())},
        **_make_tables([f"One {n}.\nTwo." for n in range(40)]),
    }
    for number in range(count):
        how = HOW[number // len(texts) % len(HOW)]
        name = list(texts)[number % len(texts)]
        path = folder / name
        path.write_bytes(texts[name])
        damaged = damage(texts[name], how, draw)

        def read(path=path):
            found = [r.document for unit in cut_units([str(path)]) for r in read_documents(unit)]
            for document in found:
                "\n".join(document.lines).encode()

        yield Case(f"{name}: {how}", with_content(path, damaged, read))


def _make_tables(texts: list[str]) -> dict[str, bytes]:
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


def list_world_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """Variables of launchers that are absent, wrong, or contradict each other."""
    from albert_ds.process.world import MPI_SIZES, TORCH_NAMES, read_world

    slurm = ("NTASKS", "STEP_NUM_TASKS", "PROCID", "LOCALID", "STEP_ID")
    names = [*TORCH_NAMES, *MPI_SIZES, *(f"SLURM_{name}" for name in slurm), "LOCAL_WORLD_SIZE"]
    values = ("0", "1", "2", "3", "-1", "x", "", "9" * 30, "1.5", "\u0663", "localhost", "29500")
    for _ in range(count):
        environ = {name: draw.choice(values) for name in draw.sample(names, draw.randint(1, 6))}

        def read(environ=environ):
            world = read_world(environ)
            several = [environ.get(name) for name in ("WORLD_SIZE", *MPI_SIZES)]
            alone = world.size == 1 and any(value not in (None, "1") for value in several)
            if not 0 <= world.rank < world.size or alone:
                must_refuse(lambda: world)()

        yield Case(f"environment {environ}", read)
