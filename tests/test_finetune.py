"""Fine-tuning end to end: it learns, in every layout alike, resumes, and leaves what it should."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from albert_ds.model.albert import AlbertForPretraining
from tests.command import ROOT, run_command, run_on_rank
from tests.distributed import run_ranks
from tests.finetuning import (
    MODEL,
    draw_sentences,
    flags,
    read_csv,
    tune_ranks,
    write_checkpoint,
    write_entities,
    write_mnli,
    write_race,
    write_rte,
    write_squad,
    write_stsb,
    write_topics,
)
from tests.legs import Case, run_case, tune
from tests.models import run_export, write_weights

SCRATCH = {"from_scratch": True}
ZERO3 = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-06}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}


def best_of(folder):
    return load_file(folder / "checkpoints" / "best" / "weights.safetensors")


def read(folder, name="results.json"):
    return json.loads((folder / name).read_text())


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_and_leaves_the_best_with_its_predictions(checkpoint, cola, tmp_path):
    out = tmp_path / "out"
    tune("glue/cola", cola, checkpoint, out, steps=120, eval_every=20, learning_rate=0.005)
    results, history = read(out), records(out)
    evaluations = {r["step"]: r["dev_matthews"] for r in history if "dev_matthews" in r}
    assert list(evaluations) == [20, 40, 60, 80, 100, 120]
    assert results["dev"]["matthews"] == max(evaluations.values()) > 0.8
    assert evaluations[results["best_step"]] == results["dev"]["matthews"]
    assert read(out, "exit.json") == {"code": 0, "reason": "all steps done", "step": 120}
    lines = (out / "CoLA.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 11
    config = read(out, "config.json")
    assert config["steps"] == 120 and config["head"]["labels"] == ["0", "1"]
    assert config["deepspeed"]["optimizer"]["params"]["lr"] == 0.005 and config["versions"]
    # Patience: the same run ends when two evaluations in a row were no better.
    patient = tmp_path / "patient"
    given = dict(steps=120, eval_every=20, patience=2, learning_rate=1e-9)
    tune("glue/cola", cola, checkpoint, patient, **given)
    assert read(patient)["step"] == read(patient)["best_step"] + 40 == 60
    newest = load_file(patient / "checkpoints" / "step-00000060" / "weights.safetensors")
    assert not torch.equal(best_of(patient)["head.score.bias"], newest["head.score.bias"])


LAYOUTS = {
    "ranks and accumulation": (2, {"micro_batch_size": 2}),
    "ZeRO-3": (2, {"deepspeed_config": ZERO3}),
    "tensor parallel": (2, {"tensor_parallel": 2}),
}


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    """(flags of a task, what one process makes of it) by the task's name."""
    made = {}

    def tune_alone(task):
        if task not in made:
            folder = tmp_path_factory.mktemp("alone")
            write = {
                "squad2": lambda f: write_squad(f, "v2.0"),
                "glue/rte": write_rte,
                "tokens": write_entities,
            }[task]
            given = {"sequence_length": 32} if task == "squad2" else {}
            common = (task, write(folder / "data"), checkpoint)
            tune(*common, folder / "out", **given)
            made[task] = common, given, folder / "out"
        return made[task]

    return tune_alone


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", ["glue/rte", "squad2", "tokens"])
def test_every_layout_gives_the_same(alone, tmp_path, task, layout):
    common, given, reference = alone(task)
    world_size, changes = LAYOUTS[layout]
    if "deepspeed_config" in changes:
        (tmp_path / "ds.json").write_text(json.dumps(changes["deepspeed_config"]))
        changes = {"deepspeed_config": tmp_path / "ds.json"}
    tune(*common, tmp_path / "out", ranks=world_size, **given, **changes)
    for name in ("loss", "grad_norm"):
        expected, series = (
            [record[name] for record in records(folder) if name in record]
            for folder in (reference, tmp_path / "out")
        )
        assert series == pytest.approx(expected, rel=1e-4) and len(series) == 4
    expected = best_of(reference)
    weights = best_of(tmp_path / "out")
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=2e-5)
    path = "outputs.dev.safetensors"
    outputs = [load_file(folder / path) for folder in (reference, tmp_path / "out")]
    scores = [name for name in outputs[0] if not name.endswith("index")]
    torch.testing.assert_close(
        *({name: x[name] for name in scores} for x in outputs), rtol=1e-3, atol=1e-3
    )


