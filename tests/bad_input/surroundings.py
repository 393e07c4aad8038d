"""Commands among what others have made: names, links, servers, ports, outputs, small disks.

Each class is made by rule, as in command_cases.py.
"""

import ctypes
import gzip
import http.server
import io
import json
import os
import re
import resource
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from albert_ds.base import storage
from tests.bad_input.command_cases import (
    OF_RANKS,
    TRAINERS,
    Attempt,
    Place,
    at_a_call,
    list_actions,
    nothing,
)
from tests.bad_input.room import READS, WRITES

TEXT_COMMANDS = ("vocab", "shards")
DOCUMENT = "The value of an object is a name. Objects whose value can change are mutable. " * 40
NUMBER = 24  # documents of made text: enough for a vocabulary of 300 pieces
ODD_NAMES = ("\x1b[31mred", "a\rb", "a\tb", "\x9b1mc", "a\x07b", "\u202etxt")
OBEYED = "\x1b\x9b\x07\u202e"  # of these characters, what a terminal must never get


def list_flags_twice(place: Place, draw, name, words) -> Iterator[Attempt]:
    """A list that is typed twice: the first part counts too, so a wrong one is refused."""
    for action in list_actions(name.split()):
        if action.nargs != "+":
            continue
        flag = action.option_strings[-1]
        for wrong in ("nowhere", "ds.json", "-1", "nonsense"):
            if flag in words:  # what stands in the command comes second
                typed = (*words[: len(name.split())], flag, wrong, *words[len(name.split()) :])
                yield Attempt(
                    what=f"{flag} {wrong} first",
                    words=typed,
                    must_refuse=wrong == "nowhere",
                    must_equal=False,
                    again=False,
                )
            yield Attempt(
                what=f"{flag} {wrong}, and again",
                words=(*words, flag, wrong, flag, wrong),
                must_equal=False,
                again=False,
            )


