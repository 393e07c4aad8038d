"""The table "what you bring, what happens" of the first page: every row is run."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.brought import keep, read_rows
from tests.command import run_on_rank
from tests.conftest import train_command
from tests.data.corpus import make_documents
from tests.distributed import run_ranks
from tests.finetuning import write_entities, write_topics
from tests.models import run_export
from tests.text.test_tables import pack_table, parquet
from tests.text.test_unpacking import pack_tar

ROWS = read_rows("README.md", "What you bring, what happens")


class Code:
    """A pickle of it would make a file."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def bring_texts(room: Path) -> str:
    texts = ["\n".join(document) for document in make_documents(30)]
    (room / "in").mkdir()
    plain = "\n\n".join(texts).encode()
    contents = {"a.txt": plain, "b.parquet": pack_table(texts, parquet.write_table)}
    contents |= {"c.tar": pack_tar({"a": plain}), "d.csv": b"id,text\n1,One text. And more.\n" * 2}
    contents["e.jsonl"] = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    for name, content in contents.items():
        (room / "in" / name).write_bytes(content)
    return "vocab --input in --output out --vocab-size 60 --any-script"


def bring_pdf(room: Path) -> str:
    words = bring_texts(room)
    (room / "in" / "f.pdf").write_bytes(b"%PDF-1.7\n" + bytes(range(256)))
    return words


TUNE = "finetune --checkpoint model --output out --steps 1 --data labels --task"


def bring_classes(room: Path) -> str:
    write_topics(room / "labels")
    return f"{TUNE} text"


def bring_no_label(room: Path) -> str:
    words = bring_classes(room)
    path = room / "labels" / "train.csv"
    path.write_text(path.read_text().replace("label", "kind", 1))
    return words


def bring_new_label(room: Path) -> str:
    words = bring_classes(room)
    with (room / "labels" / "dev.csv").open("a") as file:
        file.write("99,unheard,the object\n")
    return words


def bring_tags(room: Path) -> str:
    write_entities(room / "labels")
    return f"{TUNE} tokens"


def bring_hugging_face(room: Path) -> str:
    run_export(room / "model", room / "hf")
    return "fill-mask --checkpoint hf the[MASK]"


def bring_wordpiece(room: Path) -> str:
    words = bring_hugging_face(room)
    for path in (room / "hf").glob("*"):
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    (room / "hf" / "vocab.txt").write_text("[PAD]\n")
    return words


def bring_code(room: Path) -> str:
    words = bring_hugging_face(room)
    (room / "hf" / "model.safetensors").unlink()
    (room / "hf" / "pytorch_model.bin").write_bytes(pickle.dumps(Code(), 2))
    return words


def train(room: Path, **flags) -> str:
    return " ".join(["train", *train_command(room / "data", room / "run", **flags)[2:]])


def bring_again(room: Path) -> str:
    words = train(room, steps=1, save_every=1)
    ((code, _, said),) = run_ranks(run_on_rank, 1, words.split())
    assert code == 0, said
    return train(room, steps=2, save_every=1)


# Of each row, how its room is made, and the words to type there.
BROUGHT = {
    "text as": bring_texts,
    "a PDF": bring_pdf,
    "`train.csv` and": bring_classes,
    "such files without": bring_no_label,
    "a label in": bring_new_label,
    "`train.conll` and": bring_tags,
    "a folder of Hugging": bring_hugging_face,
    "one with": bring_wordpiece,
    "weights that": bring_code,
    "the name of": lambda room: "fill-mask --checkpoint albert/albert-base-v2 the[MASK]",
    "`--step 9`": lambda room: f"{train(room)} --step 9",
    "`--language turkish`": lambda room: f"{bring_texts(room)} --language turkish",
    "the same command": bring_again,
    "the same `--output`": lambda room: f"{bring_again(room)} --hidden-size 64",
}


@pytest.mark.parametrize("row", ROWS)
def test_what_you_bring(tmp_path, monkeypatch, data, checkpoint, row):
    (bring,) = [bring for name, bring in BROUGHT.items() if row.startswith(name)]
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "data").symlink_to(data)
    for name in ("ds_configs", "albert_ds"):
        (tmp_path / name).symlink_to(Path(name).absolute())
    monkeypatch.chdir(tmp_path)
    words = bring(tmp_path).split()
    (done,) = run_ranks(run_on_rank, 1, words)
    keep(ROWS[row], done)
    assert not Path("ran").exists()


def test_the_table_has_all_rows():
    assert len(ROWS) == len(BROUGHT)
