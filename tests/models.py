"""Models on the disk as training leaves them, and the commands that read them."""

import json
import lzma
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from albert_ds.checkpoint.folder import (
    AVERAGE,
    BEST,
    FILES,
    WEIGHTS,
    TrainState,
    folder_name,
    write_folder,
)
from albert_ds.vocab.vocab import RELEASED, Vocab, train_vocab

OLD_RUN = Path(__file__).parent / "fixtures" / "run_0.1.0"


def small_vocab(text_file: Path, size: int = 300) -> Vocab:
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    return train_vocab(lines, RELEASED, vocab_size=size)


def shake(model):
    """`model` with other weights everywhere, also where it starts from zeros and ones."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def write_weights(
    run: Path, weights: dict, step: int | None = 1, average: dict | None = None
) -> Path:
    """A whole checkpoint of these weights, the best ones of a fine-tuning run if `step` is None."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    if step is None:
        write_folder(run / BEST, {WEIGHTS: weights}, {"step": 1, "value": 0.5})
        return run / BEST
    moments = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    tensors = dict(zip(FILES, (weights, moments, moments), strict=True))
    if average is not None:
        tensors[AVERAGE] = average
    state = TrainState(step=step, samples=step, updates=step, loss_scale=None)
    write_folder(run / "checkpoints" / folder_name(step), tensors, asdict(state))
    return run / "checkpoints" / folder_name(step)


def write_run(
    run: Path, model, vocab: Vocab | None = None, *, step: int = 1, head=None, **record
) -> Path:
    """A pretraining run, or a fine-tuning run if the model has the head of a task."""
    if head is not None:
        record |= {"head": asdict(head)}
    write_weights(run, model.state_dict(), None if head is not None else step)
    (run / "config.json").write_text(json.dumps({"model": asdict(model.config), **record}))
    if vocab is not None:
        vocab.write(run)
    return run


def copy_old_run(folder: Path) -> Path:
    """Shards and two runs of an earlier version, each with the vocabulary that they share."""
    shutil.copytree(OLD_RUN, folder)
    vocab = lzma.decompress((folder / "spiece.model.xz").read_bytes())
    for name in ("data", "adamw", "lamb"):
        (folder / name / "spiece.model").write_bytes(vocab)
    return folder


class Bomb:
    """A pickle that makes a file if it is run."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def run_export(checkpoint: Path, output: Path, *words) -> Path:
    """`albert-ds export` in this process; returns the folder."""
    from albert_ds.commands.export import main

    main(["export", "--checkpoint", str(checkpoint), "--output", str(output), *map(str, words)])
    return output


def run_import(folder: Path, output: Path) -> Path:
    from albert_ds.commands.export import main

    main(["import", "--input", str(folder), "--output", str(output)])
    return output
