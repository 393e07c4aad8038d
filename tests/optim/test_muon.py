"""Muon is torch's Muon in one process, and the same however a matrix is cut.

What it is under ZeRO and tensor parallelism: test_zero.py.
"""

import threading

import pytest
import torch

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.optim.muon import Muon, assign, muon_groups
from albert_ds.optim.zero import ParamFragment
from tests.optim.muon import build_alone
from tests.optim.test_real_sizes import norm64
from tests.training import SMALL

SHAPES = [(24, 40), (40, 24), (32, 32)]
NUM_STEPS = 4


def train_both(scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Weights after some steps of torch's Muon and of ours, and the worst error of an update."""
    generator = torch.Generator().manual_seed(0)
    drawn = [[scale * torch.randn(s, generator=generator) for s in SHAPES] for _ in range(5)]
    theirs, ours = ([torch.nn.Parameter(w.clone()) for w in drawn[0]] for _ in range(2))
    settings = dict(lr=0.02, momentum=0.95)
    published = torch.optim.Muon(
        theirs, **settings, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = build_alone(ours, **settings)
    for gradients in drawn[1:]:
        for parameters in (theirs, ours):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        published.step()
        optimizer.step()
    errors = [
        float((a - b).detach().norm() / (b.detach() - start).norm())
        for a, b, start in zip(ours, theirs, drawn[0], strict=True)
    ]
    return ours, theirs, max(errors)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_it_is_torchs_muon(scale, monkeypatch):
    """torch iterates in bf16, which is all that differs: without it both agree to fp32."""
    *_, rounded = train_both(scale)
    assert rounded < 0.02
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    *_, exact = train_both(scale)
    assert exact < 2e-6


def test_muon_has_the_projections_of_the_blocks_and_adamw_the_rest():
    names = {p: n for n, p in AlbertForPretraining(SMALL).named_parameters()}
    named = [(name, p) for p, name in names.items()]
    matrices, *others = muon_groups(named, 0.1, adam_share=0.5)
    assert {names[p].removeprefix("albert.encoder.") for p in matrices["params"]} == {
        *(f"attention.0.self_attention.{n}.weight" for n in ("query", "key", "value", "output")),
        *(f"ffn.0.feed_forward.{n}.weight" for n in ("up", "down")),
    }
    found = {names[p]: group for group in others for p in group["params"]}
    assert found.keys() == set(names.values()) - {names[p] for p in matrices["params"]}
    assert found["albert.embeddings.word.weight"]["weight_decay"] == 0.1
    assert {group["rate_share"] for group in others} == {0.5}
    assert found["mlm_head.bias"]["weight_decay"] == 0.0


def test_every_matrix_has_one_worker_and_none_is_left_idle():
    block = [torch.Size(s) for s in [(8, 8)] * 4 + [(32, 8), (8, 32)]]
    assert assign(block, 1) == [0] * 6
    four = assign(block, 4)
    assert {four[4], four[5]}.isdisjoint(four[:4])  # a large one costs as much as four small ones
    assert set(four) == {0, 1, 2, 3}
    assert sorted(assign(block, 8)) == [0, 1, 2, 3, 4, 5]


def update_in_pieces(weight: torch.Tensor, gradient: torch.Tensor, pieces: int) -> torch.Tensor:
    """One step of rate 1 without decay on a matrix that `pieces` workers hold equal parts of."""
    meeting, sent, found = threading.Barrier(pieces), [None] * pieces, [None] * pieces
    kept: list = [None]

    def work(rank: int) -> None:
        flat = weight.flatten().chunk(pieces)[rank].clone().requires_grad_()
        flat.grad = gradient.flatten().chunk(pieces)[rank]
        optimizer = Muon([{"params": [flat], "orthogonal": True, "weight_decay": 0.0}], lr=1.0)
        optimizer.state[flat] = {"step": 0, "exp_avg": torch.zeros_like(flat)}

        def collect(fragment, piece):
            sent[rank] = piece
            meeting.wait()
            return torch.cat(sent).view(weight.shape) if rank == pieces - 1 else None

        def spread(fragment, whole):
            kept[0] = kept[0] if whole is None else whole.reshape(-1)
            meeting.wait()
            return kept[0].chunk(pieces)[rank]

        whole = ParamFragment(
            name="w", group=0, flat=flat, start=0, offset=rank * len(flat), numel=len(flat)
        )
        optimizer.bind([whole], collect, spread)
        optimizer.step()
        found[rank] = flat.detach()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(pieces)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return torch.cat(found).view(weight.shape)


def reference_update(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The same in float64; a first step's momentum is in the direction of the gradient.

    The iteration is a function of the squares of the singular values: the eigenvalues of G G^T.
    """
    x = gradient.double() if len(gradient) < gradient.shape[1] else gradient.double().T
    x = x / x.norm()
    squares, vectors = torch.linalg.eigh(x @ x.T)
    values = squares.clamp(min=0).sqrt()
    found = values.clone()
    for _ in range(5):
        found = 3.4445 * found - 4.775 * found**3 + 2.0315 * found**5
    x = vectors * (found / values) @ vectors.T @ x
    x = x if x.shape == weight.shape else x.T
    return weight.double() - 0.2 * max(weight.shape) ** 0.5 * x


SIZES = [
    (96, 384),
    (384, 96),
    pytest.param((4096, 16_384), marks=pytest.mark.nightly),  # ALBERT-xxlarge's: minutes
]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_a_matrix_in_two_pieces_is_the_whole_one(shape):
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (0.02 * torch.randn(shape, generator=generator) for _ in range(2))
    whole, cut = (update_in_pieces(weight, gradient, pieces) for pieces in (1, 2))
    assert torch.equal(cut, whole)
    expected = reference_update(weight, gradient)
    moved = norm64((expected - weight).flatten())
    assert norm64((whole - expected).flatten()) / moved < 4e-6
