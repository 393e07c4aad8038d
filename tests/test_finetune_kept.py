"""Fine-tuning keeps its best weights and checkpoints whole, and no two runs of a folder mix."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.checkpoint.folder import BEST
from albert_ds.checkpoint.run_folder import RunLock
from albert_ds.settings.finetune import read_config
from albert_ds.training.finetune import write_run_files
from tests.distributed import run_ranks
from tests.finetuning import flags, open_run, tune_ranks
from tests.legs import tune
from tests.runs import join


@pytest.fixture(scope="module")
def common(cola, checkpoint):
    """Task, data and checkpoint."""
    return ["glue/cola", cola, checkpoint]


def tune_and_resume(rank: int, common: list, folder: Path):
    """Train four of six steps; then what `start` finds after each change to the folder."""
    from albert_ds.training import finetune as finetune
    from albert_ds.training.metrics import Metrics

    device, mesh = join(1)
    argv = flags(*common, folder / "run", steps=6, eval_every=1, save_every=2)

    run = open_run(argv, device, mesh)
    metrics = Metrics(run.config.run, mesh, 0, num_steps=6, wandb=False)
    scores = {1: 0.1, 2: 0.3, 3: 0.2, 4: 0.3, 5: 0.4}
    finetune.score_splits = lambda *given: {run.task.metrics[0]: scores[run.step]}
    try:
        finetune.train(run, metrics, SimpleNamespace(reason=None))
    except KeyError:  # in the evaluation of step 6, before its checkpoint
        pass
    assert run.step == 6 and run.best == (5, 0.4)
    metrics.close()
    out = run.config.run
    outcomes = {}

    def look(name: str) -> None:
        try:
            resumed = open_run(argv, device, mesh)
            outcomes[name] = (resumed.step, resumed.evaluations, resumed.best)
        except (DamagedData, UserError) as error:
            outcomes[name] = error

    kept = shutil.copytree(out, folder / "kept")

    def restore():
        shutil.rmtree(out)
        shutil.copytree(kept, out)

    look("as it was")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "dev_matthews": "high"}\n{"step": 2, "dev_mat')
    look("foreign lines")
    restore()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "dev_matthews": 99.0}\n')
    look("a foreign record")
    (out / "metrics.jsonl").unlink()
    look("no metrics")
    restore()
    weights = out / BEST / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    look("a flipped bit")
    shutil.rmtree(out / BEST)
    look("no best")
    return outcomes, load_file(kept / BEST / "weights.safetensors")


@pytest.fixture(scope="module")
def resumed(common, tmp_path_factory):
    return run_ranks(tune_and_resume, 1, common, tmp_path_factory.mktemp("resumed"))[0][0]


def test_a_resumed_run_knows_its_best_weights(resumed):
    # They are of an evaluation after the checkpoint, and are not given away for a worse one.
    assert resumed["as it was"] == (4, [1, 2, 3, 4], (5, 0.4))
    assert resumed["a foreign record"] == (4, [1, 2, 3, 4], (5, 0.4))
    assert resumed["no metrics"] == (4, [], (5, 0.4))


def test_no_line_of_the_metrics_stops_a_resume(resumed):
    assert resumed["foreign lines"] == (4, [1, 2, 3, 4], (5, 0.4))


def test_best_weights_that_are_damaged_or_gone_are_an_error(resumed):
    for name, words in (("a flipped bit", "weights.safetensors is damaged"), ("no best", "gone")):
        assert isinstance(resumed[name], DamagedData), resumed[name]
        assert words in str(resumed[name]) and "checkpoints/best" in str(resumed[name])


def test_seeds_do_not_mix_with_another_run_of_their_folder(common, tmp_path):
    """--seeds 2 where the folder of its first seed is another run's, and then in use."""
    one = tmp_path / "seed-5"
    argv = flags(*common, tmp_path, seeds=2, seed=5)
    config, opened = read_config(argv, world_size=1)
    write_run_files(config, opened, 64)
    write_run_files(replace(config, output=str(one), seeds=1, patience=3), opened, 64)
    before = (one / "config.json").read_bytes()
    assert run_ranks(tune_ranks, 1, argv) == [2]
    reason = json.loads((tmp_path / "exit.json").read_text())["reason"]
    assert "--patience is None" in reason and "seed-5 was started with 3" in reason
    assert (one / "config.json").read_bytes() == before
    lock = RunLock(one)
    assert run_ranks(tune_ranks, 1, argv) == [2]
    assert "in use by process" in json.loads((tmp_path / "exit.json").read_text())["reason"]
    lock.release()


def test_a_run_that_was_killed_while_it_tokenised_goes_on(cola, checkpoint, tmp_path):
    (tmp_path / "run" / "features").mkdir(parents=True)
    tune("glue/cola", cola, checkpoint, tmp_path / "run", steps=1)