def test_a_killed_run_goes_on_as_if_nothing_had_been(checkpoint, cola, tmp_path):
    config = dict(steps=240, eval_every=24, dropout=0.1)
    case = Case(trainer="finetune", config=config, cuts=(30,))
    whole, killed, _ = run_case(case, "glue/cola", cola, checkpoint, folder=tmp_path)
    assert read(whole) == read(killed)
    assert len([record for record in records(whole) if "loss" in record]) == 240
    assert read(killed, "checkpoints/step-00000240/state.json")["updates"] == 240


def test_a_stop_is_a_checkpoint_and_75(checkpoint, cola, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOP").touch()
    argv = flags("glue/cola", cola, checkpoint, tmp_path / "out")
    assert run_ranks(tune_ranks, 1, argv) == [75]
    assert (tmp_path / "out" / "checkpoints" / "latest").is_file()
    (tmp_path / "out" / "STOP").unlink()
    assert run_ranks(tune_ranks, 1, argv) == [0]


def tune_on_a_clock(rank: int, argv: list[str]) -> int:
    """finetune.py by a clock that evaluation and saving move by 1,000 s, any look by 1 s."""
    from albert_ds.training import finetune

    clock = {"now": 0}

    def look(seconds: int = 1) -> int:
        clock["now"] += seconds
        return clock["now"]

    def slow(function):
        return lambda *given: (look(1000), function(*given))[1]

    finetune.evaluate = slow(finetune.evaluate)
    finetune.save = slow(finetune.save)
    finetune.time = SimpleNamespace(perf_counter=look)
    return tune_ranks(rank, argv)


def test_times_leave_out_evaluation_and_saving(checkpoint, cola, tmp_path):
    argv = flags("glue/cola", cola, checkpoint, tmp_path, eval_every=2, save_every=1)
    assert run_ranks(tune_on_a_clock, 1, argv) == [0]
    seconds = [r["step_seconds"] for r in records(tmp_path) if "step_seconds" in r]
    assert len(seconds) == 4 and max(seconds) < 10


def test_seeds_are_summarised_and_done_ones_are_not_done_again(checkpoint, cola, tmp_path):
    out = tmp_path / "out"
    given = ("glue/cola", cola, checkpoint, out)
    tune(*given, seeds=2, seed=5)
    alone = [read(out / f"seed-{seed}")["dev"]["matthews"] for seed in (5, 6)]
    summary = read(out)["dev"]["matthews"]
    assert summary["values"] == alone and summary["mean"] == pytest.approx(np.mean(alone))
    assert summary["median"] == pytest.approx(np.median(alone))
    assert summary["std"] == pytest.approx(np.std(alone, ddof=1))
    assert not torch.equal(*(best_of(out / f"seed-{s}")["head.score.weight"] for s in (5, 6)))
    before = (out / "seed-5" / "results.json").stat().st_mtime_ns
    tune(*given, seeds=3, seed=5)
    assert (out / "seed-5" / "results.json").stat().st_mtime_ns == before
    assert len(read(out)["seeds"]) == 3
    page = out / "report.html"
    assert run_command("report", out / "seed-5", "--output", page).code == 0
    assert page.read_text().count("all steps done") == 2 and "crashed" not in page.read_text()
    # One run in the same folder is not what these are.
    tune(*given, seeds=1, seed=5)
    assert read(out)["seed"] == 5 and best_of(out)


def test_all_seeds_start_from_one_checkpoint(cola, vocab, tmp_path):
    """Of a run that goes on meanwhile; what was started from is recorded, and the card says it."""
    start = write_checkpoint(tmp_path / "start", vocab)
    out = tmp_path / "out"
    start = Path(os.path.relpath(start))  # as it is typed, also in the third run
    for seeds in (2, 3, 4):
        tune("glue/cola", cola, start, out, seeds=seeds, steps=1, learning_rate=0.0)
        write_weights(start, AlbertForPretraining(MODEL, seed=7).state_dict(), step=seeds)
    first, *others = (best_of(out / f"seed-{seed}") for seed in (0, 2, 3))
    for name in (name for name in first if name.startswith("albert.")):
        assert all(torch.equal(first[name], other[name]) for other in others), name
    card = run_export(out / "seed-2", tmp_path / "hf") / "README.md"
    assert f"| started from | {start}/checkpoints/step-00000001 |" in card.read_text()


def test_rte_starts_from_mnli_by_its_name(checkpoint, tmp_path):
    tune("glue/mnli", write_mnli(tmp_path / "MNLI"), checkpoint, tmp_path / "mnli", seeds=2)
    summary = read(tmp_path / "mnli")
    assert summary["dev"].keys() == {"accuracy", "accuracy_mm"}
    given = dict(from_task="mnli", steps=1, learning_rate=0.0)
    tune("glue/rte", write_rte(tmp_path / "RTE"), checkpoint, tmp_path / "rte", **given)
    start = best_of(tmp_path / "mnli" / f"seed-{summary['best_seed']}")
    weights = best_of(tmp_path / "rte")
    for name in (name for name in weights if name.startswith("albert.")):
        assert torch.equal(weights[name], start[name]), name
    assert weights["head.score.weight"].shape == (2, 32)


def test_only_sequences_that_were_trained_on_count_as_trained(cola, vocab, tmp_path):
    """Pretraining's or, if they are longer, those of the examples; not those that may be given."""
    texts = [line.split("\t")[3] for line in (cola / "train.tsv").read_text().splitlines()]
    longest = 2 + max(map(len, vocab.encode(texts)))
    for seen, given, trained in ((9, {}, longest), (60, {}, 60), (60, SCRATCH, longest)):
        out = tmp_path / f"{seen}{len(given)}"
        start = write_checkpoint(out / "start", vocab, stream={"sequence_length": seen})
        argv = flags("glue/cola", cola, start, out / "run", steps=1, **given)
        (done,) = run_ranks(run_on_rank, 1, ["finetune", *argv])
        said = f"of up to {longest} tokens; the start has seen 9, so the positions behind them"
        assert done.code == 0 and (said in done.err) == (seen == 9)
        hf = run_export(out / "run", out / "hf")
        assert read(hf, "tokenizer_config.json")["model_max_length"] == trained < 64
        card = (hf / "README.md").read_text()
        assert f"| longest sequence | {trained} tokens, and 64 positions" in card


FAMILIES = {
    "glue/stsb": (write_stsb, {}, {"pearson", "spearman"}, "STS-B.dev.tsv"),
    "squad1": (
        lambda folder: write_squad(folder, "v1.1"),
        {"sequence_length": 32},
        {"exact", "f1"},
        "nbest.dev.json",
    ),
    "race": (
        write_race,
        {"batch_size": 4},
        {"accuracy", "accuracy_middle", "accuracy_high"},
        "predictions.test.json",
    ),
}


@pytest.mark.parametrize("task", FAMILIES)
def test_every_family_is_judged(vocab, tmp_path, task):
    """From a checkpoint without a pooler, where some heads start one, and from Hugging Face's."""
    write, given, metrics, file = FAMILIES[task]
    start = write_checkpoint(tmp_path / "headless", vocab, pair_head=False)
    if task == "race":
        run_export(write_checkpoint(tmp_path / "whole", vocab), tmp_path / "hf")
        start = tmp_path / "hf"
    tune(task, write(tmp_path / "data"), start, tmp_path / "out", **given)
    assert read(tmp_path / "out")["dev"].keys() == metrics
    if task == "race":  # whose test labels are public
        assert read(tmp_path / "out")["test"].keys() == metrics
    assert (tmp_path / "out" / file).is_file()


def tune_and_count(rank, argv):
    """Fine-tune; returns how many engines and fp32 weights are alive after each seed's training."""
    import weakref

    from albert_ds.finetune import main
    from albert_ds.training import finetune

    engines, weights, alive = [], [], []
    start = finetune.start
    write_predictions = finetune.write_predictions

    def start_and_follow(*given):
        run = start(*given)
        engines.append(weakref.ref(run.engine.deepspeed))
        weights.append(weakref.ref(run.engine.fragments[0].flat))
        return run

    def count_and_write(run):
        alive.append([sum(ref() is not None for ref in refs) for refs in (engines, weights)])
        return write_predictions(run)

    finetune.start, finetune.write_predictions = start_and_follow, count_and_write
    assert main(argv) == 0
    return alive


def test_each_seed_frees_its_engine(checkpoint, cola, tmp_path):
    argv = flags("glue/cola", cola, checkpoint, tmp_path / "out", seeds=3, steps=2, eval_every=2)
    assert run_ranks(tune_and_count, 1, argv) == [[[0, 0]] * 3]


def entities_of(tags):
    """(type, first, last) of the entities of a sentence, as conlleval reads B and I tags."""
    entities = []
    for number, tag in enumerate(tags):
        kind, _, name = tag.partition("-")
        if kind == "I" and entities and entities[-1][0] == name and entities[-1][2] == number - 1:
            entities[-1] = (name, entities[-1][1], number)
        elif kind != "O":
            entities.append((name, number, number))
    return set(entities)


def test_texts_with_labels_of_ones_own(tmp_path):
    """It learns three classes from a CSV; scores are those of the written predictions; the export
    predicts the same by the labels' names."""
    from transformers import AlbertForSequenceClassification, pipeline

    data = write_topics(tmp_path / "data", train=400, wrong=4)
    out = tmp_path / "out"
    # A trained model: whether random weights learn it hangs on rounding, so on the CPU.
    given = dict(steps=40, eval_every=40, batch_size=16, learning_rate=0.0002)
    tune("text", data, ROOT / "tools/demo/model", out, **given)
    results = read(out)
    for split in ("dev", "test"):
        rows = read_csv(data / f"{split}.csv")
        said = [row["prediction"] for row in read_csv(out / f"predictions.{split}.csv")]
        accuracy = np.mean([word == row["label"] for word, row in zip(said, rows, strict=True)])
        assert results[split]["accuracy"] == pytest.approx(accuracy) and accuracy > 0.6
        scores = read(out, f"scores.{split}.json")
        interval = scores["scores"]["accuracy"]
        assert scores["examples"] == len(rows) and interval["value"] == pytest.approx(accuracy)
        # The binomial's spread: about twice sqrt(p (1 - p) / n) on each side.
        wide = 2 * np.sqrt(accuracy * (1 - accuracy) / len(rows))
        assert interval["low"] == pytest.approx(accuracy - wide, abs=0.05)
        assert interval["high"] == pytest.approx(min(1, accuracy + wide), abs=0.05)
    labels = ["other", "string", "type, class"]
    counts = read(out, "scores.dev.json")["classes"]
    rows = read_csv(data / "dev.csv")
    assert {k: v["examples"] for k, v in counts.items()} == {
        label: sum(row["label"] == label for row in rows) for label in labels
    }
    run_export(out, tmp_path / "hf")
    model = AlbertForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.config.id2label == dict(enumerate(labels))
    classify = pipeline("text-classification", str(tmp_path / "hf"))
    said = read_csv(out / "predictions.dev.csv")
    for row, prediction in zip(said, classify([row["text"] for row in rows]), strict=True):
        assert row["prediction"] == prediction["label"]
        assert float(row["probability"]) == pytest.approx(prediction["score"], abs=1e-3)


def test_tags_of_ones_own(checkpoint, tmp_path):
    """Entities are learned from CoNLL; F1 is conlleval's of what was written; the export agrees."""
    from transformers import AlbertForTokenClassification, AutoTokenizer, pipeline

    data = write_entities(tmp_path / "data", train=400)
    out = tmp_path / "out"
    tune("tokens", data, checkpoint, out, steps=160, eval_every=40, learning_rate=0.005)
    lines = (out / "predictions.dev.conll").read_text().split("\n\n")
    sentences = [[row.split("\t") for row in part.splitlines()] for part in lines if part]
    given = (data / "dev.conll").read_text().split("\n\n")[1:]
    assert [[f"{word} {tag}" for word, tag, _ in s] for s in sentences] == [
        part.splitlines() for part in given if part
    ]
    right = said = there = 0
    for sentence in sentences:
        truth, entities = (entities_of(column) for column in list(zip(*sentence, strict=True))[1:])
        right += len(truth & entities)
        said += len(entities)
        there += len(truth)
    results = read(out)["dev"]
    assert results["f1"] == pytest.approx(2 * right / (said + there)) and results["f1"] > 0.5
    assert results["precision"] == pytest.approx(right / said)
    assert results["recall"] == pytest.approx(right / there)
    scores = read(out, "scores.dev.json")
    assert scores["scores"]["f1"]["value"] == pytest.approx(results["f1"])
    assert scores["scores"]["f1"]["low"] < results["f1"] <= scores["scores"]["f1"]["high"]
    assert scores["entities"].keys() == {"KIND", "THING"}
    run_export(out, tmp_path / "hf")
    model = AlbertForTokenClassification.from_pretrained(tmp_path / "hf")
    names = ["O", "B-KIND", "I-KIND", "B-THING", "I-THING"]
    assert model.config.id2label == dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for sentence in sentences:
        batch = tokenizer(
            [[word for word, *_ in sentence]], is_split_into_words=True, return_tensors="pt"
        )
        with torch.no_grad():
            chosen = model(**batch).logits[0].argmax(1).tolist()
        words = batch.word_ids()
        firsts = [words.index(number) for number in range(len(sentence))]
        assert [names[chosen[n]] for n in firsts] == [tag for *_, tag in sentence]
    tag = pipeline("token-classification", str(tmp_path / "hf"), aggregation_strategy="first")
    for sentence in sentences:
        words, _, tags = zip(*sentence, strict=True)
        with pytest.warns(UserWarning, match="does not support real words"):  # the blanks do
            (entities,) = tag([*words], is_split_into_words=True)
        ends = np.cumsum([len(word) + 1 for word in words]) - 1  # in " ".join(words)
        spans = {(k, ends[a] - len(words[a]), ends[b]) for k, a, b in entities_of(tags)}
        assert {(e["entity_group"], e["start"], e["end"]) for e in entities} == spans


def test_a_pipeline_gives_the_spans_of_entities(checkpoint, tmp_path):
    """By characters of running text, as docs/finetuning.md has it: words of several pieces whole,
    without the comma or full stop behind them."""
    from transformers import pipeline

    tags = {"objectivity": "B-KIND", "functional": "B-THING", "statements": "I-THING"}
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for split, count, seed in (("train", 200, 1), ("dev", 40, 2)):
        texts = [text.replace("statement", "list") for text in draw_sentences(count, seed)]
        texts = [text.replace("function", "functional statements") for text in texts]
        texts = [text.replace("object", ", objectivity") + " ." for text in texts]
        lines = ("".join(f"{w} {tags.get(w, 'O')}\n" for w in text.split()) for text in texts)
        (data / f"{split}.conll").write_text("\n".join(lines))
    tune("tokens", data, checkpoint, out, steps=200, eval_every=200, learning_rate=0.005)
    folder = str(run_export(out, tmp_path / "hf"))
    tag = pipeline("token-classification", folder, aggregation_strategy="simple")
    assert all(len(tag.tokenizer.tokenize(word)) > 1 for word in tags)
    for text in texts:
        text = re.sub(r" ([.,])", r"\1", text)
        entities = {(e["entity_group"], e["start"], e["end"]) for e in tag(text)}
        spans = re.finditer(r"(?P<KIND>objectivity)|(?P<THING>functional statements)", text)
        assert entities == {(match.lastgroup, *match.span()) for match in spans}, text
