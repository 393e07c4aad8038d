"""Any checkpoint on all three intrinsic tasks, and Figure 1's numbers."""

import json
import math
import subprocess
import sys
import tarfile
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import heldout_batches
from albert_ds.data.stream_config import StreamConfig
from tests.command import run_on_rank
from tests.conftest import ROOT
from tests.data.corpus import SHARED
from tests.distributed import run_ranks
from tests.finetuning import write_checkpoint
from tests.models import run_export, small_vocab, write_weights


def probe(tmp_path, *words) -> dict:
    output = tmp_path / "values.json"
    (done,) = run_ranks(run_on_rank, 1, ["probe", *words, "--output", output])
    assert done.code == 0, done.err
    return json.loads(output.read_text())


def refuse(*words) -> str:
    (done,) = run_ranks(run_on_rank, 1, ["probe", *words])
    assert done.code in (2, 3) and done.err.count("\n") == 1, done
    return done.err


def make(folder, data, objective, **changes):
    vocab = open_shards(data, "heldout").vocab
    run = write_checkpoint(folder, vocab, vocab_size=vocab.size, **changes)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"stream": {"objective": objective}}))
    return run


@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_every_objective_is_probed_on_every_task(data, tmp_path, objective):
    run = make(tmp_path / "run", data, objective, pair_head=objective != "none")
    words = ("--checkpoint", run, "--data", data, "--samples", 60, "--head-samples", 80)
    report = probe(tmp_path, *words)
    assert report["objective"] == objective
    assert (report["weights"], report["data"]) == ("run/step-00000001", data.name)
    for task in ("mlm", "sop", "nsp"):
        assert 0 <= report[f"heldout_{task}_accuracy"] <= 1
    # A head of its own is used as it is; one that was never there is trained.
    trained = {task for task in ("sop", "nsp") if f"heldout_{task}_pairs" in report}
    assert trained == {"sop", "nsp"} - {objective}


def test_the_own_head_is_not_trained(data, tmp_path):
    """A head that always says "swapped" is right exactly as often as that is true."""
    run = make(tmp_path / "run", data, "sop")
    state = ModelFolder(run).read_weights()
    state["pair_head.weight"].zero_()
    state["pair_head.bias"][1] = 1.0
    write_weights(run, state)
    words = ("--checkpoint", run, "--data", data, "--samples", 60, "--head-samples", 80)
    report = probe(tmp_path, *words)
    stream = StreamConfig(objective="sop", sequence_length=64)
    limits = dict(limit=60, micro_batch_size=8, dp_rank=0, dp_size=1)
    batches = list(heldout_batches(open_shards(data, "heldout"), stream, **limits))
    labels = torch.cat([batch.tensors["pair_labels"] for batch in batches])
    share = (labels == 1).sum() / (labels >= 0).sum()
    assert report["heldout_sop_accuracy"] == pytest.approx(float(share))
    assert report["heldout_pairs"] == (labels >= 0).sum()


def run_hugging_face(folder, data, objective, samples, **changes):
    """Hugging Face's model on held-out samples: logits and hidden states of the real tokens."""
    from transformers import AlbertForPreTraining

    model = AlbertForPreTraining.from_pretrained(folder, **changes).eval()
    stream = StreamConfig(objective=objective, sequence_length=64)
    limits = dict(limit=samples, micro_batch_size=8, dp_rank=0, dp_size=1)
    for batch in heldout_batches(open_shards(data, "heldout"), stream, **limits):
        lengths = batch.tensors["cu_seqlens"].diff()
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        ids, segments = (
            torch.nn.utils.rnn.pad_sequence(batch.tensors[x].split(lengths.tolist()), True)
            for x in ("input_ids", "token_type_ids")
        )
        with torch.no_grad():
            out = model(ids, real.long(), segments, output_hidden_states=True)
        yield batch.tensors, out.prediction_logits[real], out, [x[real] for x in out.hidden_states]


