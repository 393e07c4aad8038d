"""The examples, with the real libraries: each does what its first lines say."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import pipeline

from tests.bad_input.room import content_of
from tests.command import ROOT, run_command, run_python
from tests.conftest import finish, start_ranks, train_command
from tests.data.corpus import make_documents
from tests.finetuning import read_csv, write_checkpoint, write_topics
from tests.models import run_export

EXAMPLES = ROOT / "tools" / "examples"
# Trained, on sequences of up to 128 tokens. Labels are learnt from it: random weights 32 wide
# reached 0.58 with one thread and 0.30 with two.
MODEL = ROOT / "tools" / "demo" / "model"
STREAM = {"sequence_length": 40}
pytestmark = pytest.mark.nightly


def run_example(name: str, **flags) -> str:
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    done = run_python(EXAMPLES / f"{name}.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path


@pytest.mark.parametrize(
    "name", ["trainer_csv", "freeze_layers", "sentence_vectors", "onnx_export"]
)
def test_none_writes_over_the_model(topics, tmp_path, name):
    model = shutil.copytree(MODEL, tmp_path / "model")
    before = content_of(model)
    (tmp_path / "pairs.csv").write_text("text_a,text_b\na,b\n")
    flags = {
        "trainer_csv": ("--train", topics / "train.csv", "--dev", topics / "dev.csv"),
        "freeze_layers": ("--train", topics / "train.csv", "--freeze", "albert", "--steps", 1),
        "sentence_vectors": ("--pairs", tmp_path / "pairs.csv", "--steps", 1),
    }
    words = ("--model", model, "--output", model, *flags.get(name, ()))
    done = run_python(EXAMPLES / f"{name}.py", *words)
    assert done.returncode and f"File exists: '{model}'" in done.stderr
    assert content_of(model) == before


def write_raw(folder) -> None:
    """Text in five files, of which each repeats documents of the first."""
    folder.mkdir()
    for number in range(5):
        documents = make_documents(30, seed=number) + make_documents(5, seed=0)
        lines = [json.dumps({"text": "\n".join(sentences)}) + "\n" for sentences in documents]
        (folder / f"{number}.jsonl").write_text("".join(lines))


def test_text_of_datatrove_gives_the_shards_of_its_folder(vocab, tmp_path):
    """Cleaned, deduplicated and encoded by tasks, and equal to a build without it."""
    pytest.importorskip("datatrove")
    write_raw(tmp_path / "raw")
    vocab.write(tmp_path)
    given = {"vocab": tmp_path / "spiece.model", "output": tmp_path / "data"}
    flags = {**given, "input": tmp_path / "raw", "work": tmp_path / "work", "tasks": 3}
    out = run_example("datatrove_shards", **flags)
    assert all(f"piece {n}/3: " in out for n in (1, 2, 3))
    build = ("shards", "--input", tmp_path / "work" / "text" / "*.gz", "--vocab", given["vocab"])
    done = run_command(*build, "--output", tmp_path / "alone")
    assert done.code == 0, done.err
    assert content_of(tmp_path / "data") == content_of(tmp_path / "alone")
    texts = {"\n".join(d) for n in range(5) for d in make_documents(30, seed=n)}
    kept = sum(len(text) >= 200 for text in texts)
    assert f"documents {kept}, " in done.out


@pytest.fixture(scope="module")
def exported(vocab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return run_export(
        write_checkpoint(folder / "run", vocab, dropout=0.0, stream=STREAM), folder / "hf"
    )


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    return write_topics(tmp_path_factory.mktemp("data") / "topics", train=400)


def judge(folder, topics) -> float:
    """The share of the texts of the dev set that a saved model gives the right label."""
    rows = read_csv(topics / "dev.csv")
    predictions = pipeline("text-classification", str(folder))([row["text"] for row in rows])
    return np.mean([x["label"] == row["label"] for x, row in zip(predictions, rows, strict=True)])


def test_what_is_frozen_stays_and_the_rest_learns(topics, tmp_path):
    flags = {"train": topics / "train.csv", "freeze": "albert.embeddings", "steps": 60}
    flags["learning-rate"] = 0.0001
    out = run_example("freeze_layers", model=MODEL, output=tmp_path / "out", **flags)
    assert judge(tmp_path / "out", topics) > 0.9
    before, after = (
        load_file(folder / "model.safetensors") for folder in (MODEL, tmp_path / "out")
    )
    for name in before.keys() & after.keys():
        is_frozen = name.startswith("albert.embeddings.")
        assert torch.equal(before[name], after[name]) == is_frozen, name
        assert f"{'frozen ' if is_frozen else 'trained'} {name} [" in out


def test_the_trainer_learns_the_labels_of_a_csv(topics, tmp_path):
    flags = {"train": topics / "train.csv", "dev": topics / "dev.csv", "epochs": 4}
    run_example("trainer_csv", model=MODEL, output=tmp_path / "out", **flags)
    assert judge(tmp_path / "out", topics) > 0.9


def draw_about(key: str, draw: np.random.Generator) -> str:
    words = [str(word) for word in draw.choice(["the", "object", "name", "list"], 5)]
    words.insert(draw.integers(6), key)
    return " ".join(words)


def test_sentence_vectors_bring_pairs_together(exported, tmp_path):
    """A text about one of three words belongs to one about its partner: then it is the nearest."""
    from sentence_transformers import SentenceTransformer

    draw = np.random.default_rng(0)
    partners = [("class", "string"), ("type", "statement"), ("module", "function")]
    pairs = [[draw_about(word, draw) for word in words] for words in partners * 130]
    with (tmp_path / "pairs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("text_a", "text_b"), *pairs[90:]])
    for steps, low, high in ((0, 0.0, 0.6), (60, 0.85, 1.0)):
        flags = {"pairs": tmp_path / "pairs.csv", "steps": steps, "learning-rate": 0.002}
        output = tmp_path / f"vectors-{steps}"
        run_example("sentence_vectors", model=exported, output=output, **flags)
        model = SentenceTransformer(str(output))
        assert model.max_seq_length == 40  # positions from there on were never trained
        first, second = (
            model.encode([pair[side] for pair in pairs[:90]], normalize_embeddings=True)
            for side in (0, 1)
        )
        share = np.mean((first @ second.T).argmax(1) % 3 == np.arange(90) % 3)
        assert low <= share <= high, (steps, share)

    # The evaluator's figure, of pairs that belong together and of those that do not.
    from scipy.stats import spearmanr

    rows = [(*pairs[n], 5) for n in range(90)]
    rows += [(pairs[n][0], pairs[(n + 1) % 90][1], 1) for n in range(90)]
    with (tmp_path / "sts.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text_a", "text_b", "score"), *rows])
    folders = [tmp_path / "vectors-0", tmp_path / "vectors-60"]
    words = ["--models", *folders, "--pairs", tmp_path / "sts.csv"]
    done = run_python(EXAMPLES / "sts_score.py", *words)
    assert done.returncode == 0, done.stderr
    said = [float(line.split("cosines ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    for folder, figure in zip(folders, said, strict=True):
        model = SentenceTransformer(str(folder))
        first, second = (model.encode([row[side] for row in rows]) for side in (0, 1))
        cosines = np.einsum("ij,ij->i", first, second) / np.prod(
            [np.linalg.norm(vectors, axis=1) for vectors in (first, second)], axis=0
        )
        expected = spearmanr(cosines, [row[2] for row in rows]).statistic
        assert figure == pytest.approx(expected, abs=2e-3)
    assert said[0] < 0.5 < 0.7 < said[1], said


def test_mteb_gives_the_figures_of_sentence_transformers(exported, tmp_path):
    pytest.importorskip("mteb", reason="pip install mteb")
    draw = np.random.default_rng(1)
    keys = ("class", "string", "type")
    texts = [[draw_about(str(key), draw) for key in draw.choice(keys, 2)] for _ in range(90)]
    rows = [(*pair, f"{draw.uniform(0, 5):.2f}") for pair in texts]
    with (tmp_path / "sts.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("text_a", "text_b", "score"), *rows])
    flags = {"pairs": tmp_path / "sts.csv", "steps": 0}
    run_example("sentence_vectors", model=exported, output=tmp_path / "vectors", **flags)
    matches = []
    for name in ("sts_score", "mteb_sts"):
        words = ["--models", tmp_path / "vectors", "--pairs", tmp_path / "sts.csv"]
        done = run_python(EXAMPLES / f"{name}.py", *words)
        assert done.returncode == 0, done.stderr
        matches.append(
            re.fullmatch(r".*/vectors: .* (-?[\d.]+), Pearson (.*), 90 pairs\n", done.stdout)
        )
    figures, mteb_figures = ([float(figure) for figure in match.groups()] for match in matches)
    assert figures == pytest.approx(mteb_figures, abs=2e-4) and len({*figures}) == 2


def test_a_babylm_submission_has_a_branch_for_each_number_of_words(data, tmp_path):
    from transformers import AutoModelForMaskedLM

    run, output = tmp_path / "run", tmp_path / "a b"
    flags = dict(save_at_words="0.001M,0.002M", sequence_length=64)
    assert finish(start_ranks(train_command(data, run, **flags), 1)) == [0]
    flags = dict(run=run, output=output, repo="team/name")
    said = run_example("babylm_submission", **flags)
    assert "lacking: none" in said and "2 revisions" in said
    names = ["main", "revisions/chck_0.001M", "revisions/chck_0.002M"]
    for name in names:
        AutoModelForMaskedLM.from_pretrained(output / name)
    lines = (output / "upload.sh").read_text().splitlines()
    branches = [f" --revision {name.partition('/')[2]}" if "/" in name else "" for name in names]
    wanted = zip(names, branches, strict=True)
    assert lines == [f"hf upload team/name {name}{branch}" for name, branch in wanted]
    before = {path: path.stat().st_mtime_ns for path in (output / "revisions").rglob("*")}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    assert run_python(EXAMPLES / "babylm_submission.py", *words).returncode == 2
    assert before == {path: path.stat().st_mtime_ns for path in (output / "revisions").rglob("*")}
    index = json.loads((data / "index.json").read_text())
    large = tmp_path / "large"
    large.mkdir()
    index["counts"]["words"] = 10**7 + 1
    (large / "index.json").write_text(json.dumps(index))
    config = json.loads((run / "config.json").read_text()) | {"data": [str(large)]}
    (run / "config.json").write_text(json.dumps(config))
    done = run_python(EXAMPLES / "babylm_submission.py", *words)
    assert done.returncode == 1 and "10,000,001 words: strict-small allows" in done.stderr


def test_onnx_has_one_copy_of_the_block_and_8_bits_lose_little(text_file, tmp_path):
    import onnx
    import onnxruntime
    from transformers import AutoTokenizer

    out = run_example("onnx_export", model=MODEL, output=tmp_path / "onnx")
    model = onnx.load(tmp_path / "onnx" / "model.onnx")
    numbers = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)
    params = sum(x.numel() for x in load_file(MODEL / "model.safetensors").values())
    assert numbers < 1.05 * params  # a copy for each layer would be seven times as many
    assert float(out.split("model.onnx: ")[1].split("within ")[1].split()[0]) < 1e-4
    assert (tmp_path / "onnx" / "model-int8.onnx").stat().st_size < 0.35 * 4 * numbers
    # The accuracy of masked words, one in seven, on text that the model has not seen.
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = [line for line in text_file.read_text().splitlines() if len(line.split()) > 8][:800]
    sessions = {
        name: onnxruntime.InferenceSession(tmp_path / "onnx" / f"{name}.onnx")
        for name in ("model", "model-int8")
    }
    right = dict.fromkeys(sessions, 0)
    count = 0
    draw = np.random.default_rng(0)
    for begin in range(0, len(lines), 50):
        inputs = tokenizer(lines[begin : begin + 50], padding=True, truncation=True)
        inputs = {name: np.array(x, np.int64) for name, x in inputs.items()}
        ids = inputs["input_ids"].copy()
        masked = (ids > 4) & (draw.random(ids.shape) < 1 / 7)
        inputs["input_ids"][masked] = tokenizer.mask_token_id
        for name, session in sessions.items():
            (logits,) = session.run(["logits"], inputs)
            right[name] += int((logits[masked].argmax(1) == ids[masked]).sum())
        count += int(masked.sum())
    accuracy = {name: number / count for name, number in right.items()}
    assert count > 2000 and accuracy["model"] > 0.2, accuracy
    assert accuracy["model-int8"] > accuracy["model"] - 0.01, accuracy
