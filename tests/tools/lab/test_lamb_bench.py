"""The bench steps all optimizers equally often, and its flat LAMB is the LAMB of whole tensors."""

import json

import torch

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES
from albert_ds.optim.lamb import Lamb, decay_groups
from tools.lab.lamb_bench import build_optimizers, main


def test_all_take_every_step(tmp_path, capsys):
    report = tmp_path / "report.json"
    argv = ["--models", "albert-tiny", "--rounds", "3", "--output", str(report)]
    assert main(argv) == 0
    found = json.loads(report.read_text())["albert-tiny"]
    kinds = ("LAMB", "Muon", "AdamW, fused")
    assert {kind: len(seconds) for kind, seconds in found.items()} == dict.fromkeys(kinds, 3)
    shown = capsys.readouterr().out
    assert "| albert-tiny | LAMB |" in shown and "| albert-tiny | Muon |" in shown


def test_what_is_timed_is_the_whole_update():
    flat = build_optimizers("albert-tiny", torch.device("cpu"))["LAMB"]
    whole = Lamb(decay_groups(AlbertForPretraining(SIZES["albert-tiny"]).named_parameters(), 0.01))
    for ours, theirs in zip(flat.param_groups, whole.param_groups, strict=True):
        sizes = [p.numel() for p in theirs["params"]]
        parts = ours["params"][0].grad.split(sizes)
        for parameter, part in zip(theirs["params"], parts, strict=True):
            parameter.grad = part.view_as(parameter)
    flat.step()
    whole.step()
    for ours, theirs in zip(flat.param_groups, whole.param_groups, strict=True):
        expected = torch.cat([p.detach().flatten() for p in theirs["params"]])
        torch.testing.assert_close(ours["params"][0].detach(), expected, rtol=1e-6, atol=1e-8)