def as_tar(documents: list[str], name: str = "{}.txt") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for number, text in enumerate(documents):
            member = tarfile.TarInfo(name.format(number))
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def as_table(documents: list[str], ending: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = io.BytesIO()
    rows = pa.table({"text": documents})
    if ending == "parquet":
        pq.write_table(rows, made)
    else:
        with pa.ipc.new_stream(made, rows.schema) as writer:
            writer.write_table(rows)
    return made.getvalue()


# Ending: what makes such a file of documents.
MADE: dict[str, Callable[[list[str]], bytes]] = {
    "txt": lambda documents: "\n\n".join(documents).encode() + b"\n\n",
    "txt.gz": lambda documents: gzip.compress("\n\n".join(documents).encode() + b"\n\n"),
    "jsonl": lambda documents: "".join(json.dumps({"text": x}) + "\n" for x in documents).encode(),
    "csv": lambda documents: ("text\n" + "".join(f'"{x}"\n' for x in documents)).encode(),
    "tar": as_tar,
    "parquet": partial(as_table, ending="parquet"),
    "arrow": partial(as_table, ending="arrow"),
}


def make_documents(number: int = NUMBER) -> list[str]:
    """Different ones, so that none is a copy."""
    return [f"Document {n} begins. {DOCUMENT[n:]}" for n in range(number)]


def count_documents(room: Path, ended: list, wanted: int, at_least: bool = False) -> str | None:
    """What is wrong if `shards` ended with 0 and holds another number of documents."""
    index = room / "out/index.json"
    if ended[0][0] != 0 or not index.is_file():
        return None
    splits = json.loads(index.read_text())["splits"].values()
    count = sum(split["documents"] for split in splits)
    is_right = count >= wanted if at_least else count == wanted
    return None if is_right else f"{count} documents of {wanted}, and code 0"


def of_input(words: tuple, source: str) -> tuple:
    """The words of a command on text, of another input."""
    return tuple(source if word == "text.txt" else word for word in words)


def list_joined(place: Place, draw, name, words) -> Iterator[Attempt]:
    """Two files put together, as `cat` does, by kind: both are read, or one line says no."""
    if name not in TEXT_COMMANDS:
        return
    documents = make_documents()
    half = len(documents) // 2
    for one in MADE:
        for other in MADE:
            content = MADE[one](documents[:half]) + MADE[other](documents[half:])
            is_alike = one == other and one != "csv"  # of two tables one header is a row
            yield Attempt(
                what=f"{one} and {other} put together",
                words=of_input(words, f"both.{one}"),
                prepare=lambda room, content=content, one=one: (room / f"both.{one}").write_bytes(
                    content
                ),
                must_equal=False,
                again=False,
                check=partial(count_documents, wanted=len(documents))
                if name == "shards" and is_alike
                else partial(count_documents, wanted=half, at_least=True),
            )


# A header, and the rows of such a table.
HEADERS = {
    "id, text, note": '{n}, "{x}", a',
    '"id", "text", "note"': '{n}, "{x}", a',
    "id;text;note": '{n};"{x}";a',
    "sep=;\nid;text": '{n};"{x}"',
    "\ufeffid,text": '{n},"{x}"',
    "id\ttext\tnote": "{n}\t{x}\ta",
    "text,text": '"{x}","{x}"',
    "Text,ID": '"{x}",{n}',
    "id,TEXT": '{n},"{x}"',
    " text ,id": '"{x}",{n}',
    "'text',id": '"{x}",{n}',
    "text|id": "{x}|{n}",
    "": '{n},"{x}"',
}


NAMES_TEXT = re.compile(r"(^|,)[ \"]*text[ \"]*(,|$)")


def list_headers(place: Place, draw, name, words) -> Iterator[Attempt]:
    if name not in TEXT_COMMANDS:
        return
    documents = make_documents()
    for header, row in HEADERS.items():
        rows = [row.format(n=n, x=x) for n, x in enumerate(documents)]
        for ending in ("csv", "tsv", "txt"):
            for kept in (rows, []):  # a header alone has no text
                content = "\n".join(filter(None, [header, *kept])) + "\n"
                place_of = f"table.{ending}"
                yield Attempt(
                    what=f"{header!r}, {len(kept)} rows, .{ending}",
                    words=of_input(words, place_of),
                    prepare=lambda room, c=content, p=place_of: (room / p).write_text(c),
                    # One line that does not name the column may be a sentence.
                    must_refuse=not kept and ending != "txt" and bool(NAMES_TEXT.search(header)),
                    must_equal=False,
                    again=False,
                    check=partial(count_documents, wanted=len(rows))
                    if kept and ending == "csv" and header
                    else partial(count_documents, wanted=0, at_least=True),
                )


FIRST_WORDS = (
    *("PARENTS said so.", "PARENT_ID is a name.", "PK is a short word.", "BZh stands for it."),
    *("ARROW1 is a name.", "Obj is short.", "{Note} It is so.", "{{Infobox}} of it.", '["'),
    *("[1] A reference.", "{", '{"a": 1} is JSON.', "<doc> is no tag.", "---", "id,text", "1,2,3"),
    *("GIF89a was a format.", "%PDF is another.", "ustar is one too.", "\ufeffIt begins."),
)


def list_first_words(place: Place, draw, name, words) -> Iterator[Attempt]:
    """Sound text is read, whatever its first letters are."""
    if name not in TEXT_COMMANDS:
        return
    documents = make_documents()
    for first in FIRST_WORDS:
        text = "\n\n".join([f"{first} {documents[0]}", *documents[1:]]) + "\n"
        for ending in ("txt", "text", ""):
            place_of = f"text{'.' * bool(ending)}{ending}2"
            yield Attempt(
                what=f"begins with {first!r}, {ending!r}",
                words=of_input(words, place_of),
                prepare=lambda room, t=text, p=place_of: (room / p).write_text(t),
                must_equal=False,
                again=False,
                check=partial(count_documents, wanted=len(documents))
                if not first.startswith(("{", "[", "id", "1,"))
                else partial(count_documents, wanted=1, at_least=True),
            )


def make_special(room: Path, kind: str) -> None:
    """A folder of text with something in it that is no file."""
    folder = room / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(make_documents()))
    odd = folder / "odd.txt"
    match kind:
        case "broken link":
            odd.symlink_to("nothing")
        case "loop of links":
            odd.symlink_to("odd.txt")
        case "folder that holds itself":
            odd.symlink_to(".")
        case "pipe":
            os.mkfifo(odd)
        case "socket":
            socket.socket(socket.AF_UNIX).bind(str(odd))
        case "device":
            odd.symlink_to("/dev/zero")


def list_special_files(place: Place, draw, name, words) -> Iterator[Attempt]:
    """In a folder and in a glob: refused, or counted in a line."""
    if name not in TEXT_COMMANDS:
        return
    kinds = ("broken link", "loop of links", "pipe", "socket", "device", "folder that holds itself")

    def is_said(room: Path, ended: list, kind: str) -> str | None:
        said = (ended[0][1] + ended[0][2]).lower()
        is_told = "odd.txt" in said or "left out" in said or kind.endswith("itself")
        return None if is_told else f"no word of a {kind}"

    for kind in kinds:
        for source in ("mixed", "mixed/*", "mixed/**", "mixed/odd.txt"):
            yield Attempt(
                what=f"{kind}: {source}",
                words=of_input(words, source),
                prepare=partial(make_special, kind=kind),
                must_equal=False,
                must_refuse=source.endswith("odd.txt") and not kind.endswith("itself"),
                again=False,
                check=partial(is_said, kind=kind),
            )


