"""DeepSpeed 0.19's CUDA LAMB, transcribed to float64, compared with the release's.

`python -m tests.optim.fused_lamb` trains a small model with both, and with each single term of the
first put into the second, and writes the differences into docs/notebook/lamb.md.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from albert_lab.tables import table

from albert_ds.model.albert import AlbertForPretraining
from tests.batches import concatenate, random_samples
from tests.exactness.document import replace_section
from tests.runs import SMALL

NUM_STEPS = 5
RATE = 0.01
BATCHES = [
    concatenate(random_samples(8, vocab_size=SMALL.vocab_size, max_length=32, seed=seed)).tensors
    for seed in range(NUM_STEPS)
]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The terms in which two LAMBs may differ; the defaults are the release's."""

    eps: float = 1e-6
    bias_correction: bool = False  # times sqrt(1 - b2^t) / (1 - b1^t), outside the ratio
    min_coeff: float = 0.0
    max_coeff: float = float("inf")
    adapts_vectors: bool = False  # a trust ratio for biases and LayerNorms too
    decays_vectors: bool = False
    shards: int = 1  # pieces of a block's matrix that each get a ratio of their own


DEEPSPEED = Rules(
    eps=1e-8, bias_correction=True, min_coeff=0.01, max_coeff=10.0, adapts_vectors=True
)
TERMS = {
    "bias correction, in the step size": Rules(bias_correction=True),
    "eps 1e-8 instead of 1e-6": Rules(eps=1e-8),
    "ratio clamped to [0.01, 10]": Rules(min_coeff=0.01, max_coeff=10.0),
    "ratio for biases and LayerNorms": Rules(adapts_vectors=True),
    "decay for biases and LayerNorms (not where our groups are used)": Rules(decays_vectors=True),
    "all of DeepSpeed's defaults, our groups": DEEPSPEED,
    'DeepSpeed told `"bias_correction": false, "eps": 1e-6`': replace(
        DEEPSPEED, bias_correction=False, eps=1e-6
    ),
    "the release's ratios of a block's shards (tensor parallelism 2)": Rules(shards=2),
}


def fused_update(w, m, v, g, *, step: int, rules: Rules, adapts: bool, decay: float):
    """csrc/lamb/fused_lamb_cuda_kernel.cu: part 1 the moments and norms, part 3 the step."""
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    update = m / (v.sqrt() + rules.eps) + decay * w
    rate = RATE
    if rules.bias_correction:
        rate *= (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    ratio = 1.0
    if adapts and w.norm() != 0 and update.norm() != 0:
        ratio = min(max(float(w.norm() / update.norm()), rules.min_coeff), rules.max_coeff)
    w.sub_(rate * ratio * update)


def train(rules: Rules) -> tuple[Tensors, Tensors]:
    """Weights before and after five steps in float64."""
    model = AlbertForPretraining(SMALL, seed=0).double()
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    first, second = ({n: torch.zeros_like(p) for n, p in named.items()} for _ in range(2))
    for step, tensors in enumerate(BATCHES, start=1):
        model.zero_grad()
        out = model(**tensors)
        (out["mlm_loss_sum"] / len(tensors["masked_labels"]) + out["pair_loss_sum"] / 8).backward()
        with torch.no_grad():
            for name, p in named.items():
                vector = name.endswith("bias") or "layer_norm" in name
                shards = rules.shards if "encoder" in name and not vector else 1
                dim = int(name.endswith(("output.weight", "down.weight")))  # cut by columns
                held = (p, first[name], second[name], p.grad)
                parts = zip(
                    *(x.chunk(shards, dim if x.dim() > 1 else 0) for x in held), strict=True
                )
                for w, m, v, g in parts:
                    fused_update(
                        *(w, m, v, g),
                        step=step,
                        rules=rules,
                        adapts=rules.adapts_vectors or not vector,
                        decay=0.01 if rules.decays_vectors or not vector else 0.0,
                    )
    return before, {name: p.detach() for name, p in named.items()}


def differ(weights: Tensors, goal: Tensors, before: Tensors, *, vectors: bool) -> float:
    """||p - p_release|| / ||p_release - p_init|| over the matrices, or over the vectors."""
    chosen = [
        name
        for name in goal
        if (name.endswith("bias") or "layer_norm" in name) == vectors and "key.bias" not in name
    ]
    off = torch.stack([(weights[name] - goal[name]).norm() for name in chosen]).norm()
    return float(off / torch.stack([(goal[name] - before[name]).norm() for name in chosen]).norm())


def compare_terms() -> dict[str, tuple[float, float]]:
    """The effect of each term on the update: (matrices, biases and LayerNorms)."""
    before, released = train(Rules())
    changed = {}
    for what, rules in TERMS.items():
        _, weights = train(rules)
        changed[what] = (
            differ(weights, released, before, vectors=False),
            differ(weights, released, before, vectors=True),
        )
    return changed


if __name__ == "__main__":
    lines = [[what, f"{a:.1%}", f"{b:.1%}"] for what, (a, b) in compare_terms().items()]
    terms = table(("changed", "matrices", "biases and LayerNorms"), lines)
    print(terms)
    if len(sys.argv) > 1:
        replace_section(Path(sys.argv[1]), "terms", [terms])
