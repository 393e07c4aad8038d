"""Damaged and hostile files: each is refused by name, and no code in them ever runs.

A shard raises DamagedData (code 3) that names shard and record. A vocabulary, an index or a folder
from elsewhere raises UserError (code 2). Damaged checkpoints: checkpoint/test_damage.py.
"""

import io
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from albert_ds.data.shards import Shard, open_shards
from albert_ds.errors import DamagedData, UserError
from albert_ds.settings.pretrain import read_config
from tests.conftest import train_command

MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BLOCK = 512


class Bomb:
    """A pickle that creates a file when it is run."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture
def copy(data, tmp_path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "copy"))


def read_all(folder: Path) -> None:
    """Every record of the first shard, as training reads it."""
    shard = Shard(open_shards(folder, "train"), 0)
    for number in range(len(shard)):
        shard[number]


def first_shard(folder: Path) -> Path:
    return min(folder.glob("train-*.tar"))


def refused_shard(folder: Path) -> str:
    with pytest.raises(DamagedData) as caught:
        read_all(folder)
    assert str(first_shard(folder)) in str(caught.value) and "record" in str(caught.value)
    return str(caught.value)


@MANY
@given(st.floats(0, 1, exclude_max=True))
def test_a_shard_cut_at_any_byte(copy, where):
    path = first_shard(copy)
    whole = path.read_bytes()
    used = len(whole.rstrip(b"\0"))  # the empty blocks at the end of a tar may be missing
    path.write_bytes(whole[: int(where * used)])
    try:
        refused_shard(copy)
    finally:
        path.write_bytes(whole)


@MANY
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_shard_with_any_bit_flipped_is_refused_or_reads_the_same(copy, where, bit):
    path = first_shard(copy)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    at = int(where * len(whole.rstrip(b"\0")))
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        read_all(copy)
    except DamagedData as error:
        assert str(path) in str(error)
    else:
        # Only the padding between records belongs to no header and no record.
        assert whole[at] == 0 and not is_content(whole, at)
    finally:
        path.write_bytes(whole)


def is_content(whole: bytes, at: int) -> bool:
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        return any(
            member.offset <= at < member.offset_data + member.size for member in tar.getmembers()
        )


def rewrite_first_member(path: Path, **changes) -> None:
    """The same tar, its first member with other fields; `content` replaces its bytes."""
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar.getmembers()]  # ty: ignore
    content = changes.pop("content", members[0][1])
    changes.setdefault("size", len(content))
    for name, value in changes.items():
        setattr(members[0][0], name, value)
    with open(path, "wb") as file:
        for number, (member, data) in enumerate(members):
            data = content if number == 0 else data
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            file.write(data + bytes(-len(data) % BLOCK))
        file.write(bytes(2 * BLOCK))


@pytest.mark.parametrize(
    "name", ["../../evil.seq", "/etc/passwd", "..", "train-000000-00000.seq/../x", "a" * 90, ""]
)
def test_a_member_named_for_another_place(copy, name, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    rewrite_first_member(first_shard(copy), name=name)
    refused_shard(copy)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_a_member_that_is_no_file(copy, kind):
    rewrite_first_member(first_shard(copy), type=kind, linkname="/etc/passwd", content=b"", size=0)
    refused_shard(copy)


@pytest.mark.parametrize("size", [8**11 - 1, 2**62, 2**40, 10**9, 0])
def test_a_member_that_declares_another_size(copy, size):
    rewrite_first_member(first_shard(copy), size=size)
    refused_shard(copy)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_in_a_shard_is_never_run(copy, tmp_path, protocol):
    content = pickle.dumps(Bomb(tmp_path / "ran"), protocol=protocol)
    rewrite_first_member(first_shard(copy), content=content)
    refused_shard(copy)
    assert not (tmp_path / "ran").exists()


def spoil_vocab(folder: Path, how: str) -> None:
    path = folder / "spiece.model"
    whole = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "longer":
            path.write_bytes(whole + b"\n\x08\n\x03abc\x15\x00\x00\x00\x00")
        case "flipped":
            path.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
        case "a pickle":
            path.write_bytes(pickle.dumps(Bomb(folder / "ran")))
        case "a folder":
            path.unlink()
            path.mkdir()


@pytest.mark.parametrize(
    "how", ["missing", "empty", "cut", "longer", "flipped", "a pickle", "a folder"]
)
def test_a_wrong_vocabulary(copy, tmp_path, how):
    spoil_vocab(copy, how)
    with pytest.raises(UserError, match="spiece.model"):
        read_config(train_command(copy, tmp_path / "run")[2:], world_size=2)
    assert not (copy / "ran").exists() and not (tmp_path / "run").exists()


@MANY
@given(st.one_of(st.binary(max_size=200), st.text(max_size=50).map(str.encode)))
def test_an_index_of_any_bytes(copy, content):
    (copy / "index.json").write_bytes(content)
    with pytest.raises(UserError, match="index.json"):
        open_shards(copy, "train")
