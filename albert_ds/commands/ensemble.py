"""Average the outputs of several fine-tuned models; score and write them like those of one model.

For classes, scores and options it averages the logits; for SQuAD 1.1 the start and end logits of
every token. Each model of SQuAD 2.0 proposes its own spans: there it averages the probability of a
span, 0 if a model did not propose it, and the logit of "no answer".

albert-ds ensemble --members DIR DIR [DIR ...] --output ENSEMBLE
"""

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.files import check_folder, new_folder
from albert_ds.base.json_files import check, read_json
from albert_ds.base.plugin import PLUGIN, load_plugin
from albert_ds.tasks.recipes import RECIPES, Lengths


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add
    text = (
        "folders written by finetune.py for one task; a folder of several seeds stands for "
        "all of them"
    )
    add("--members", text, "DIR", Path, nargs="+", required=True)
    add("--output", "folder for the results", "DIR", Path, required=True)
    cli.add_flag(parser, "plugin", PLUGIN)
    return parser


def combine(folders: list[Path], output: Path) -> dict:
    """Average the members, score them and write the results; returns those of results.json."""
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.tasks.features import FEATURES
    from albert_ds.tasks.registry import find_task, fingerprint_splits
    from albert_ds.training.results import read_outputs, read_split, write_results

    check_folder(output, folders, names=["results.json"])
    members = [seed for folder in folders for seed in sorted(folder.glob("seed-*")) or [folder]]
    configs = [read_json(member / "config.json") for member in members]
    tasks = sorted({str(config.get("task", "pretraining")) for config in configs})
    if len(tasks) != 1 or tasks[0] not in RECIPES:
        raise UserError(
            f"--members: they are of {', '.join(tasks)}; must be fine-tuned on one task"
        )
    task, config = tasks[0], configs[0]
    schema = {"features": dict, "data": str, "lengths": dict, "head": {"labels": [str]}}
    check(config, schema, str(members[0] / "config.json"))
    lengths = Lengths(**{f.name: config["lengths"][f.name] for f in fields(Lengths)})
    caches = [folder / FEATURES for folder in (members[0], members[0].resolve().parent)]
    cache = next((folder for folder in caches if folder.is_dir()), caches[0])
    splits, outputs = {}, {}
    opened = find_task(task, tuple(config["head"]["labels"]))
    data = Path(config["data"])
    now = config["features"]
    with suppress(UserError):  # gone: a task that reads them again says so
        now = fingerprint_splits(task, opened, data, ModelFolder(members[0]).vocab, lengths)
    for name, features in config["features"].items():
        if name == "train":
            continue
        if now.get(name, features) != features:
            raise UserError(
                f"--members {members[0]}: the {name} set in {data} is not the one it was evaluated "
                "on; must be as it was"
            )
        outputs_of = [read_outputs(member, name) for member in members]
        for member, (_, about) in zip(members, outputs_of, strict=True):
            if about["key"] != outputs_of[0][1]["key"]:
                raise UserError(
                    f"--members {member}: its {name} set is not that of {members[0]}: data, "
                    f"vocabulary and lengths of {task} must be the same"
                )
        splits[name] = read_split(cache, features, data=data, name=name, lengths=lengths)
        outputs[name] = average([arrays for arrays, _ in outputs_of])
    alone = []  # the members' own metrics
    for path in (member / "results.json" for member in members):
        results = read_json(path)
        check(results, {"dev": dict}, str(path))
        alone.append(results["dev"])
    about = {"members": [str(member) for member in members], "alone": alone}
    with new_folder(output) as partial:
        return write_results(partial, task, opened, splits, outputs, about)


def average(members: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The mean of every output; for proposed spans the mean probability."""
    if "start_index" not in members[0]:
        return {name: np.mean([m[name] for m in members], axis=0) for name in members[0]}
    impossible = np.mean([member["impossible"] for member in members], axis=0)
    return {**average_spans(members), "impossible": impossible}


def average_spans(members: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Spans [F, K, 1] that any member proposes, with the logarithm of their mean probability.

    They have the form of the conditional head: K starts, each with one end, whose score is 0.
    """
    rows = len(members[0]["start_index"])
    merged: list[dict] = []
    for row in range(rows):
        shares: dict[tuple[int, int], float] = {}
        for member in members:
            starts, ends = member["start_index"][row], member["end_index"][row]
            scores = member["start_score"][row][:, None] + member["end_score"][row]
            for k, start in enumerate(starts.tolist()):
                for end, score in zip(ends[k].tolist(), scores[k].tolist(), strict=True):
                    share = np.exp(score) / len(members)
                    shares[start, end] = shares.get((start, end), 0.0) + share
        merged.append(shares)
    width = max(map(len, merged))
    index = np.zeros((2, rows, width), np.int64)
    score = np.full((rows, width), -1e30, np.float32)
    for row, shares in enumerate(merged):
        spans = np.array(list(shares), np.int64).reshape(-1, 2)
        index[:, row, : len(spans)] = spans.T
        with np.errstate(divide="ignore"):
            logs = np.log(np.array(list(shares.values())))
        score[row, : len(spans)] = np.maximum(logs, -1e30)
    return {
        "start_index": index[0],
        "start_score": score,
        "end_index": index[1][:, :, None],
        "end_score": np.zeros((rows, width, 1), np.float32),
    }


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    load_plugin(args.plugin)
    results = combine(args.members, args.output)
    print(json.dumps({"dev": results["dev"], "alone": results["alone"]}, indent=1))
