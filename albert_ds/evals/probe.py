"""What `albert-ds probe` measures: held-out accuracies, minimal pairs, Figure 1's layers."""

import json
import math
import time
from argparse import Namespace

import torch
from scipy.stats import binomtest

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import heldout_batches
from albert_ds.data.stream_config import StreamConfig, list_pair_tasks
from albert_ds.evals.frozen import (
    MEASURES,
    encode_pairs,
    measure_depths,
    measure_similarity,
    train_head,
)
from albert_ds.evals.minimal_pairs import read_pairs, score_pairs, summarise
from albert_ds.model.depth import find_depths, list_depths
from albert_ds.parallel.mesh import build_mesh
from albert_ds.process.rendezvous import join_world
from albert_ds.process.world import read_world
from albert_ds.training.heldout import evaluate

TASKS = list_pair_tasks()


def run_probe(args: Namespace) -> tuple[dict, str]:
    """The numbers that the command line asks for, and a table of them."""
    world = read_world()
    if world.size > 1:  # each rank would count every sample
        raise UserError(f"probe: started as {world.size} processes; allowed: one")
    device = join_world(world)
    if args.similarity:
        values = compare_layers(args, device)
        return values, json.dumps(values, indent=1)
    folder = ModelFolder(args.checkpoint, average=args.average)
    # What the numbers are of and on which data: a model card takes them for the same weights.
    span = [*dict.fromkeys(args.num_layers or ())]  # a depth, or two ends
    layers = f", {'-'.join(map(str, span))} layers" if span else ""
    data = args.data or args.minimal_pairs
    about = {"weights": folder.name + layers, "data": data.resolve().name}
    if args.minimal_pairs:
        values, table = probe_pairs(args, folder, device)
    elif len(span) > 1:
        values, table = probe_depths(args, folder, device)
    else:
        values = probe(args, folder, device)
        table = tabulate(values)
    return about | values, table


def open_heldout(
    args, folder: ModelFolder, device: torch.device, objective: str, depth: int | None
) -> tuple:
    """The held-out set, the model on `device`, of `depth` layers, and its samples as batches.

    Raises UserError if the model's vocabulary is not the data's.
    """
    source = open_shards(args.data, "heldout")
    folder.check_vocab(source.vocab, str(folder.path))
    model = folder.build_model()
    if depth is not None:
        model.albert.encoder.set_depth(depth)
    return source, model.to(device), draw_batches(args, source, objective, args.samples, model)


def draw_batches(args, source, objective: str, samples: int, model) -> list:
    """The first samples of a split, drawn for `objective`; every call draws the same ones."""
    longest = model.config.max_position_embeddings
    length = min(source.sequence_length, longest, args.sequence_length or longest)
    stream = StreamConfig(objective=objective, sequence_length=length, seed=args.seed)
    return [*heldout_batches(source, stream, limit=samples, micro_batch_size=args.micro_batch_size)]


def probe(args: Namespace, folder: ModelFolder, device: torch.device) -> dict:
    """Held-out accuracies and their baselines."""
    # The objective of its two-way head; ALBERT's SOP for a Hugging Face folder.
    stream = folder.record.get("stream", {}) if folder.is_ours else {}
    check(stream, dict, f"{folder.root / 'config.json'}: stream")
    own = stream.get("objective", "sop") if folder.config.pair_head else "none"
    depth = args.num_layers[0] if args.num_layers else None
    source, model, batches = open_heldout(args, folder, device, own, depth)
    values = evaluate(model, batches, build_mesh(1), device, own)
    for task in TASKS.keys() - {own}:
        drawn = draw_batches(args, source, task, args.samples, model)
        held, labels = encode_pairs(model, drawn, device)
        shards = open_shards(args.data, "train")
        train = draw_batches(args, shards, task, args.head_samples, model)
        features, known = encode_pairs(model, train, device)
        values[f"heldout_{task}_pairs"] = len(labels)
        if not len(labels) or len({*known.tolist()}) < 2:
            log_line(
                f"{task} accuracy is not measured: its head needs training pairs of both labels "
                f"and held-out pairs; {len(known)} and {len(labels)} could be made of {args.data}"
            )
            continue
        right = train_head(features, known, held) == labels
        values[f"heldout_{task}_accuracy"] = float(right.mean())
    masked = torch.cat([batch.tensors["masked_labels"] for batch in batches])
    frequent = masked.mode().values
    loss, count = values["heldout_mlm_loss"], values["heldout_masked"]
    assert loss is not None and count, "every sample has a masked token"
    size = torch.tensor(source.vocab.count_bytes())[masked].sum()
    return {
        **values,
        "heldout_bits_per_byte": loss * count / math.log(2) / float(size),
        "objective": own,
        "most_frequent_piece": source.vocab.pieces[int(frequent)],
        "most_frequent_share": float((masked == frequent).double().mean()),
    }