@pytest.mark.parametrize("layers", [None, 2, 5])
def test_losses_at_any_depth_are_those_of_hugging_face(data, tmp_path, layers):
    """At the three layers it was trained with, at fewer, and at more; in bits per byte, of the
    bytes of its tokenizer's tokens, too."""
    from transformers import AutoTokenizer

    run = make(tmp_path / "run", data, "sop", num_layers=3, initializer_range=0.1)
    run_export(run, tmp_path / "hf")
    words = ("--checkpoint", run, "--data", data, "--samples", 20, "--head-samples", 8)
    report = probe(tmp_path, *words, *(() if layers is None else ("--num-layers", layers)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    mlm = []
    sop = []
    size = 0
    for tensors, logits, out, _ in run_hugging_face(
        tmp_path / "hf", data, "sop", 20, num_hidden_layers=layers or 3
    ):
        masked = logits[tensors["masked_positions"]]
        labels = tensors["masked_labels"]
        mlm.append(cross_entropy(masked, labels, reduction="none"))
        text = "".join(tokenizer.convert_ids_to_tokens(labels.tolist()))
        size += len(text.replace("\u2581", " ").encode())
        labels = tensors["pair_labels"]
        sop.append(cross_entropy(out.sop_logits, labels, reduction="none")[labels >= 0])
    mlm = torch.cat(mlm)
    assert report["heldout_mlm_loss"] == pytest.approx(float(mlm.mean()), rel=1e-5)
    assert report["heldout_sop_loss"] == pytest.approx(float(torch.cat(sop).mean()), rel=1e-5)
    bits = float(mlm.sum()) / math.log(2)
    assert report["heldout_bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)


def test_every_depth_is_measured_in_one_call_as_hugging_face_does(data, tmp_path):
    run = make(tmp_path / "run", data, "none", num_layers=3, pair_head=False, initializer_range=0.1)
    run_export(run, tmp_path / "hf")
    words = ("--checkpoint", run, "--data", data, "--samples", 20, "--num-layers", "1-5")
    rows = probe(tmp_path, *words)["depths"]
    assert [row["num_layers"] for row in rows] == [1, 2, 3, 4, 5]
    for depth, row in enumerate(rows, start=1):
        losses, hits, moved = [], [], []
        for tensors, logits, _, states in run_hugging_face(
            tmp_path / "hf", data, "none", 20, num_hidden_layers=depth
        ):
            masked = logits[tensors["masked_positions"]]
            losses.append(cross_entropy(masked, tensors["masked_labels"], reduction="none"))
            hits.append(masked.argmax(1) == tensors["masked_labels"])
            moved.append((states[-1] - states[-2]).norm(dim=1))
        assert row["mlm_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
        assert row["mlm_accuracy"] == pytest.approx(float(torch.cat(hits).float().mean()))
        assert row["l2"] == pytest.approx(float(torch.cat(moved).mean()), rel=1e-5)
        for key, parts in (("mlm_loss", losses), ("mlm_accuracy", hits), ("l2", moved)):
            mean = row[key]
            size = sum(map(len, parts))
            away = [float(part.sum()) - mean * len(part) for part in parts]
            error = (sum(x * x for x in away) * 3 / 2) ** 0.5 / size  # of a ratio, by 3 batches
            assert len(away) == 3
            assert row[f"{key}_interval"] == pytest.approx(1.96 * error, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"sharing": "loop:1,1x3,1", "per_layer": "scale,inject"},
        {"sharing": "all", "per_layer": "position,norm"},
    ],
)
def test_each_of_many_depths_is_the_same_as_alone(data, tmp_path, changes):
    """Also where a depth is not the beginning of a deeper one: a last layer of its own."""
    run = make(tmp_path / "run", data, "none", num_layers=5, pair_head=False, **changes)
    generator = torch.Generator().manual_seed(0)
    state = ModelFolder(run).read_weights()
    shaken = {n: x + 0.1 * torch.randn(x.shape, generator=generator) for n, x in state.items()}
    write_weights(run, shaken)
    words = ("--checkpoint", run, "--data", data, "--samples", 20, "--head-samples", 8)
    for row in probe(tmp_path, *words, "--num-layers", "3-5")["depths"]:
        alone = probe(tmp_path, *words, "--num-layers", row["num_layers"])
        assert row["mlm_loss"] == pytest.approx(alone["heldout_mlm_loss"], rel=1e-5)
        assert row["mlm_accuracy"] == pytest.approx(alone["heldout_mlm_accuracy"])


def test_a_range_takes_the_depths_of_a_loop_and_names_the_others(data, tmp_path):
    shape = {"sharing": "loop:1,2x2,1", "num_layers": 6, "pair_head": False}
    run = make(tmp_path / "run", data, "none", **shape)
    words = ("probe", "--checkpoint", run, "--data", data, "--samples", 8, "--num-layers")
    ((code, _, said),) = run_ranks(run_on_rank, 1, [*words, "1-9", "--output", tmp_path / "found"])
    assert code == 0, said
    rows = json.loads((tmp_path / "found").read_text())["depths"]
    assert [row["num_layers"] for row in rows] == [4, 6, 8]
    assert "--num-layers 1-9: 1, 2, 3, 5, 7, 9 left out: with --sharing loop:1,2x2,1" in said
    ((code, _, said),) = run_ranks(run_on_rank, 1, [*words, "2-3"])
    assert code == 2 and "--sharing" in said and said.count("\n") == 1


def test_several_processes_would_count_a_sample_several_times(data, tmp_path):
    words = ("probe", "--checkpoint", tmp_path, "--data", data)
    for done in run_ranks(run_on_rank, 2, words):
        assert done.code == 2 and "probe: started as 2 processes; allowed: one" in done.err


def test_depths_that_leave_blocks_out_are_refused(data, tmp_path):
    run = make(tmp_path / "run", data, "sop", num_layers=3, sharing="none")
    error = refuse("--checkpoint", run, "--data", data, "--num-layers", 2)
    assert "--sharing none uses other blocks there" in error


def test_similarity_is_that_of_hugging_faces_states(data, tmp_path):
    """Of several models in one call: in any pattern, and with what layers have of their own."""
    models = {"cycle": {"sharing": "cycle:2"}, "own": {"per_layer": "norm,position,lora:2"}}
    torch.manual_seed(0)  # what layers have of their own starts as nothing
    for name, changes in models.items():
        run = make(tmp_path / name, data, "none", num_layers=4, **changes)
        state = ModelFolder(run).read_weights()
        write_weights(run, {n: x + 0.1 * torch.randn(x.shape) for n, x in state.items()})
        run_export(run, tmp_path / f"hf-{name}")
    words = ("--checkpoint", tmp_path / "cycle", "--against", tmp_path / "own", "--data", data)
    words += ("--samples", 20, "--similarity", "--labels", *models)
    reports = probe(tmp_path, *words)["models"]
    assert {name: of["sharing"] for name, of in reports.items()} == {
        "cycle": "cycle:2",
        "own": "all",
    }
    for name, of in reports.items():
        parts = [s for *_, s in run_hugging_face(tmp_path / f"hf-{name}", data, "none", 20)]
        states = [torch.cat(layer).double() for layer in zip(*parts, strict=True)]
        assert of["tokens"] == len(states[0]) and len(states) == 5
        for layer, (x, y) in enumerate(pairwise(states)):
            assert of["l2"][layer] == pytest.approx(float((y - x).norm(dim=1).mean()), rel=1e-4)
            cosine = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))
            degrees = cosine.arccos().rad2deg().mean()
            assert of["degrees"][layer] == pytest.approx(float(degrees), rel=1e-4)


