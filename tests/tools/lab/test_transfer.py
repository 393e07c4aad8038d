"""The comparison with random weights: how sets are cut, how the rate is chosen, what is tested."""

import pytest

from albert_ds.json_files import read_json
from tests.finetuning import write_squad
from tools.lab.transfer import (
    RATES,
    STARTS,
    TASKS,
    as_row,
    choose_rate,
    divide,
    main,
    measure,
    prepare,
    probability,
)


def test_the_rate_is_chosen_on_training_text_and_never_on_the_dev_set(tmp_path):
    source = tmp_path / "CoLA"
    source.mkdir()
    train = [f"x\t{i % 2}\t\tsentence {i}\n" for i in range(50)]
    (source / "train.tsv").write_text("".join(train))
    (source / "dev.tsv").write_text("x\t1\t\tjudged\n" * 3)
    (source / "test.tsv").write_text("index\tsentence\n0\tunseen\n")
    prepare("glue/cola", source, tmp_path / "data")
    read = {path.relative_to(tmp_path / "data").as_posix(): path.read_text().splitlines(True)
            for path in (tmp_path / "data").rglob("*.tsv")}  # fmt: skip
    assert read["final/train.tsv"] == train and len(read["final/dev.tsv"]) == 3
    held_out = read["choose/dev.tsv"]
    assert len(held_out) == 5 and sorted(read["choose/train.tsv"] + held_out) == sorted(train)
    assert len(read) == 4  # nothing else to look at


def test_a_dev_set_alone_is_cut_in_two(tmp_path):
    source = tmp_path / "QNLI"
    source.mkdir()
    rows = [f"{i}\tquestion {i}\tanswer\tentailment\n" for i in range(40)]
    (source / "dev.tsv").write_text("".join(["index\tquestion\tsentence\tlabel\n", *rows]))
    prepare("glue/qnli", source, tmp_path / "data")
    parts = [(tmp_path / "data" / "final" / f"{s}.tsv").read_text() for s in ("train", "dev")]
    assert [len(part.splitlines()) for part in parts] == [21, 21]
    assert all(part.startswith("index\tquestion") for part in parts)
    assert sum(sum(row in part for part in parts) for row in rows) == 40


