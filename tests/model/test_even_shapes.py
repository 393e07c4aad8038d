"""Rounded numbers of rows change no state, no loss, no count and no gradient."""

import pytest
import torch

from albert_ds.model import albert
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ROUND_ROWS, ROUND_TOKENS
from tests.model.conftest import build_batch, build_config


@pytest.mark.parametrize("lengths", [[20, 31, 9], [40, 40, 40, 8], [12]])
def test_rounding_changes_nothing_that_is_read(lengths, monkeypatch):
    """In float64, where a sum over more rows keeps its value."""
    batch = build_batch(lengths)
    found = []
    for is_rounded in (False, True):
        monkeypatch.setattr(albert, "is_shape_bound", lambda _, x=is_rounded: x)
        model = AlbertForPretraining(build_config(), seed=3).double()
        outputs = model(**batch)
        (outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]).backward()
        names = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")
        encoded = model.albert(**{name: batch[name] for name in names})
        states = [*encoded["hidden_states"], encoded["last_hidden_state"], encoded["pooled"]]
        gradients = [p.grad for p in model.parameters()]
        found.append(([outputs[name] for name in sorted(outputs)], gradients, states))
    for exact, rounded in zip(*found, strict=True):
        torch.testing.assert_close(exact, rounded)


def test_only_16_bit_models_on_cpus_round():
    seen = []
    model = AlbertForPretraining(build_config())
    model.albert.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model.mlm_head.transform.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    batch = build_batch([20, 31, 9])
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)(**batch)
    exact, head, rounded, rounded_head = seen
    assert len(exact[0]) == 60 and exact[1].tolist() == [0, 20, 51, 60]
    assert len(head[0]) == len(batch["masked_positions"])
    ends = [0, 20, 51, 60, 91, 122, ROUND_TOKENS]  # no sequence is longer than the longest of them
    assert len(rounded[0]) == ROUND_TOKENS and rounded[1].tolist() == ends
    assert len(rounded[3]) == len(rounded_head[0]) == ROUND_ROWS
