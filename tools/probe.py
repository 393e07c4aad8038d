"""Accuracy of a checkpoint on held-out shards: masked words, and the order of segments.

Beside them stands what needs no model: always guessing the token that is masked most often, and a
coin. Every share has its 95 % confidence interval (Wilson).

python tools/probe.py --checkpoint RUN_OR_HF --data DATA
"""

import argparse
import json
import sys
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser, natural, positive
from albert_ds.runtime.ending import say


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/probe.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="RUN_OR_HF", help="run or HF folder")
    add("--data", type=Path, required=True, help="built folder with held-out shards")
    add("--samples", type=positive, default=4096, help="held-out samples at most")
    add("--micro-batch-size", type=positive, default=8, help="samples a pass")
    add("--seed", type=natural, default=0, help="of masks and swaps")
    add("--output", type=Path, help="JSON with the same numbers")
    return parser


def probe(args) -> dict:
    """Held-out accuracies with their baselines, as plain numbers."""
    import torch

    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import heldout_batches
    from albert_ds.evals.heldout import evaluate
    from albert_ds.interop import read_weights
    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.runtime.launch import join_world, read_world

    config, weights = read_weights(args.checkpoint)
    source = open_shards(args.data, "heldout")
    if source.vocab.size != config.vocab_size:
        raise UserError(
            f"--data {args.data}: its vocabulary has {source.vocab.size} pieces, that of "
            f"{args.checkpoint} {config.vocab_size}; they must be the same"
        )
    stream = StreamConfig(
        objective="sop" if config.pair_head else "none",
        sequence_length=min(source.sequence_length, config.max_position_embeddings),
        seed=args.seed,
    )
    batches = list(
        heldout_batches(
            source,
            stream,
            limit=args.samples,
            micro_batch_size=args.micro_batch_size,
            dp_rank=0,
            dp_size=1,
        )
    )
    with torch.device("meta"):
        model = AlbertForPretraining(config)
    model.load_state_dict(weights, assign=True)
    device = join_world(read_world())
    values = evaluate(model.to(device), batches, build_mesh(1), device, stream.objective)
    labels = torch.cat([torch.as_tensor(b.tensors["masked_labels"]) for b in batches])
    frequent = labels.mode().values
    return {
        **values,
        "most_frequent_piece": source.vocab.pieces[int(frequent)],
        "most_frequent_share": float((labels == frequent).double().mean()),
    }


def as_table(values: dict) -> str:
    masked, pairs = values["heldout_masked"], values["heldout_pairs"]
    piece = values["most_frequent_piece"]
    rows = [
        ("MLM accuracy", values["heldout_mlm_accuracy"], masked),
        (f"always guessing {piece!r}", values["most_frequent_share"], masked),
    ]
    if values.get("heldout_sop_accuracy") is not None:
        rows += [("SOP accuracy", values["heldout_sop_accuracy"], pairs), ("a coin", 0.5, None)]
    lines = ["| held out | share | 95 % interval | of |", "| --- | --- | --- | --- |"]
    for name, share, count in rows:
        low, high = interval(share, count) if count else (share, share)
        lines.append(f"| {name} | {share:.4f} | {low:.4f} .. {high:.4f} | {count or ''} |")
    return "\n".join(lines)


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share of `count` trials."""
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(0.95, method="wilson")
    return found.low, found.high


if __name__ == "__main__":
    try:
        args = build_parser().parse_args()
        values = probe(args)
        print(as_table(values))
        if args.output:
            args.output.write_text(json.dumps(values, indent=1) + "\n")
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
