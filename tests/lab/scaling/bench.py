"""A bench report as tools/throughput_bench.py writes it, of a machine whose constants are known."""

import json
import random

from albert_lab.scaling.collectives import count_collectives
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.step_time import Machine, predict_step

from albert_ds.model.config import SIZES
from albert_ds.model.shapes import count_params

CORES = 2
MACHINE = Machine(
    name="known",
    source="chosen",
    a_flop=2.2e-11,
    an_element=1.3e-9,
    a_weight=2.1e-9,
    a_gradient=8e-9,
    an_update=9e-9,
    a_parameter=4e-9,
    a_step=0.02,
    alpha=2e-3,
    beta=1.5e-9,
    beta_gather=4e-9,
    link_cost=1.12,
    link_cost_gather=1.6,
    straggle=0.04,
)
LINKS = {"100mbit": 1e8, "1gbit": 1e9, None: None}
MODELS = ("bert-base", "albert-base", "bert-large", "albert-large", "albert-xlarge")


def make_report(*, noise: float = 0.0, machine: Machine = MACHINE) -> dict:
    """Five models on 1, 2 and 4 ranks, on one node or two joined by each link, three rounds."""
    draw = random.Random(7)
    grid = [
        (name, ranks, nodes, link, zero, tokens)
        for name in MODELS
        for ranks, nodes, links in ((1, 1, [None]), (2, 1, [None]), (2, 2, LINKS), (4, 2, LINKS))
        for link in links
        for zero, tokens in ((0, 32), (1, 128))
    ]
    return {
        "device": "known",
        "cores": CORES,
        "cells": [_cell(draw, noise, machine, *g) for g in grid],
    }


def _cell(draw, noise, machine, name, ranks, nodes, link, zero, tokens) -> dict:
    layout = Layout(
        name=name,
        model=SIZES[name],
        ranks=ranks,
        nodes=nodes,
        zero=zero,
        micro_batch_size=2,
        sequence_length=tokens,
        precision="fp32",
    )
    step = predict_step(layout, machine, link=LINKS[link], devices=CORES / ranks)
    return {
        "model": name,
        "parameters": sum(count_params(SIZES[name]).values()),
        "parameters_a_rank": layout.parameters,
        "precision": "fp32",
        "micro_batch_size": 2,
        "accumulation": 1,
        "sequence_length": tokens,
        "ranks": ranks,
        "nodes": nodes,
        "link": link,
        "link_bits_per_second": LINKS[link],
        "zero": zero,
        "tensor_parallel": 1,
        "activation_checkpointing": "none",
        "flops_a_step": layout.flops * ranks,
        "rounds": [_round(draw, noise, step, layout) for _ in range(3)],
    }


def _round(draw, noise, step, layout) -> dict:
    def noisy(seconds: float) -> float:
        return seconds * (1 + draw.uniform(-noise, noise))

    parts = {
        "forward_seconds": noisy(step.compute / 3),
        "backward_seconds": noisy(step.compute * 2 / 3),
        "communication_seconds": noisy(step.communication),
        "optimizer_seconds": noisy(step.optimizer),
        "data_wait_seconds": 0.0,
        "other_seconds": noisy(step.other),
    }
    total = sum(parts.values())
    kinds = {
        found.kind: {
            "wire_bytes": found.wire_bytes,
            "exposed_seconds": noisy(step.kinds[found.kind]),
        }
        for found in count_collectives(layout)
        if found.bytes
    }
    rate = layout.batch_size / total
    return parts | {"seconds_a_step": total, "samples_a_second": rate, "kinds": kinds}


def write_report(path, **kwargs):
    path.write_text(json.dumps(make_report(**kwargs)))
    return path
