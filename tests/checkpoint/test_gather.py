"""Every layout reads the checkpoint of every other, bit for bit."""

from pathlib import Path

import pytest
import torch

from albert_ds.checkpoint.folder import FILES
from tests.distributed import run_ranks
from tests.models import folder_of
from tests.optim import muon
from tests.runs import gather, join, open_small_run, save, small_batches, small_config, take_step

BATCHES = small_batches(6)


def train_and_save(rank: int, configs, batches):
    """Train the first config, save, restore into the others; return the tensors of each."""
    run = open_small_run(configs[0], batches)
    for _ in batches:
        take_step(run)
    save(run)
    held = {kind: gather(run.engine, kind) for kind in FILES}
    return [held, *read_back(rank, configs[1:], folder_of(run.config.run, 6))]


def read_back(rank: int, configs, folder: Path):
    from albert_ds.checkpoint.folder import Checkpoint, TrainState
    from albert_ds.checkpoint.gather import restore
    from albert_ds.training.pretrain import build

    device, mesh = join(configs[0].tensor_parallel)
    held = []
    for config in configs:
        checkpoint = Checkpoint(folder)
        engine = build(config, mesh, device, checkpoint.read("weights.safetensors"))
        state = TrainState(step=6, samples=48, updates=6, loss_scale=None)
        assert restore(checkpoint, engine) == state
        held.append({kind: gather(engine, kind) for kind in FILES})
    return held


def layouts(world_size: int, tensor_parallel: int, optimizer: dict, output: Path):
    options = dict(world_size=world_size, tensor_parallel=tensor_parallel, ds_changes=optimizer)
    options["output"] = str(output)
    modes = (*(("bf16", stage) for stage in (1, 2, 3)), ("fp32", 0), ("fp32", 2))
    return [
        small_config(ds_file=f"zero1_{kind}.json", stage=stage, **options) for kind, stage in modes
    ]


@pytest.mark.parametrize("optimizer", [{}, muon.DS_CHANGES], ids=["lamb", "muon"])
def test_any_layout_reads_what_any_layout_wrote(tmp_path, optimizer):
    configs = [layouts(*given, optimizer, tmp_path) for given in ((2, 1), (4, 2))]
    written = run_ranks(train_and_save, 2, configs[0], BATCHES)[0]
    read = run_ranks(read_back, 4, configs[1], folder_of(tmp_path, 6))[0]
    matrix = "albert.encoder.ffn.0.feed_forward.up.weight"
    has_moments = [bool(written[0][kind][matrix].any()) for kind in FILES[1:]]
    assert has_moments == [True, not optimizer]
    for held in [*written[1:], *read]:
        for kind in FILES:
            for name, tensor in written[0][kind].items():
                assert torch.equal(held[kind][name], tensor), (kind, name)
