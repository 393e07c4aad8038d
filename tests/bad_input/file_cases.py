"""Damaged files of every kind: bytes flipped, cut, moved, doubled or put in."""

import bz2
import gzip
import io
import lzma
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bad_input.judge import Case, must_equal, must_refuse

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


def _with(path: Path, content: bytes, read: Callable[[], object]) -> Callable[[], object]:
    """`read` while `path` holds `content`."""

    def run():
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            return read()
        finally:
            path.write_bytes(before)

    return run


def list_shard_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """A damaged shard is refused."""
    from albert_ds.data.shards import Shard, open_shards

    own = Path(shutil.copytree(data, folder / "shards"))
    source = open_shards(own, "train")
    path = own / source.shards[1].name
    content = path.read_bytes()

    def read():
        shard = Shard(source, 1)
        return [
            (s.document, s.ends.tolist(), s.ids.tolist())
            for s in (shard[number] for number in range(len(shard)))
        ]

    read()
    for number in range(count):
        how = HOW[number % len(HOW)]
        damaged = damage(content, how, draw)
        yield Case(f"shard: {how}", must_refuse(_with(path, damaged, read)))


def list_checkpoint_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """Weights and state that are damaged in any byte are never read."""
    import torch

    from albert_ds.checkpoint.folder import TrainState, find_damage, write_checkpoint
    from albert_ds.model.albert import AlbertForPretraining
    from tests.training import SMALL

    run = folder / "run_of_checkpoint"
    run.mkdir()
    weights = AlbertForPretraining(SMALL, seed=0).state_dict()
    moments = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
    files = {"weights": weights, "exp_avg": moments, "exp_avg_sq": moments}
    tensors = {f"{name}.safetensors": value for name, value in files.items()}
    state = TrainState(step=4, samples=32, updates=4, loss_scale=None)
    assert write_checkpoint(run, tensors, state, keep_last=1, keep_every=None) is None
    (newest,) = (run / "checkpoints").glob("step-*")
    for number in range(count):
        how = HOW[number % len(HOW)]
        name = draw.choice([*tensors, "state.json"])
        damaged = damage((newest / name).read_bytes(), how, draw)
        check = _with(newest / name, damaged, lambda: find_damage(newest))
        yield Case(f"{name}: {how}", must_be_said(check, damaged, newest / name))


def must_be_said(check: Callable[[], object], damaged: bytes, path: Path) -> Callable[[], object]:
    """The damage is named in one line; white space in state.json is none."""
    import json

    def run():
        found = check()
        if found:
            assert isinstance(found, str) and "\n" not in found
        elif path.suffix != ".json" or json.loads(damaged) != json.loads(path.read_bytes()):
            must_refuse(lambda: "a sound checkpoint")()

    return run


def list_vocab_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """A vocabulary whose sha256 is known is that one or refused; an unknown one crashes nothing."""
    from albert_ds.data.shards import open_shards
    from albert_ds.data.vocab import read_vocab

    own = Path(shutil.copytree(data, folder / "vocabulary"))
    path = own / "spiece.model"
    content = path.read_bytes()
    for number in range(count):
        how = HOW[number % len(HOW)]
        damaged = damage(content, how, draw)
        yield Case(
            f"vocabulary of shards: {how}",
            must_refuse(_with(path, damaged, lambda: open_shards(own, "train"))),
        )
        yield Case(f"vocabulary: {how}", _with(path, damaged, lambda: read_vocab(path)))


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

        yield Case(f"{name}: {how}", _with(path, damaged, read))


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


def list_task_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """Tables of GLUE and cached features that are damaged."""
    import numpy as np

    from albert_ds.data.shards import open_shards
    from albert_ds.tasks.features import FeatureBuilder, cached, read_features
    from albert_ds.tasks.recipes import RECIPES
    from albert_ds.tasks.registry import TASKS

    vocab, own = open_shards(data, "train").vocab, folder / "glue"
    own.mkdir()
    table = "sentence\tlabel\n" + "".join(f"a sentence {n}\t{n % 2}\n" for n in range(30))
    (own / "dev.tsv").write_text(table)
    task, lengths = TASKS["glue/sst2"], RECIPES["glue/sst2"].lengths
    builder = FeatureBuilder()
    builder.add_row(0, (builder.add_text([5, 6, 7]), 0, 3))
    builder.count("examples")
    features = builder.build(labels=np.zeros(1, np.int64))
    path = folder / "key.safetensors"
    cached(folder, "key", lambda: features)
    sound = {name: array.tolist() for name, array in features.arrays.items()}
    for number in range(count):
        how = HOW[number % len(HOW)]
        damaged = damage(table.encode(), how, draw)
        build = _with(own / "dev.tsv", damaged, lambda: task.build(own, "dev", vocab, lengths))
        yield Case(f"dev.tsv: {how}", build)
        damaged = damage(path.read_bytes(), how, draw)
        yield Case(f"features: {how}", _with(path, damaged, lambda: read_features(path)))

        def again():
            found = cached(folder, "key", lambda: features).arrays
            return {name: array.tolist() for name, array in found.items()}

        yield Case(f"features, again: {how}", must_equal(_with(path, damaged, again), sound))


def list_metrics_cases(folder: Path, data: Path, draw, count: int) -> Iterator[Case]:
    """metrics.jsonl with damage: a resumed run keeps every whole record before its step."""
    import json

    from albert_ds.json_files import read_lines
    from albert_ds.report.metrics import cut_back

    records = [{"step": step, "loss": 1.5} for step in range(1, 20)]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path = folder / "metrics.jsonl"
    path.write_bytes(content)

    def resume():
        cut_back(path, 12)
        assert all(record["step"] <= 12 for record in read_lines(path))

    for number in range(count):
        how = HOW[number % len(HOW)]
        yield Case(f"metrics.jsonl: {how}", _with(path, damage(content, how, draw), resume))


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
