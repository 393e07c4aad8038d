"""However the text is cut into units of work, every document is read once."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_ds.data.storage import find_files
from albert_ds.errors import UserError
from albert_ds.text.sources import cut_units, read_documents
from tests.data.corpus import make_documents, read_all, write_wiki
from tests.text.test_documents import DOCUMENTS, JSON, TEXT, WIKI


@pytest.mark.parametrize("content", [WIKI, TEXT, JSON], ids=["wiki", "text", "json"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_cut_gives_the_same_documents(tmp_path, content, newline):
    path = tmp_path / "corpus"
    path.write_bytes((content * 5).replace("\n", newline).encode())
    for unit_bytes in range(1, path.stat().st_size + 2):
        found = [document.lines for document in read_all([path], unit_bytes)]
        assert found == DOCUMENTS * 5, unit_bytes


@given(
    lines=st.lists(
        st.sampled_from(["", " ", "\u3000", "a", "b c", "\u00e9\u4e2d", "<doc x", "{"]), max_size=30
    ),
    unit_bytes=st.integers(1, 60),
)
def test_odd_texts_are_cut_like_any_other(lines, unit_bytes, tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "text"
    path.write_text("start of a text\n" + "\n".join(lines))
    whole = [document.lines for document in read_all([path])]
    assert [document.lines for document in read_all([path], unit_bytes)] == whole


def test_units_are_of_about_one_size(tmp_path):
    paths = []
    for number in range(8):
        paths.append(write_wiki(tmp_path / str(number), make_documents(10 * number, seed=number)))
    with patch("albert_ds.text.sources.UNIT_BYTES", 20_000):
        units = cut_units([str(path) for path in paths])
    sizes = [sum(piece.size for piece in unit) for unit in units]
    assert sum(sizes) == sum(path.stat().st_size for path in paths)
    assert max(sizes) < 25_000  # up to the end of the document at hand
    assert len(units) < 3 * sum(sizes) / 20_000
    assert len(read_all(paths, 20_000)) == sum(10 * number for number in range(8))


def test_progress_reaches_the_size_of_the_files(tmp_path):
    paths = [write_wiki(tmp_path / name, make_documents(50)) for name in "ab"]
    (unit,) = cut_units([str(path) for path in paths])
    positions = [reading.bytes_read for reading in read_documents(unit)]
    assert positions == sorted(positions)
    assert positions[-1] == sum(path.stat().st_size for path in paths)


def test_find_files(tmp_path):
    for name in ("AA/wiki_01", "AA/wiki_00", "AB/wiki_00"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    everything = [f"{tmp_path}/{name}" for name in ("AA/wiki_00", "AA/wiki_01", "AB/wiki_00")]
    assert find_files([f"{tmp_path}/A?/*"]) == everything
    assert find_files([f"{tmp_path}/**", f"{tmp_path}/AA/wiki_00"]) == everything
    (tmp_path / "odd[1].txt").touch()
    assert find_files([f"{tmp_path}/odd[1].txt"]) == [f"{tmp_path}/odd[1].txt"]
    with pytest.raises(UserError, match=r"--input .*/AC/\*: matches no file$"):
        find_files([f"{tmp_path}/A?/*", f"{tmp_path}/AC/*"])
    (tmp_path / ".hidden").touch()
    assert find_files([str(tmp_path)]) == [*everything, f"{tmp_path}/odd[1].txt"]
    (tmp_path / "odd[1]").mkdir()
    with pytest.raises(UserError, match=r"--input .*/odd\[1\]: matches no file$"):
        find_files([f"{tmp_path}/odd[1]"])


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="absent: cannot be opened: No such file"):
        read_all([tmp_path / "absent"])