def tabulate(values: dict) -> str:
    masked, piece = values["heldout_masked"], values["most_frequent_piece"]
    rows = [
        ("MLM accuracy", values["heldout_mlm_accuracy"], masked),
        (f"always guessing {piece!r}", values["most_frequent_share"], masked),
    ]
    for task, name in TASKS.items():
        count = values.get(f"heldout_{task}_pairs", values["heldout_pairs"])
        accuracy = values.get(f"heldout_{task}_accuracy")
        head = "" if task == values["objective"] else ", only its head trained"
        if count and accuracy is not None:
            rows.append((f"{name} accuracy{head}", accuracy, count))
    bits = values["heldout_bits_per_byte"]
    return tabulate_shares("held out | share", rows, f"{bits:.3f} bits per byte of masked words")


def tabulate_shares(heading: str, rows: list[tuple[str, float, int]], last: str) -> str:
    """A Markdown table of (name, share, trials), and a line below it."""
    lines = [f"| {heading} | 95 % interval | of |", "| --- | --- | --- | --- |"]
    for name, share, count in rows:
        low, high = interval(share, count)
        lines.append(f"| {name} | {share:.4f} | {low:.4f} .. {high:.4f} | {count} |")
    return "\n".join([*lines, "| a coin | 0.5000 | | |", "", last])


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share of `count` trials."""
    bounds = binomtest(round(share * count), count).proportion_ci(0.95, method="wilson")
    return bounds.low, bounds.high


def probe_pairs(args: Namespace, folder: ModelFolder, device: torch.device) -> tuple[dict, str]:
    """Accuracy on minimal pairs, and a table of it."""
    pairs = read_pairs(args.minimal_pairs)
    model = folder.build_model().to(device)
    vocab = folder.vocab
    if args.precision == "bf16":
        model.albert.to(torch.bfloat16)
    started = time.perf_counter()
    right = score_pairs(model, vocab, pairs, device, within_word=args.within_word)
    values = summarise(pairs, right)
    seconds = time.perf_counter() - started
    groups = [*values["paradigms"].items(), *values["phenomena"].items()]
    rows = [(name, share, count) for name, (share, count) in groups]
    rows.append(("**all**", values["accuracy"], len(pairs)))
    speed = f"{len(pairs) / seconds:,.0f} pairs/s, {args.precision}"
    speed += ", the rest of a word masked too" * args.within_word
    table = tabulate_shares("minimal pairs | accuracy", rows, speed)
    settings = {"precision": args.precision, "within_word": args.within_word}
    return {**values, **settings, "seconds": seconds}, table


def probe_depths(args: Namespace, folder: ModelFolder, device: torch.device) -> tuple[dict, str]:
    """Masked words at every depth of --num-layers, and a table with a bar for each accuracy."""
    first, last = args.num_layers
    depths = list_depths(folder.config, first, last) or find_depths(folder.config, first, last)
    left_out = [str(layers) for layers in range(first, last + 1) if layers not in depths]
    if left_out:
        log_line(
            f"--num-layers {first}-{last}: {', '.join(left_out)} left out: with --sharing "
            f"{folder.config.sharing} they have other blocks"
        )
    _, model, batches = open_heldout(args, folder, device, "none", depths[-1])
    rows = measure_depths(model, batches, depths, device)
    masked = sum(b.masked for b in batches)
    header = ("layers", "MLM loss", "MLM accuracy", "", "L2", "degrees")
    lines = [f"| {' | '.join(header)} |", "| ---: | ---: | ---: | --- | ---: | ---: |"]
    best = max(row["mlm_accuracy"] for row in rows) or 1.0
    for row in rows:
        depth, loss, accuracy, l2, degrees = (row[key] for key in ("num_layers", *MEASURES))
        bar = "#" * round(40 * accuracy / best)
        lines.append(
            f"| {depth} | {loss:.4f} | {accuracy:.4f} | {bar} | {l2:.3f} | {degrees:.2f} |"
        )
    note = f"{masked} masked; L2 and degrees: from the output a row above, at first the embedding's"
    return {"depths": rows, "heldout_masked": masked}, "\n".join([*lines, "", note])


def compare_layers(args: Namespace, device: torch.device) -> dict:
    """The numbers of Figure 1 by label, for every checkpoint on the same held-out samples."""
    checkpoints = [args.checkpoint, *args.against]
    labels = args.labels or [checkpoint.name for checkpoint in checkpoints]
    if len({*labels}) != len(checkpoints):
        raise UserError(f"--labels {' '.join(labels)}: must be {len(checkpoints)} different names")
    models = {}
    for label, checkpoint in zip(labels, checkpoints, strict=True):
        depth = args.num_layers[0] if args.num_layers else None
        _, model, batches = open_heldout(args, ModelFolder(checkpoint), device, "none", depth)
        measured = measure_similarity(model, batches, device)
        models[label] = {"sharing": model.config.sharing, **measured}
    return {"models": models}