def test_another_vocabulary_is_refused(data, text_file, tmp_path):
    run = write_checkpoint(tmp_path / "run", small_vocab(text_file))
    error = refuse("--checkpoint", run, "--data", data, "--output", tmp_path / "none")
    assert "its model has 300 pieces, the data's vocabulary 800" in error
    assert not (tmp_path / "none").exists()


def test_minimal_pairs_as_hugging_face_scores_them(data, tmp_path):
    """Pseudo-log-likelihoods, one sentence and one mask at a time, by transformers' model."""
    from transformers import AlbertForMaskedLM, AutoTokenizer

    from albert_ds.evals.minimal_pairs import score_sentences

    run = make(tmp_path / "run", data, "sop", initializer_range=0.2)
    run_export(run, tmp_path / "hf")
    sentences = [
        "The class is an object.",
        "a list of strings",
        "x",
        "",
        "A module has names, too.",
    ]
    folder = ModelFolder(run)
    fp32 = folder.build_model()
    bf16 = ModelFolder(run).build_model()
    bf16.albert.to(torch.bfloat16)
    scored = [
        score_sentences(each, folder.vocab, sentences, torch.device("cpu")) for each in (fp32, bf16)
    ]
    model = AlbertForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for sentence, score, rounded in zip(sentences, *scored, strict=True):
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        likelihood = 0.0
        for at in range(1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, at] = tokenizer.mask_token_id
            with torch.no_grad():
                logits = model(masked).logits[0, at]
            likelihood += float(logits.double().log_softmax(-1)[ids[0, at]])
        assert score == pytest.approx(likelihood, abs=1e-4)
        assert rounded == pytest.approx(likelihood, rel=0.01)