def list_inner_outputs(place: Place, draw, name, words) -> Iterator[Attempt]:
    """An output within an input, which the same command would then read."""
    if name in READS:
        return
    for source in (s for s in WRITES[name][1] if (place.inputs / s).is_dir()):
        output = f"{source}/out{Path(words[-1]).suffix}"
        for inner in (output, f"{source}/deeper/out", f"./{source}/../{source}/out2"):
            typed = (*words[:-1], inner)
            yield Attempt(what=f"--output {inner}", words=typed, must_equal=False, again=False)
    if name in TEXT_COMMANDS:  # it would read its own output the next time
        for inner in ("mixed/out", "mixed", "mixed/deeper/out", "./mixed/../mixed/out"):
            yield Attempt(
                what=f"--input mixed --output {inner}",
                words=(*of_input(words, "mixed")[:-1], inner),
                prepare=partial(make_special, kind="none"),
                must_equal=False,
                must_refuse=True,
                again=False,
            )


def name_tensor(room: Path, odd: str) -> None:
    from safetensors.numpy import load_file, save_file

    path = room / "hf/model.safetensors"
    tensors = load_file(path)
    tensors[odd] = tensors.pop(min(tensors))
    save_file(tensors, path, {"format": "pt"})


def list_control_characters(place: Place, draw, name, words) -> Iterator[Attempt]:
    """An input, or something in it, whose name would steer a terminal: it is printed escaped."""

    def is_raw(room: Path, ended: list) -> str | None:
        raw = [out + err for _, out, err in ended if {*OBEYED} & {*out, *err}]
        return f"a raw escape: {raw[0]!r}" if raw else None

    fields: dict = {"must_equal": False, "again": False, "check": is_raw}
    for odd in ODD_NAMES:
        if name in TEXT_COMMANDS:
            documents = make_documents()
            made = {
                "odd.tar": as_tar([*documents, "\0"], f"{odd}{{}}"),  # one is damaged, and named
                "odd.csv": "".join((f"text,{odd}\n", *(f'"{x}",1\n' for x in documents))).encode(),
            }
            for place_of, content in made.items():
                yield Attempt(
                    what=f"{place_of} with {odd!r} in it",
                    words=of_input(words, place_of),
                    prepare=lambda room, p=place_of, c=content: (room / p).write_bytes(c),
                    **fields,
                )
        if name == "import":
            yield Attempt(
                what=f"a tensor {odd!r}",
                words=words,
                prepare=partial(name_tensor, odd=odd),
                **fields,
            )

    for word in dict.fromkeys(map(str, words)):
        if not (place.inputs / word).exists() or "/" in word:
            continue
        for odd in ODD_NAMES:

            def rename(room: Path, word=word, odd=odd) -> None:
                (room / word).rename(room / odd)

            typed = tuple(odd if str(each) == word else each for each in words)
            yield Attempt(
                what=f"{word} named {odd!r}",
                words=typed,
                prepare=rename,
                **fields,
            )