def test_each_table_keeps_the_header_of_its_columns(tmp_path):
    source = tmp_path / "MNLI"
    source.mkdir()
    columns = {"train": 12, "dev_matched": 16, "dev_mismatched": 16}  # as published
    for split, number in columns.items():
        rows = [[f"{name} {i}" for i in range(number)] for name in ("name", *[split] * 29)]
        (source / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    prepare("glue/mnli", source, tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.tsv"):
        origin = path.stem if path.parent.name == "final" else "train"
        head, *rows = path.read_text().splitlines()
        assert head == "\t".join(f"name {i}" for i in range(columns[origin])), path
        assert {*rows} == {"\t".join(f"{origin} {i}" for i in range(columns[origin]))}, path


def test_squad_is_cut_by_paragraphs(tmp_path):
    source = write_squad(tmp_path / "squad1", "v1.1")
    prepare("squad1", source, tmp_path / "data")
    both = [
        read_json(tmp_path / "data" / w / "train-v1.1.json")["data"] for w in ("final", "choose")
    ]
    assert len(both[0]) > len(both[1]) > 0


def test_each_side_takes_its_own_best_rate():
    calls = []

    def tune(start, which, rate, seeds):
        calls.append((start, which, rate, seeds))
        better = {"pretrained": "1e-4", "random": "1e-3"}[start]
        return [0.6 + 0.2 * (rate == better) + 0.01 * seed for seed in range(seeds)]

    found = measure(tune, ["1e-4", "1e-3"], 5)
    assert [found[start]["rate"] for start in STARTS] == ["1e-4", "1e-3"]
    finals = [call for call in calls if call[1] == "final"]
    assert finals == [("pretrained", "final", "1e-4", 5), ("random", "final", "1e-3", 5)]
    name, one, other, difference, p, rates = as_row("glue/rte", found)
    assert (one, other, difference, p, rates) == (
        *("82.0 +- 1.6", "82.0 +- 1.6", "+0.0", "1", "1e-4 / 1e-3"),
    )


def test_every_score_of_the_table_is_in_percent():
    """SQuAD's script gives percent, the others give shares of 1."""
    shares = {start: {"dev": [0.12, 0.14], "rate": "1e-4"} for start in STARTS}
    percent = {start: {"dev": [12.0, 14.0], "rate": "1e-4"} for start in STARTS}
    for name in TASKS:
        row = as_row(name, percent if name == "squad1" else shares)
        assert row[1:4] == ["13.0 +- 1.4", "13.0 +- 1.4", "+0.0"], name


@pytest.mark.parametrize(
    "best, tried",
    [
        ("3e-4", ["1e-4", "3e-4", "1e-3"]),
        ("3e-5", ["1e-4", "3e-4", "1e-3", "3e-5", "1e-5"]),
        ("1e-5", ["1e-4", "3e-4", "1e-3", "3e-5", "1e-5"]),
        ("1e-2", ["1e-4", "3e-4", "1e-3", "3e-3", "1e-2"]),
    ],
)
def test_a_rate_is_best_only_between_others_that_were_tried(best, tried):
    distance = {rate: abs(RATES.index(rate) - RATES.index(best)) for rate in RATES}
    scores = choose_rate(RATES, lambda rate: -distance[rate])
    assert list(scores) == tried and max(scores, key=lambda rate: scores[rate]) == best


def test_probability():
    low, high = [0.50, 0.52, 0.51, 0.49, 0.50], [0.60, 0.61, 0.62, 0.59, 0.60]
    assert probability(high, low) < 1e-5 and probability(low, low) == 1.0
    assert probability([0.5, 0.5], [0.5, 0.5]) == 1.0 and probability([0.5, 0.5], [0.6, 0.6]) == 0.0
    assert divide(range(10), 3)[1] == sorted(divide(range(10), 3)[1])


def test_what_is_missing_is_named(tmp_path, capsys):
    from albert_ds.errors import UserError

    with pytest.raises(UserError, match=r"no CoLA in it; --only takes some"):
        main(["--tasks", str(tmp_path), "--checkpoint", "run", "--output", str(tmp_path / "out")])
    assert len(TASKS) == 9


def test_sst2_chooses_on_whole_sentences_and_trains_on_none_of_their_phrases(tmp_path, capsys):
    source = tmp_path / "SST-2"
    source.mkdir()
    sentences = [f"film {i} is a bore that nobody needs {i}" for i in range(20)]
    sentences += ["nobody", "nobody needs", "a bore", "is a"]
    parts = [" ".join(text.split()[:3]) for text in sentences[:20]]
    rows = [f"{text} \t{i % 2}\n" for i, text in enumerate([*parts, *sentences])]
    (source / "train.tsv").write_text("".join(["sentence\tlabel\n", *rows]))
    (source / "dev.tsv").write_text("sentence\tlabel\na fine film \t1\n")
    prepare("glue/sst2", source, tmp_path / "data")
    read = {
        name: (tmp_path / "data" / f"{name}.tsv").read_text().splitlines(True)[1:]
        for name in ("choose/train", "choose/dev", "final/train")
    }
    assert read["final/train"] == rows
    kept = len(read["choose/train"])
    assert f"chosen on 2 of train, after training on {kept}\n" in capsys.readouterr().out
    held_out = [row.split(" \t")[0] for row in read["choose/dev"]]
    assert len(held_out) == 2 and set(held_out) < set(sentences[:20])
    dropped = {row.split(" \t")[0] for row in rows if row not in read["choose/train"]}
    assert dropped == {
        *held_out,
        *(" ".join(text.split()[:3]) for text in held_out),
        *sentences[20:],
    }