def test_minimal_pairs_of_a_folder(data, tmp_path):
    run = make(tmp_path / "run", data, "sop")
    folder = tmp_path / "blimp" / "data"
    folder.mkdir(parents=True)
    pair = {"sentence_good": "the class is a name", "sentence_bad": "the the the the the the the"}
    same = dict.fromkeys(pair, "the same")
    for name, term, records in (
        ("b", "agreement", [pair, pair, pair]),
        ("a", "agreement", [same]),
        ("c", "binding", [{k: pair[o] for k, o in zip(pair, reversed(pair), strict=True)}] * 2),
    ):
        lines = [json.dumps({**record, "linguistics_term": term}) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    precision = ("--precision", "bf16")
    report = probe(tmp_path, "--checkpoint", run, "--minimal-pairs", folder, *precision)
    assert report["precision"] == "bf16"
    # The longer sentence is the less likely one. A tie counts half.
    assert report["paradigms"] == {"a": [0.5, 1], "b": [1.0, 3], "c": [0.0, 2]}
    assert report["phenomena"] == {"agreement": [3.5 / 4, 4], "binding": [0.0, 2]}
    assert (report["accuracy"], report["pairs"], report["ties"]) == (3.5 / 6, 6, 1)
    (folder / "c.jsonl").write_text('{"sentence_good": "no other"}\n')
    error = refuse("--checkpoint", run, "--minimal-pairs", folder)
    assert f'{folder / "c.jsonl"}, line 1: no "sentence_bad" in it' in error
    (folder / "c.jsonl").unlink()
    (folder / "c.jsonl").symlink_to("/dev/zero")
    assert "c.jsonl: not a file" in refuse("--checkpoint", run, "--minimal-pairs", folder)


def test_blimp_has_the_phenomena_of_its_published_tables(tmp_path):
    from albert_ds.evals.minimal_pairs import read_pairs

    archive = SHARED / "blimp.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{archive} is not there")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    summary = tmp_path / "blimp" / "raw_results" / "summary" / "models_summary.jsonl"
    records = [json.loads(line) for line in summary.read_text().splitlines()]
    published = {record["UID"]: record["linguistics_term"] for record in records}
    del published["overall"]
    pairs = read_pairs(tmp_path / "blimp" / "data")
    assert {pair.paradigm: pair.phenomenon for pair in pairs} == published
    assert len({*published.values()}) == 12


def test_no_library_warns_about_what_a_user_cannot_change(data, tmp_path):
    run = make(tmp_path / "run", data, "sop")
    command = [sys.executable, "-m", "albert_ds", "probe", "--checkpoint", str(run)]
    command += ["--data", str(data), "--samples", "16", "--head-samples", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "| MLM accuracy |" in done.stdout, done.stderr
    assert "Warning" not in done.stderr, done.stderr