class Bad(http.server.BaseHTTPRequestHandler):
    """A server that answers as its path says: /KIND/NAME."""

    def log_message(self, *_) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        kind = self.path.split("/")[1]
        content = "\n\n".join(make_documents()).encode()
        code = int(kind) if kind.isdecimal() else 200
        self.send_response(302 if kind == "loop" else code)
        if kind == "loop":
            self.send_header("Location", self.path)
        size = {"long": 2 * len(content), "short": len(content) // 2}.get(kind, len(content))
        if kind == "head" and not body:
            size *= 3
        if kind not in ("nosize", "endless", "drip"):
            self.send_header("Content-Length", str(size))
        if kind == "zipped":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if not body or code != 200 or kind == "loop":
            return
        try:
            if kind == "cut":
                content = content[: len(content) // 2]
            if kind == "drip":
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(1)
            while kind == "endless":
                self.wfile.write(content)
            self.wfile.write(content)
        except OSError:
            pass


@cache
def start_server() -> int:
    """The port of a server of this process, which commands are forked from."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bad)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def limit_files() -> None:
    """A small disk in place of the machine's own, which other programs need."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))


def lose_patience() -> None:
    """A slow server is given up sooner than a case hangs."""
    storage.PATIENCE = 2


OF_SERVERS = {"endless": limit_files, "drip": lose_patience}
SERVERS = ("sound", "nosize", "long", "short", "cut", "head", "zipped", "loop", "401", "403")
SERVERS += ("404", "416", "429", "500", "503", "endless", "drip")


def list_servers(place: Place, draw, name, words) -> Iterator[Attempt]:
    sources = {"vocab": "text.txt", "shards": "text.txt", "train": "data", "inspect": "data"}
    if name not in sources:
        return
    for kind in SERVERS:
        url = f"http://127.0.0.1:{start_server()}/{kind}/{sources[name]}"
        typed = tuple(url if word == sources[name] else word for word in words)
        must_refuse = kind in ("loop", "401", "403", "404")
        is_damage = kind in ("long", "cut", "zipped", "drip", "endless")  # codes 3 and 5
        must_refuse |= name in READS and not is_damage
        yield Attempt(
            what=f"a server: {kind}",
            words=typed,
            must_equal=False,
            must_refuse=must_refuse and kind not in ("429", "500", "503"),
            fault=OF_SERVERS.get(kind, nothing),
            again=False,
            check=partial(count_documents, wanted=NUMBER)
            if name == "shards" and kind not in ("zipped", "short")
            else partial(count_documents, wanted=0, at_least=True),
        )


@cache
def hold_port(kind: str) -> int:
    """A port of this process whose program does not answer as ranks do."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    kept = []

    def serve() -> None:
        while True:
            client, _ = server.accept()
            kept.append(client)
            if kind == "it says something else":
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 99)
            if kind == "it closes at once":
                client.close()

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1]


def list_held_ports(place: Place, draw, name, words) -> Iterator[Attempt]:
    if name not in TRAINERS:
        return
    words = (*words, *OF_RANKS, "--timeout-minutes", 0.05)
    for kind in ("it is silent", "it closes at once", "it says something else"):
        for minutes in (0.05, 0.1):
            typed = (*words[:-1], minutes)
            yield Attempt(
                what=f"the port is held, {kind}, {minutes} min",
                words=typed,
                others=(typed,),
                ranks=True,
                variables={"MASTER_PORT": str(hold_port(kind))},
                must_equal=False,
                again=False,
            )


def shrink_shared_memory(size: str) -> None:
    """A small /dev/shm for this process alone, as in a container. Needs root."""
    library = ctypes.CDLL(None)
    library.unshare(0x20000)  # CLONE_NEWNS
    for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "x", "/dev/shm"]):
        subprocess.run(["mount", *mount], check=True)


def list_small_shared_memory(place: Place, draw, name, words) -> Iterator[Attempt]:
    if name != "train" or os.geteuid():
        return
    for size in ("4k", "64k", "1m"):
        for workers in (1, 2, 3):
            yield Attempt(
                what=f"/dev/shm of {size}, {workers} workers",
                words=(*words, "--num-workers", workers, "--timeout-minutes", 0.2),
                fault=partial(shrink_shared_memory, size),
                must_equal=False,
                again=False,
            )


def set_inodes(room: Path, left: int) -> None:
    """Let the room's disk have so many more files; 0: as many as it has memory for."""
    disk = os.statvfs(room)
    number = disk.f_files - disk.f_ffree + left if left else 1 << 20
    options = f"remount,nr_inodes={number}"
    subprocess.run(["mount", "-o", options, str(room)], check=True)


def list_full_inodes(place: Place, draw, name, words) -> Iterator[Attempt]:
    """A disk that has bytes left and no more files; then it has both, and the command goes on."""
    for left in (1, 2, 3, 5, 8, 13):
        yield Attempt(
            what=f"{left} more files",
            words=words,
            prepare=partial(set_inodes, left=left),
            after=partial(set_inodes, left=0),
        )


def list_races(place: Place, draw, name, words) -> Iterator[Attempt]:
    """Somebody else makes the output while the command works: it stays as they made it."""
    if name in READS or name in TRAINERS:  # a RUN has a lock
        return
    output = words[-1]

    def take(room: Path) -> None:
        target = room / output
        if target.exists():
            return
        if not target.suffix:
            target.mkdir()
            target = target / "README.md"
        target.write_text("mine")

    def is_kept(room: Path, ended: list) -> str | None:
        target = room / output
        target = target if target.suffix else target / "README.md"
        content = target.read_bytes() if target.is_file() else b""
        is_there = (room / "taken").exists()
        return "what another made is gone" if is_there and content != b"mine" else None

    def race(room: Path) -> None:
        if not (room / output).exists():
            (room / "taken").touch()
        take(room)

    for _ in range(6):
        yield from at_a_call(
            *(place, draw, name, words, partial(race, place.room)),
            f"{output} appears at call {{}}",
            must_equal=False,
            again=False,
            check=is_kept,
        )


CLASSES = {
    "lists typed twice": list_flags_twice,
    "files put together": list_joined,
    "headers of tables": list_headers,
    "first words of text": list_first_words,
    "links and special files": list_special_files,
    "outputs inside inputs": list_inner_outputs,
    "control characters in names": list_control_characters,
    "servers": list_servers,
    "held ports": list_held_ports,
    "a small /dev/shm": list_small_shared_memory,
    "no more files on a disk": list_full_inodes,
    "races for an output": list_races,
}
