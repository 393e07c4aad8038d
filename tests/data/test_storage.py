"""Text and shards behind a URL are read like those on disk; a server that fails is asked again."""

import errno
import gzip
import itertools
import json
import pickle
import shutil
import threading
import time
import tracemalloc
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from albert_ds.base import storage
from albert_ds.base.cli import log_line
from albert_ds.base.errors import DamagedData, MachineFailed, UserError, hide_passwords
from albert_ds.base.storage import find_files, read_bytes
from albert_ds.data.shards import open_shards
from albert_ds.text import progress
from albert_ds.text.sources import cut_units, read_documents
from tests.data.drawing import samples_of, stream, take


class Server(ThreadingHTTPServer):
    """Serves a folder; `failures` requests of every file are answered as `fail` says."""

    failures = 0
    kind = "error"

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.asked: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that has hung up is no news."""


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        asked = self.server.asked[self.path] = self.server.asked.get(self.path, 0) + 1
        if asked > self.server.failures:
            super().do_GET()
        elif self.server.kind == "error":
            self.send_error(503)
        elif self.server.kind == "half":
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.rfile.read(1)  # until the client's patience has ended and it hangs up
            self.close_connection = True

    def do_HEAD(self):
        name = f"HEAD {self.path}"
        asked = self.server.asked[name] = self.server.asked.get(name, 0) + 1
        if self.server.kind == "error" and asked <= self.server.failures:
            self.send_error(503)
        else:
            super().do_HEAD()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(built, monkeypatch):
    for name, seconds in (("FIRST_PAUSE", 0.01), ("LONGEST_PAUSE", 0.02)):
        monkeypatch.setattr(storage, name, seconds)
    with Server(built) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["error", "silence", "half"])
def test_a_server_that_fails_twice_is_asked_a_third_time(server, built, monkeypatch, kind):
    server.failures = 2
    server.kind = kind
    if kind == "silence":
        monkeypatch.setattr(storage, "PATIENCE", 1.0)
    assert read_bytes(f"{server.url}/index.json", 1 << 20) == (built / "index.json").read_bytes()
    assert server.asked["/index.json"] >= 3  # a busy machine may be silent once more


def test_a_server_that_goes_on_failing_ends_with_damaged_data(server):
    server.failures = 99
    with pytest.raises(DamagedData, match=r"http.*/index.json: cannot be read after 6 tries: "):
        read_bytes(f"{server.url}/index.json", 1 << 20)
    assert server.asked["/index.json"] == storage.TRIES == 6


def test_a_missing_object_is_not_asked_for_twice(server):
    with pytest.raises(FileNotFoundError):
        read_bytes(f"{server.url}/absent", 1 << 20)
    assert server.asked["/absent"] == 1
    with pytest.raises(UserError, match="absent: no index.json here"):
        open_shards(f"{server.url}/absent", "train")


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_behind_a_url_give_the_same_stream(server, train, workers):
    server.failures = 1
    remote = open_shards(server.url, "train")
    assert remote.fingerprint == train.fingerprint
    expected = samples_of(take(stream([train]), 120))
    assert samples_of(take(stream([remote], workers=workers), 120)) == expected


def test_shards_behind_a_signed_url(server, train):
    """What signs a request is in the query of the folder's URL, and belongs to each file's."""
    signed = open_shards(f"{server.url}/?sv=2024&sig=abc", "train")
    assert signed.fingerprint == train.fingerprint
    expected = samples_of(take(stream([train]), 20))
    assert samples_of(take(stream([signed]), 20)) == expected
    assert [p for p in server.asked if not p.endswith("?sv=2024&sig=abc")] == []


def test_a_shard_that_is_missing_behind_a_url_is_named(server, built, tmp_path):
    folder = shutil.copytree(built, tmp_path / "data")
    name = json.loads((folder / "index.json").read_text())["splits"]["train"]["shards"][0]["name"]
    (folder / name).unlink()
    server.RequestHandlerClass = partial(Handler, directory=str(folder))
    with pytest.raises(UserError, match=f"{name}: this shard of index.json is missing"):
        list(take(stream([open_shards(server.url, "train")]), 800))


@pytest.fixture
def text(server, tmp_path):
    """The URL of a text of 6 MB, and its documents."""
    documents = [f"Document {number} has {number} in it." for number in range(150_000)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    server.RequestHandlerClass = partial(Handler, directory=str(tmp_path))
    return f"{server.url}/text.txt", documents


@pytest.mark.parametrize("kind", ["error", "half"])
def test_text_that_is_cut_short_is_read_again(server, text, kind):
    server.failures = 2
    server.kind = kind
    url, documents = text
    (unit,) = cut_units(find_files([url]))
    lines = [reading.document.lines[0] for reading in read_documents(unit)]
    assert lines == documents and server.asked["/text.txt"] > 2


def test_packed_text_behind_a_signed_url(server, text, tmp_path):
    packed = gzip.compress((tmp_path / "text.txt").read_bytes())
    (tmp_path / "text.gz").write_bytes(packed)
    (unit,) = cut_units(find_files([f"{server.url}/text.gz?sv=2024&sig=abc"]))
    assert [reading.document.lines[0] for reading in read_documents(unit)] == text[1]


@pytest.mark.parametrize("kind", ["error", "half"])
def test_text_that_is_always_cut_short_ends_with_damaged_data(server, text, kind):
    server.kind = kind
    (unit,) = cut_units([text[0]])
    server.failures = 10**6
    with pytest.raises(DamagedData, match=f"{text[0]}: cannot be read after 6 tries: ") as caught:
        list(read_documents(unit))
    assert "\n" not in str(caught.value)


def test_text_whose_server_tells_no_size_is_read_with_progress(server, text, monkeypatch, capsys):
    class Unsized(server.RequestHandlerClass.func):
        protocol_version = "HTTP/1.0"  # the end of the connection is the end of the text

        def send_header(self, name, value):
            if name != "Content-Length":
                super().send_header(name, value)

    server.RequestHandlerClass = partial(Unsized, **server.RequestHandlerClass.keywords)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    (unit,) = cut_units([text[0]])
    readings = progress.tell_progress(read_documents(unit), sum(piece.size for piece in unit))
    assert [reading.document.lines[0] for reading in readings] == text[1]
    assert "of 0 bytes of this unit of work" in capsys.readouterr().err


def answer(server, body, head_size=None, status=200):
    """Every GET is answered with what `body` gives, whatever part is asked for."""

    class Odd(SimpleHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            if status == 302:
                self.send_header("Location", self.path)
            if head_size is not None:
                self.send_header("Content-Length", str(head_size))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD() if status != 200 else self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for part in body() if status == 200 else ():
                    self.wfile.write(part)
                    self.wfile.flush()

        def log_message(self, *_):
            pass

    server.RequestHandlerClass = Odd
    return f"{server.url}/text.txt"


def drip():
    while True:
        yield b"x"
        time.sleep(0.05)


def test_a_server_without_an_end_is_read_as_far_as_was_asked_for(server, monkeypatch):
    """In bounded memory and time; a server that sends no parts is told from one that does."""
    url = answer(server, lambda: itertools.repeat(b"x" * (1 << 16)))
    assert read_bytes(url, 1000) == b"x" * 1000
    tracemalloc.start()
    url = answer(server, lambda: itertools.repeat(b"x" * (1 << 16), 3000), 3000 << 16)
    assert len(read_bytes(url, 1 << 16)) == 1 << 16
    with pytest.raises(DamagedData, match="its server sends no parts of files: download it"):
        file = storage.open_parts(url)
        file.seek(99)
        file.read(10)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20  # of 197 MB
    tracemalloc.stop()
    monkeypatch.setattr(storage, "PATIENCE", 0.2)
    monkeypatch.setattr(storage, "TRIES", 2)
    url = answer(server, drip)
    for read in (lambda: read_bytes(url, 1 << 20), lambda: storage.open_file(url)):
        with pytest.raises(DamagedData, match="under 1,000 bytes a second came in 0 s"):
            read()
    url = answer(server, lambda: itertools.repeat(b"x" * (1 << 16)), 9999)
    with pytest.raises(DamagedData, match="more came than its 9,999 bytes"):
        storage.open_file(url)


def test_a_short_body_is_damage(server, monkeypatch):
    monkeypatch.setattr(storage, "TRIES", 2)
    url = answer(server, lambda: [b"text\n" * 1000], 18_765)
    with pytest.raises(DamagedData, match="5,000 of 18,765 bytes came"):
        storage.open_file(url)


@pytest.mark.parametrize("status", [401, 403, 416, 451, 302])
def test_what_a_server_answers_is_named(server, status):
    url = answer(server, None, status=status)
    said = "redirects it without end" if status == 302 else f"answers {status}"
    for read in (lambda: find_files([url]), lambda: read_bytes(url, 1000)):
        with pytest.raises(UserError, match=f"text.txt: its server {said}"):
            read()


def test_a_missing_text_is_named_without_another_try(server):
    with pytest.raises(UserError, match="absent.txt: cannot be opened: no such file"):
        cut_units([f"{server.url}/absent.txt"])
    assert server.asked["HEAD /absent.txt"] == 1


def test_no_message_shows_the_password_of_a_url(server, capsys):
    url = server.url.replace("//", "//user:secret@")
    with pytest.raises(UserError, match=r"http://user:\*\*\*@.*/absent: no index.json") as caught:
        open_shards(f"{url}/absent", "train")
    assert "secret" not in str(caught.value)
    log_line(f"opening {url}")
    assert "secret" not in capsys.readouterr().err
    server.failures = 99
    with pytest.raises(DamagedData, match=r"user:\*\*\*@") as caught:
        open_shards(url, "train")
    assert "secret" not in str(pickle.loads(pickle.dumps(caught.value)))


@pytest.mark.parametrize(
    ("typed", "shown"),
    {
        "s3://me:s3cret@host/a": "s3://me:***@host/a",
        "https://me:s3@cret@host/a": "https://me:***@host/a",
        "https://me:s3/cret@host/a": "https://me:***@host/a",
        "https://hf_s3cret@host/a": "https://***@host/a",
        "https://host:8080/a@b": "https://host:8080/a@b",
        "https://host/b@c:d": "https://host/b@c:d",
        "https://host/a?sv=1&sig=s3cret": "https://host/a?sv=1&sig=***",
        "https://host/a?X-Amz-Signature=s3cret&b=1": "https://host/a?X-Amz-Signature=***&b=1",
        "https://host/a?access_token=s3cret: 404": "https://host/a?access_token=*** 404",
        "hf://datasets/a/b@v1/c": "hf://datasets/a/b@v1/c",
    }.items(),
)
def test_what_is_secret_in_a_url_is_not_shown(typed, shown):
    assert hide_passwords(f"--data {typed}") == f"--data {shown}"


def test_text_of_any_file_system_that_fsspec_knows():
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.txt", b"One.\n\nTwo.\n")
    memory.pipe("/corpus/deep/b.txt", b"Three.\n")
    memory.pipe("/odd/a[1] ?.txt", b"Odd.\n")
    assert find_files(["memory://odd/a[1] ?.txt"]) == ["memory:///odd/a[1] ?.txt"]
    files = find_files(["memory://corpus/**"])
    assert files == ["memory:///corpus/a.txt", "memory:///corpus/deep/b.txt"]
    (unit,) = cut_units(files)
    documents = [reading.document.lines for reading in read_documents(unit)]
    assert documents == [["One."], ["Two."], ["Three."]]
    with pytest.raises(UserError, match="memory://corpus/.*absent: matches no file"):
        find_files(["memory://corpus/*absent"])


@pytest.mark.parametrize("url", ["http://[::1", "http://x:99999", "simplecache::http://x"])
def test_what_is_no_url_is_named(url):
    for read in (lambda: open_shards(url, "train"), lambda: find_files([f"{url}/a.txt"])):
        with pytest.raises(UserError, match=r"not a URL|must be one URL|matches no file"):
            read()


@pytest.mark.parametrize("folder", ["pipe:touch harm", "pipe://touch harm", "nonsense://x"])
def test_no_location_is_a_command(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        open_shards(folder, "train")
    with pytest.raises(UserError):
        find_files([folder])
    assert not list(tmp_path.iterdir())


def test_a_copy_that_does_not_fit_on_the_disk_is_the_machine_s_failure(monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    memory = fsspec.filesystem("memory")
    memory.pipe("/large.txt", b"One.")
    monkeypatch.setattr(type(memory), "get_file", refuse)
    with pytest.raises(MachineFailed, match="large.txt: no copy in .*: No space left .* TMPDIR"):
        list(read_documents(cut_units(["memory://large.txt"])[0]))
