"""Fine-tuning keeps its best weights and checkpoints whole, and no two runs of a folder mix."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from albert_ds.checkpoint.folder import BEST
from albert_ds.errors import DamagedData, UserError
from albert_ds.process.run_folder import RunLock
from tests.distributed import run_ranks
from tests.finetuning import flags, open_run, tune_ranks
from tests.training import join


@pytest.fixture(scope="module")
def common(cola, checkpoint):
    """Task, data and checkpoint."""
    return ["glue/cola", cola, checkpoint]


def tune_and_resume(rank: int, common: list, folder: Path):
    """Train four of six steps; then what `start` finds after each change to the folder."""
    from albert_ds.finetuning import loop as finetune
    from albert_ds.report.metrics import Metrics

    device, mesh, _ = join(1)
    argv = flags(*common, folder / "run", steps=6, eval_every=1, save_every=2)

    class Request:
        reason = None

    run = open_run(argv, device, mesh)
    metrics = Metrics(run.config.run, mesh, 0, num_steps=6, wandb=False)
    scores = {1: 0.1, 2: 0.3, 3: 0.2, 4: 0.3, 5: 0.4}
    finetune.score_splits = lambda *given: {run.task.metrics[0]: scores[run.step]}
    try:
        finetune.train(run, metrics, Request())
    except KeyError:  # in the evaluation of step 6, before its checkpoint
        pass
    assert run.step == 6 and run.best == (5, 0.4)
    metrics.close()
    out, found = run.config.run, {}

    def look(name: str) -> None:
        try:
            resumed = open_run(argv, device, mesh)
            found[name] = (resumed.step, resumed.evaluations, resumed.best)
        except (DamagedData, UserError) as error:
            found[name] = error

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
    return found, load_file(kept / BEST / "weights.safetensors")


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


def start_seeds(rank: int, common: list, folder: Path):
    """What --seeds 2 says where the folder of its first seed is another run's, or in use."""
    from albert_ds.finetuning import loop as finetune
    from albert_ds.settings.finetune import read_config, write_run_files

    device, mesh, _ = join(1)
    process = SimpleNamespace(mesh=mesh, device=device)
    config = read_config(flags(*common, folder, seeds=2, seed=5), world_size=1)
    splits = finetune.prepare(config, mesh)
    one = folder / "seed-5"
    said = []
    for changes in ({"patience": 3}, {}):
        shutil.rmtree(one, ignore_errors=True)
        write_run_files(replace(config, output=str(one), seeds=1, **changes))
        lock = None if changes else RunLock(one)
        try:
            finetune.tune_seeds(config, splits, process, None)
        except UserError as error:
            said.append(str(error))
        del lock
    return said, json.loads((one / "config.json").read_text())["patience"]


def test_seeds_do_not_mix_with_another_run_of_their_folder(common, tmp_path):
    (said, _) = run_ranks(start_seeds, 1, common, tmp_path)[0]
    assert "--patience is None" in said[0] and "seed-5 was started with 3" in said[0]
    assert "in use by process" in said[1] and len(said) == 2


def test_a_run_that_was_killed_while_it_tokenised_goes_on(cola, checkpoint, tmp_path):
    (tmp_path / "run" / "features").mkdir(parents=True)
    argv = flags("glue/cola", cola, checkpoint, tmp_path / "run", steps=1)
    assert run_ranks(tune_ranks, 1, argv) == [0]
