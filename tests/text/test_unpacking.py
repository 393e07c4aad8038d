"""Every packing gives the same documents; a cut or a flipped bit never ends a file quietly."""

import bz2
import gzip
import io
import lzma
import os
import tarfile

import pytest

from albert_ds.base.errors import DamagedData
from albert_ds.text.sources import zstd
from tests.data.corpus import make_documents, read_all, write_wiki
from tests.text.test_documents import DOCUMENTS, TEXT, WIKI

PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def pack_tar(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def read(path):
    return [document.lines for document in read_all([path])]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packings(tmp_path, suffix):
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(PACKERS[suffix](WIKI.encode()))
    assert read(path) == DOCUMENTS
    # Several frames one after the other are one text.
    path.write_bytes(b"".join(PACKERS[suffix](part.encode()) for part in (TEXT, "\n\nMore.\n")))
    assert read(path) == [*DOCUMENTS, ["More."]]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_second_stream_is_not_the_end(tmp_path, suffix):
    first, second = (PACKERS[suffix](text.encode()) for text in (TEXT, "\n\nMore.\n"))
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(first + bytes(8) + second + bytes(4))  # zeros between streams are allowed
    assert read(path) == [*DOCUMENTS, ["More."]]
    path.write_bytes(first + bytes([second[0], second[1] ^ 1]) + second[2:])
    with pytest.raises(DamagedData, match=f"corpus{suffix}: cannot be read after line "):
        read(path)


@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_tars_of_anything(tmp_path, suffix):
    members = {
        "b/wiki": WIKI.encode(),
        "a.txt.gz": gzip.compress(TEXT.encode()),
        "../../../outside": b"Never written anywhere.\n",
        "inner.tar": pack_tar({"text": b"In a tar in a tar.\n"}),
    }
    path = tmp_path / f"corpus.tar{suffix}"
    path.write_bytes(PACKERS.get(suffix, bytes)(pack_tar(members)))
    before = set(os.walk(tmp_path.parent).__next__()[2])
    last = [["Never written anywhere."], ["In a tar in a tar."]]
    assert read(path) == [*DOCUMENTS, *DOCUMENTS, *last]
    assert set(os.walk(tmp_path.parent).__next__()[2]) == before


def test_links_and_folders_in_a_tar_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("Not part of the corpus.\n")
    with tarfile.open(tmp_path / "corpus.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo("link")
            member.type = kind
            member.linkname = str(tmp_path / "secret")
            tar.addfile(member)
        tar.addfile(tarfile.TarInfo("empty"))
    assert read(tmp_path / "corpus.tar") == []


@pytest.mark.parametrize("suffix", [*PACKERS, ".tar", ".tar.gz"])
def test_cut_anywhere_is_noticed(tmp_path, suffix):
    text = write_wiki(tmp_path / "wiki", make_documents(30)).read_bytes()
    if suffix.startswith(".tar"):
        text = pack_tar({"a": text, "b": text})
    whole = PACKERS.get(suffix.removeprefix(".tar"), bytes)(text)
    path = tmp_path / f"corpus{suffix}"
    for size in (1, len(whole) // 3, len(whole) // 2, len(whole) - 5):
        if suffix == ".tar":
            size = min(size // 512 * 512, len(text) - tarfile.RECORDSIZE)  # a block is missing
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedData, match=f"corpus{suffix}.*(cannot be read|cut short)"):
            read(path)
    path.write_bytes(b"not packed at all" * 99)
    with pytest.raises(DamagedData, match=f"corpus{suffix}: cannot be read"):
        read(path)


def test_a_damaged_header_in_a_tar_is_not_its_end(tmp_path):
    text = WIKI.encode() * 20
    content = bytearray(pack_tar({"a": text, "b": text}))
    second = content.index(b"b\0\0\0", 512)
    content[second] ^= 1
    (tmp_path / "corpus.tar").write_bytes(content)
    with pytest.raises(DamagedData, match="corpus.tar: .*the tar is cut short or damaged"):
        read(tmp_path / "corpus.tar")


@pytest.mark.parametrize("suffix", ["", *PACKERS])
@pytest.mark.parametrize("blocks", [2, 20, 128])  # with which each ends
def test_tars_put_together_are_read_to_the_last(tmp_path, suffix, blocks):
    """As `cat` does it; a damaged or missing part, or what is no tar, is not the end."""
    path = tmp_path / f"corpus.tar{suffix}"
    pack = PACKERS.get(suffix, bytes)
    parts = []
    for name in "abc":
        tar = pack_tar({name: f"Text of {name}.\n".encode() * 40, f"{name}2": b"More.\n"})
        parts.append(tar[: 4 * 512] + bytes(blocks * 512))
    lines = [line for document in PARTS for line in document]
    path.write_bytes(pack(b"".join(parts)))
    assert [line for document in read(path) for line in document] == lines
    path.write_bytes(b"".join(map(pack, parts)))
    assert [line for document in read(path) for line in document] == lines
    for wrong in (b"x", bytes(511) + b"x", bytes(512) + b"x", parts[0][:600], parts[0][:1024]):
        path.write_bytes(pack(b"".join(parts) + wrong))
        with pytest.raises(DamagedData, match="corpus.tar.*: cannot be read"):
            read(path)


PARTS = [[f"Text of {name}."] * 40 + ["More."] for name in "abc"]
