"""Damaged text, bytes flipped, cut, moved, doubled or put in; and variables of launchers."""

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.bad_input.judge import Case, SilentlyWrong, must_refuse

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


def list_left_out_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """Text that was left out without a word: all of it is read, or one line says why not."""
    from albert_ds.base.storage import find_files
    from albert_ds.text.sources import cut_units, read_documents

    def read_all(path: Path) -> list[str]:
        units = cut_units(find_files([str(path)]))
        return ["\n".join(r.document.lines) for unit in units for r in read_documents(unit)]

    def expect(path: Path, texts: list[str]) -> Callable[[], object]:
        def run():
            if missing := {*texts} - {*read_all(path)}:
                raise SilentlyWrong(f"left out: {sorted(missing)[:3]}")

        return run

    magic = (
        "PAR1",
        "PARE",
        "ARROW1",
        "FEA1",
        "GIF89a",
        "BZh91AY",
        "RIFF",
        "Obj",
        "MZ",
        "ID3",
        "PK",
    )
    braces = ("{Note}", "{{Infobox}}", '["', "[1]", "{", "[]", '{"a"', "<head of", "<doc", "sep=")
    for number in range(count):
        room = folder / f"left out {number}"
        room.mkdir()
        texts = [f"Part {n} of {number}. {'More. ' * draw.randrange(9)}".strip() for n in range(40)]
        cuts = sorted(draw.sample(range(1, 40), draw.randint(1, 3)))
        parts = [texts[i:j] for i, j in zip([0, *cuts], [*cuts, 40], strict=True)]
        if number % 3 == 0:
            name = draw.choice(("a.tar", "a.tgz", "a.parquet", "a.arrow"))
            packed = [
                _make_tables(part)[name] if name[2] in "pa" else _make_tar(part, name)
                for part in parts
            ]
            (room / name).write_bytes(b"".join(packed))
            yield Case(f"{name}: {len(parts)} put together", expect(room / name, texts))
        elif number % 3 == 1:
            first = draw.choice(magic + braces) + draw.choice(("", " is a word", ", text", "S"))
            (room / "a.txt").write_text("\n\n".join([first, *texts]))
            yield Case(f"text that begins with {first!r}", expect(room / "a.txt", texts))
        elif number % 2:
            delimiter, blank = draw.choice(",;\t|"), draw.choice(("", " ", "  "))
            rows = [["id", "text", "note"], *(["1", text, "x"] for text in texts)]
            table = "".join((delimiter + blank).join(row) + "\n" for row in rows)
            table = draw.choice(("", f"sep={delimiter}\n", "\ufeff")) + table
            (room / "a.csv").write_text(table, encoding="utf-8")
            yield Case(f"header {table[:24]!r}", expect(room / "a.csv", texts))
        else:
            (room / "a.txt").write_text("\n\n".join(texts))
            odd = room / draw.choice(("b", "b.txt", "B.gz"))
            how = draw.choice(("link", "loop", "FIFO"))
            os.mkfifo(odd) if how == "FIFO" else odd.symlink_to("absent" if how == "link" else odd)
            yield Case(f"a folder with a {how}", must_refuse(partial(read_all, room)))


def _make_tar(texts: list[str], name: str) -> bytes:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as writer:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(str(number))
            member.size = len(text.encode())
            writer.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(tar.getvalue()) if name.endswith("gz") else tar.getvalue()


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
