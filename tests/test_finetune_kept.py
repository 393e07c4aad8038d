"""Fine-tuning keeps its best weights and checkpoints whole, and no two runs of a folder mix."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from albert_ds.checkpoint.folder import BEST
from albert_ds.data.vocab import Normalisation, train_vocab
from albert_ds.errors import DamagedData, Diverged, Stopped, UserError
from albert_ds.process.run_folder import RunLock
from tests.distributed import run_ranks
from tests.finetuning import flags, write_checkpoint, write_cola
from tests.training import join

SCENARIOS = {
    # steps, steps whose loss is spoilt, after which step a stop is asked for, patience
    "stopped while steps are skipped": (9, {2, 3}, 3, None),
    "diverged and asked to stop": (99, range(2, 99), 3, None),
    "diverged just before the end": (6, {4, 5}, None, None),
    "ended by patience while it diverged": (99, range(2, 99), None, 3),
    "an overflow of the gradient alone at the end": (6, {5}, None, None),
}


def open_run(argv: list[str], device, mesh):
    from albert_ds.finetuning.loop import prepare
    from albert_ds.finetuning.run import start
    from albert_ds.settings.finetune import read_config

    config, args = read_config(argv, world_size=1)
    config, splits = prepare(config, args, mesh)
    return start(config, splits, mesh, device)


def tune_spoilt(rank: int, common: list, folder: Path):
    """Each scenario: (the ending, steps of the checkpoints that are left)."""
    from albert_ds.finetuning import loop as finetune
    from albert_ds.report.metrics import Metrics

    device, mesh, _ = join(1)
    endings = {}
    for name, (steps, spoilt, stop_after, patience) in SCENARIOS.items():
        out = folder / name / "run"
        given = {"patience": patience} if patience else {}
        argv = flags(*common, out, steps=steps, eval_every=1, save_every=1, **given)
        run = open_run(argv, device, mesh)
        is_overflow = "overflow" in name

        def spoil(module, inputs, outputs, run=run, spoilt=spoilt, is_overflow=is_overflow):
            if not module.training or run.step not in spoilt:
                return outputs
            if is_overflow:
                outputs["loss_sum"].register_hook(lambda gradient: gradient * float("inf"))
                return outputs
            return {**outputs, "loss_sum": outputs["loss_sum"] * float("nan")}

        run.engine.deepspeed.module.register_forward_hook(spoil)

        class Request:
            @property
            def reason(self, run=run, stop_after=stop_after):
                return "asked" if stop_after is not None and run.step >= stop_after else None

        metrics = Metrics(run.config.run, mesh, run.step, num_steps=steps, wandb=False)
        try:
            finetune.train(run, metrics, Request())
            ending = "all steps done"
        except (Stopped, Diverged) as caught:
            ending = f"{type(caught).__name__}: {caught}"
        left = sorted(path.name for path in out.glob("checkpoints/step-*"))
        endings[name] = SimpleNamespace(ending=ending, left=[int(n[5:]) for n in left])
    return endings


@pytest.fixture(scope="module")
def common(text_file, tmp_path_factory):
    """Task, data and checkpoint."""
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    vocab = train_vocab(lines, Normalisation(), vocab_size=300)
    folder = tmp_path_factory.mktemp("finetune")
    return ["glue/cola", write_cola(folder / "CoLA"), write_checkpoint(folder / "start", vocab)]


@pytest.fixture(scope="module")
def spoilt(common, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoilt")
    return run_ranks(tune_spoilt, 1, common, folder)[0], folder


def test_a_stop_waits_for_a_step_that_was_not_skipped(spoilt):
    found = spoilt[0]["stopped while steps are skipped"]
    assert found.ending.startswith("Stopped: stopped after step 5 of 9") and found.left == [5]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("diverged and asked to stop", 2),
        ("diverged just before the end", 4),
        ("ended by patience while it diverged", 2),
    ],
)
def test_a_run_that_diverged_saves_nothing_and_never_ends_well(spoilt, name, last):
    found = spoilt[0][name]
    assert found.ending.startswith("Diverged") and found.ending.endswith(f"step-{last:08d}")
    assert found.left == [last]


def test_an_overflow_in_the_last_step_is_not_a_divergence(spoilt):
    found = spoilt[0]["an overflow of the gradient alone at the end"]
    assert found.ending == "all steps done" and found.left == [5]


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
    finetune.score_splits = lambda *given: {run.metric: scores[run.step]}
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
    config, args = read_config(flags(*common, folder, seeds=2, seed=5), world_size=1)
    config, splits = finetune.prepare(config, args, mesh)
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


def test_what_is_not_finite_is_never_the_best(tmp_path):
    from albert_ds.checkpoint.folder import write_folder

    for value in (1.0, float("nan")):
        tensors = {"weights.safetensors": {"x": torch.tensor([value])}}
        try:
            write_folder(tmp_path / BEST, tensors, {"step": 7, "value": 0.5})
        except Diverged as error:
            assert "x in weights.safetensors of step 7 is not finite" in str(error)
            break
    else:
        raise AssertionError("it was written")
    assert load_file(tmp_path / BEST / "weights.safetensors")["x"].item() == 1.0
