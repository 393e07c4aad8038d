"""Members' outputs averaged: figures by hand, files as of one model, members that do not fit."""

import json
import os
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

from albert_ds.base.errors import UserError
from albert_ds.commands.ensemble import average, main
from tests.finetuning import (
    write_cola,
    write_race,
    write_rte,
    write_squad,
    write_topics,
)
from tests.legs import tune

SHORT = {"sequence_length": 32}
TASKS = {
    "glue/cola": (write_cola, {}, "CoLA.tsv"),
    "text": (write_topics, {}, "predictions.test.csv"),
    "race": (write_race, {"batch_size": 4}, "predictions.test.json"),
    "squad1": (partial(write_squad, version="v1.1"), SHORT, "predictions.dev.json"),
    "squad2": (partial(write_squad, version="v2.0"), SHORT, "null_odds.dev.json"),
}


@pytest.mark.parametrize("task", TASKS)
def test_seeds_of_a_task_are_one_model(checkpoint, tmp_path, capsys, task):
    write, given, file = TASKS[task]
    tune(task, write(tmp_path / "data"), checkpoint, tmp_path / "runs", seeds=2, **given)
    capsys.readouterr()
    out = tmp_path / "ensemble"
    main(["--members", str(tmp_path / "runs"), "--output", str(out)])
    seeds = [tmp_path / "runs" / f"seed-{seed}" for seed in (0, 1)]
    results = json.loads((out / "results.json").read_text())
    assert results["alone"] == [json.loads((s / "results.json").read_text())["dev"] for s in seeds]
    said = capsys.readouterr()
    assert json.loads(said.out)["dev"] == results["dev"] and ".partial" not in said.err
    assert (out / file).is_file()
    first, second, both = (load_file(f / "outputs.dev.safetensors") for f in (*seeds, out))
    for name in both.keys() - {"start_index", "end_index", "start_score", "end_score"}:
        np.testing.assert_allclose(both[name], (first[name] + second[name]) / 2, rtol=1e-6)
    # One member alone, twice, is that member.
    twice = tmp_path / "twice"
    main(["--members", str(seeds[0]), str(seeds[0]), "--output", str(twice)])
    scores = json.loads((twice / "results.json").read_text())["dev"]
    assert scores == {name: pytest.approx(value) for name, value in results["alone"][0].items()}


def test_a_span_that_a_member_does_not_propose_has_no_share_from_it():
    def member(start, end, share):
        return {
            "start_index": np.array([[start, 9]]),
            "start_score": np.log(np.array([[share, 1e-9]])),
            "end_index": np.array([[[end, 8], [9, 8]]]),
            "end_score": np.log(np.array([[[1.0, 1e-9], [1.0, 1e-9]]])),
            "impossible": np.array([share]),
        }

    outputs = average([member(1, 2, 0.6), member(1, 2, 0.2), member(3, 4, 0.9)])
    spans = {
        (int(s), int(e)): np.exp(score)
        for s, e, score in zip(
            outputs["start_index"][0],
            outputs["end_index"][0, :, 0],
            outputs["start_score"][0],
            strict=True,
        )
    }
    assert spans[1, 2] == pytest.approx(0.8 / 3) and spans[3, 4] == pytest.approx(0.3)
    assert outputs["impossible"][0] == pytest.approx(1.7 / 3)


def test_members_that_do_not_fit_are_refused(checkpoint, cola, tmp_path):
    rte = write_rte(tmp_path / "RTE")
    for name, task, data, given in (
        ("a", "glue/cola", cola, {}),
        ("b", "glue/rte", rte, {}),
        ("c", "glue/cola", cola, {"sequence_length": 32}),
    ):
        tune(task, data, checkpoint, tmp_path / name, steps=1, **given)
    header, *rows = (rte / "dev.tsv").read_text().splitlines()
    (rte / "dev.tsv").write_text("\n".join([header, *reversed(rows)]) + "\n")
    for members, words in (
        (("b", "b"), "b: the dev set in .*RTE is not the one it was evaluated on"),
        (("a", "b"), "of glue/cola, glue/rte; must be fine-tuned on one task"),
        (("a", "c"), "c: its dev set is not that of"),
        (("a", checkpoint), "of glue/cola, pretraining; must be fine-tuned on one task"),
        (("a", "none"), "config.json: no such file"),
    ):
        folders = [str(tmp_path / name) for name in members]
        with pytest.raises(UserError, match=words):
            main(["--members", *folders, "--output", str(tmp_path / "out")])
    (tmp_path / "a" / "outputs.dev.safetensors").unlink()
    os.mkfifo(tmp_path / "a" / "outputs.dev.safetensors")  # to open it would take for ever
    with pytest.raises(UserError, match="outputs.dev.safetensors: not a file"):
        main(["--members", *[str(tmp_path / "a")] * 2, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
