"""Evaluate a fine-tuned model on its task: the splits, the outputs, the scores and their files.

DIR/results.json                metrics of the dev set, and the step they are from
DIR/outputs.SPLIT.safetensors   logits, for `albert-ds ensemble`
DIR/...                         predictions in the formats of the leaderboards
"""

from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from albert_ds.base.cli import log_line
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_file, write_json
from albert_ds.base.json_files import check, check_file
from albert_ds.parallel.consensus import raise_together
from albert_ds.parallel.mesh import Mesh
from albert_ds.settings.finetune import FinetuneConfig
from albert_ds.tasks.features import FEATURES, Split, cached, read_features
from albert_ds.tasks.recipes import Lengths
from albert_ds.tasks.registry import Task
from albert_ds.vocab.vocab import Vocab


def open_splits(config: FinetuneConfig, task: Task, vocab: Vocab, mesh: Mesh) -> dict[str, Split]:
    """Every split; rank 0 tokenises those that RUN does not have yet. Collective.

    Raises UserError and DamagedData on every rank if a file is missing or wrong.
    """
    data = Path(config.data)
    cache = config.run / FEATURES
    splits: dict[str, Split] = {}
    with raise_together(mesh):
        for split, key in config.features.items() if mesh.rank == 0 else ():
            build = partial(task.build, data, split, vocab, config.lengths)
            features = cached(cache, key, build)
            if not features.units:
                raise DamagedData(f"--data {data}: the {split} set holds no examples")
            parts = [f"{number:,} {what}" for what, number in features.counts.items()]
            published = task.published.get(split)
            if published not in (None, features.counts["examples"]):
                parts[0] += f" (published: {published:,})"
            log_line(f"{config.task} {split}: {', '.join(parts)}")
            lengths = config.lengths
            splits[split] = Split(data=data, name=split, lengths=lengths, features=features)
        for split in task.test_splits if mesh.rank == 0 else ():
            if split not in config.features:
                log_line(f"{config.task} {split}: not in {data}, so nothing is predicted for it")
    if mesh.rank == 0:
        return splits
    return {
        split: read_split(cache, key, data=data, name=split, lengths=config.lengths)
        for split, key in config.features.items()
    }


def read_split(cache: Path, key: str, *, data: Path, name: str, lengths: Lengths) -> Split:
    """A split that was tokenised before; UserError if it is gone."""
    path = cache / f"{key}.safetensors"
    if not path.is_file():
        raise UserError(f"{path}: the tokenised {name} set is gone; run finetune.py again")
    return Split(data=data, name=name, lengths=lengths, features=read_features(path))


def score_splits(task: Task, splits: dict[str, Split], outputs: dict) -> dict[str, float]:
    """The metrics of all dev sets."""
    metrics = {}
    for name in task.dev_splits:
        metrics |= task.score(splits[name], outputs[name])
    return metrics


def write_results(
    folder: Path, task_name: str, task: Task, splits: dict[str, Split], outputs: dict, about: dict
) -> dict:
    """Score; write predictions, outputs and at the end results.json; returns its content."""
    metrics = score_splits(task, splits, outputs)
    for name, output in outputs.items():
        task.write(splits[name], output, folder, metrics)
        metadata = {"task": task_name, "split": name, "key": splits[name].features.key}
        write_file(folder / f"outputs.{name}.safetensors", save(output, metadata=metadata))
    results = {"task": task_name, "metric": task.metrics[0], "dev": metrics, **about}
    if task.has_test_labels:
        tests = [name for name in outputs if name in task.test_splits]
        results |= {name: task.score(splits[name], outputs[name]) for name in tests}
    write_json(folder / "results.json", results)
    return results


def find_constant(task_name: str, task: Task, splits: dict[str, Split], outputs: dict) -> list[str]:
    """A line for each dev set of which all examples were predicted to be of one class."""
    lines = []
    for name in task.dev_splits if task.labels else ():
        # None where words have tags; of one dimension where an example has one class.
        labels = splits[name].features.arrays.get("labels")
        if labels is None or labels.ndim > 1:
            continue
        classes = np.unique(outputs[name]["logits"].argmax(1))
        if len(classes) > 1:
            continue
        share = float((labels == classes[0]).mean())
        lines.append(
            f"{task_name} {name}: every prediction is {task.labels[classes[0]]!r}, which "
            f"{share:.1%} of the examples are: nothing was learned from their text; try another "
            "--learning-rate or more --steps"
        )
    return lines


def read_outputs(folder: Path, split: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The outputs of one split that `write_results` wrote, and their metadata."""
    path = folder / f"outputs.{split}.safetensors"
    try:
        check_file(path, str(path))
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}
            about = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    check(about, {"key": str}, str(path))
    return arrays, about


def summarise_seeds(results: list[dict]) -> dict:
    """Median, mean and spread of every metric over runs with different seeds."""
    metric = results[0]["metric"]
    spread = {}
    for name in results[0]["dev"]:
        values = np.array([result["dev"][name] for result in results])
        spread[name] = {
            "median": float(np.median(values)),
            "mean": float(values.mean()),
            "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
            "min": float(values.min()),
            "max": float(values.max()),
            "values": values.tolist(),
        }
    best = max(results, key=lambda result: result["dev"][metric])
    return {
        "task": results[0]["task"],
        "metric": metric,
        "seeds": [result["seed"] for result in results],
        "best_seed": best["seed"],
        "dev": spread,
    }
