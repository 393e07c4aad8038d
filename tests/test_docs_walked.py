"""The commands of a section, one after the other, as somebody who copies and pastes them."""

import csv
import os
import random
import re
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.command import ROOT, run_bash
from tests.models import small_vocab
from tests.test_docs_commands import FENCE

LANGUAGES = ROOT.parent / "shared" / "data" / "languages.tar.xz"
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def run_section(
    page: str, heading: str, folder: Path, *, steps: int, instead: dict[str, str] | None = None
) -> tuple[str, str]:
    """Run the shell of a section in a folder, with fewer steps and other words `instead`.

    Returns what was said, and the section's Python.
    """
    text = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    blocks = {language: body for language, body in FENCE.findall(text)}
    script, count = re.subn(r"--steps \d+", f"--steps {steps}", blocks["bash"])
    assert count == 1
    for words, others in (instead or {}).items():
        assert words in script
        script = script.replace(words, others)
    for name in ("ds_configs", "recipes", "tools"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run_bash("-ec", script, cwd=folder, PATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout, blocks.get("python", "")


@pytest.mark.parametrize("code", ["de", "vi"])
def test_the_first_steps_learn_from_two_megabytes(tmp_path, code):
    """Of the masked pieces five points more than always guessing the most frequent one."""
    if not LANGUAGES.is_file():
        pytest.skip(f"no real text: {LANGUAGES} is absent")
    with tarfile.open(LANGUAGES, "r:xz") as tar:
        content = tar.extractfile(f"languages/{code}.txt").read(2_000_000)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(content.decode(errors="ignore"), encoding="utf-8")
    instead = {
        "--language ko": f"--language {code}",
        "--output data": "--output data --holdout 0.05",
        "이 기능[MASK] 사용하려면...": "a [MASK] b.",
    }
    out, _ = run_section("README.md", "Step by step", tmp_path, steps=300, instead=instead)
    shares = re.findall(r"^\| (?:MLM accuracy|always guessing .*?) \| ([\d.]+)", out, re.M)
    learned, guessed = map(float, shares)
    assert learned > guessed + 0.05, out


def is_latin(word: str) -> bool:
    return re.search("[A-Za-z]{2}", word) is not None


def write_korean(folder: Path) -> list[list[str]]:
    """A Parquet file of documents, tagged names in Latin letters, halves of sentences as pairs;
    returns 100 more pairs."""
    import pyarrow
    from pyarrow import parquet

    with tarfile.open(LANGUAGES, "r:xz") as tar:
        documents = tar.extractfile("languages/ko.txt").read().decode().split("\n\n")
    table = pyarrow.table({"number": range(len(documents)), "text": documents})
    parquet.write_table(table, folder / "corpus.parquet", row_group_size=100)
    texts = [line.split() for document in documents for line in document.split("\n")]
    texts = [words for words in texts if 6 <= len(words) <= 20 and not all(map(is_latin, words))]
    random.Random(0).shuffle(texts)
    (folder / "entities").mkdir()
    named = [words for words in texts if any(map(is_latin, words))]
    for split, part in (("train", named[:400]), ("dev", named[400:500])):
        lines = []
        for words in part:
            for before, word in zip(["", *words], words, strict=False):
                tag = "O" if not is_latin(word) else "I-NAME" if is_latin(before) else "B-NAME"
                lines.append(f"{word} {tag}")
            lines.append("")
        (folder / "entities" / f"{split}.conll").write_text("\n".join(lines))
    halves = [[" ".join(x[: len(x) // 2]), " ".join(x[len(x) // 2 :])] for x in texts]
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text_a", "text_b"], *halves[100:]])
    return halves[:100]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_from_parquet_to_a_tagger_sentence_vectors_and_onnx(tmp_path, monkeypatch):
    if not LANGUAGES.is_file():
        pytest.skip(f"no real text: {LANGUAGES} is absent")
    pairs = write_korean(tmp_path)
    section = "From Parquet to a tagger, sentence vectors and ONNX"
    _, shown = run_section("using.md", section, tmp_path, steps=50)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(shown, names)
    assert {x["entity_group"] for x in names["entities"]} <= {"NAME"}
    assert names["vectors"].shape == (2, 256)
    scores = (tmp_path / "tuned" / "entities" / "results.json").read_text()
    assert float(re.search(r'"f1": ([\d.]+)', scores)[1]) > 0.3
    # The other half of a sentence is nearer than those of others: half of them are, by chance.
    model = names["SentenceTransformer"]("vectors")
    first, second = (
        model.encode([pair[side] for pair in pairs], normalize_embeddings=True) for side in (0, 1)
    )
    near = first @ second.T
    assert np.mean(near > near.diagonal()[:, None]) < 0.4
    assert {path.name for path in Path("hf/ko-onnx").iterdir()} == {"model.onnx", "model-int8.onnx"}


def test_a_public_model_is_continued(text_file, tmp_path):
    """A folder that transformers saved: after three steps the weights are near those of it."""
    from transformers import AlbertConfig, AlbertForPreTraining, AutoTokenizer

    public = tmp_path / "albert-base-v2"
    exported = tmp_path / "hf" / "continued"
    (tmp_path / "vocab").mkdir()
    small_vocab(text_file).write(tmp_path / "vocab")
    AutoTokenizer.from_pretrained(tmp_path / "vocab").save_pretrained(public)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = AlbertConfig(vocab_size=300, embedding_size=16, intermediate_size=64, **sizes)
    AlbertForPreTraining(config).save_pretrained(public)
    (tmp_path / "text").mkdir()
    shutil.copy(text_file, tmp_path / "text")
    run_section("pretraining.md", "Continue a public model on your text", tmp_path, steps=3)
    before, after = (load_file(folder / "model.safetensors") for folder in (public, exported))
    assert before.keys() == after.keys()
    moved = {name: (after[name] - before[name]).abs().max() for name in before}
    assert 0 < torch.stack([*moved.values()]).max() < 0.001, moved
    texts = text_file.read_text(encoding="utf-8").splitlines()[:200]
    ids = [AutoTokenizer.from_pretrained(folder)(texts).input_ids for folder in (public, exported)]
    assert ids[0] == ids[1]
