"""A plan fits in the memory it was given and agrees with itself; a step with the arithmetic."""

import json
from dataclasses import replace

import pytest
from albert_lab.scaling.hardware import GPUS, describe_gpu
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.memory import predict_memory
from albert_lab.scaling.planner import (
    AS_FAST,
    find_hours,
    find_layouts,
    find_plans,
    list_patterns_of,
)
from albert_lab.scaling.step_time import Machine, predict_step

from albert_ds.base.errors import UserError
from albert_ds.model.config import SIZES
from tests.conftest import ROOT

H100 = describe_gpu(GPUS["h100"], width=1024)


def plans(name, *, gpus=64, memory=80e9, link=100e9, batch_size=4096):
    layouts = find_layouts(
        name, SIZES[name], ranks=gpus, ranks_a_node=8, batch_size=batch_size, sequence_length=512
    )
    return find_plans(layouts, H100, link=link, memory_limit=memory)


@pytest.mark.parametrize("name", ["albert-base", "albert-xxlarge", "bert-large", "bert-xlarge"])
@pytest.mark.parametrize("memory", [16e9, 80e9])
def test_every_plan_fits_and_agrees_with_itself(name, memory):
    candidates = plans(name, memory=memory)
    stage = min(plan.layout.zero for plan in candidates)
    fastest = min(plan.step.total for plan in candidates if plan.layout.zero == stage)
    assert candidates[0].layout.zero == stage
    assert candidates[0].step.total <= AS_FAST * 1.02 * fastest
    for plan in candidates:
        assert plan.memory.peak <= memory
        assert (plan.layout.batch_size, plan.layout.ranks) == (4096, 64)


def test_less_memory_is_never_faster_and_too_little_is_refused():
    def fastest(memory):
        return min(plan.step.total for plan in plans("albert-xxlarge", memory=memory))

    assert fastest(120e9) <= fastest(20e9) <= fastest(8e9)
    with pytest.raises(UserError, match="--gpu-memory"):
        plans("albert-xxlarge", memory=2e8)
    with pytest.raises(UserError, match="--gpus"):
        plans("albert-base", gpus=12)


def test_a_batch_that_the_gpus_do_not_divide_is_answered_with_one_that_they_do():
    with pytest.raises(UserError, match="--batch-size 4096: no multiple .* 4095, 4102$"):
        plans("albert-base", gpus=7)
    with pytest.raises(UserError, match="nearest are 64$"):
        plans("albert-base", batch_size=63)
    for batch_size in (4095, 4102):
        assert plans("albert-base", gpus=7, batch_size=batch_size)[0].layout.ranks == 7


def layout(name="albert-large", **given):
    given = {"ranks": 16, "nodes": 2, "micro_batch_size": 4, **given}
    return Layout(name=name, model=SIZES[name], **given)


def test_memory_falls_with_what_is_meant_to_save_it():
    def peak(**given):
        return predict_memory(layout("albert-xxlarge", **given)).peak

    assert peak(activation_checkpointing="block") < peak(activation_checkpointing="attention")
    assert peak(activation_checkpointing="attention") < peak()
    assert peak(tensor_parallel=2) < peak()
    assert peak(micro_batch_size=8) > peak()
    for zero in (1, 2, 3):
        few, many = (
            predict_memory(layout("bert-xlarge", zero=zero, ranks=ranks)).lives
            for ranks in (16, 64)
        )
        assert few > many


def test_a_node_s_link_carries_a_ring_for_each_rank_of_a_block():
    """Two replicas of a block cut in two: both halves are reduced over the same link at once."""
    whole, cut = (
        predict_step(layout("bert-large", tensor_parallel=tp), H100, link=1e10) for tp in (1, 2)
    )
    assert cut.link_bytes == pytest.approx(2 * cut.wire_bytes, rel=0.25)  # less the block's own
    assert cut.wire_bytes > whole.wire_bytes / 2
    assert whole.link_bytes == whole.wire_bytes


def test_what_is_dropped_is_computed_again():
    steps = {
        again: predict_step(layout(activation_checkpointing=again, micro_batch_size=64), H100)
        for again in ("none", "attention", "block")
    }
    assert steps["none"].compute < steps["attention"].compute < steps["block"].compute
    # A forward pass of all layers beside the three passes of forward and backward.
    assert steps["block"].compute / steps["none"].compute == pytest.approx(4 / 3, rel=0.05)


@pytest.mark.parametrize("tp", [1, 8])
def test_a_teacher_adds_its_forward_pass_which_no_rank_shares(tp):
    """A third of its forward and backward pass alone; of a small one the host's launches."""
    flops = Machine(name="", source="", a_flop=1.0)
    launches = Machine(name="", source="", a_flop=0.0, a_layer=1.0)
    given = {"accumulation": 3, "tensor_parallel": tp}
    alone = predict_step(layout("albert-xlarge", accumulation=3), flops).compute
    for machine, added in ((flops, alone / 3), (launches, 3 * 24 / 3)):
        without, taught = (
            predict_step(layout(**given, teacher=teacher), machine).compute
            for teacher in (None, SIZES["albert-xlarge"])
        )
        assert taught - without == pytest.approx(added)


@pytest.mark.parametrize("name", ["albert-large", "bert-large"])
def test_tensor_parallel_ranks_divide_the_layers_and_nothing_else(name):
    """The map behind the embeddings and the MLM head are computed by each of them."""
    model = SIZES[name]
    tokens = 4 * 512
    masked = 4 * 77
    h = model.hidden_size
    e = model.embedding_size
    of_layers = model.num_layers * tokens * (4 * h * h + 2 * h * 4 * h + 2 * h * 512)
    outside = (e != h) * tokens * e * h + masked * (h * e + e * 30_000)
    machine = Machine(name="", source="", a_flop=1.0)
    for tp in (1, 8):
        compute = predict_step(layout(name, tensor_parallel=tp), machine).compute
        assert compute == pytest.approx(6 * (of_layers / tp + outside))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameters_of_a_rank_are_those_that_it_is_given(tp):
    """Against the tensors themselves, cut as parallel/tensor.py's plan says."""
    import torch

    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.model.projections import PROJECTIONS

    for name, sharing, per_layer in (
        ("albert-tiny", "all", "none"),
        ("bert-base", "none", "none"),
        ("albert-base", "ffn", "none"),
        ("albert-base", "cycle:4", "norm,scale,lora:8"),
        ("albert-base", "pattern:0,1,2,0,1,2,0,1,2,0,1,2/0,0,0,0,0,0,1,1,1,1,1,1", "position"),
    ):
        config = replace(SIZES[name], sharing=sharing, per_layer=per_layer)
        with torch.device("meta"):
            model = AlbertForPretraining(config)
        held = 0
        for path, parameter in model.named_parameters():
            module, kind = path.split(".")[-2:]
            row = module in ("output", "down")
            cut = module in PROJECTIONS and kind not in (("bias", "second") if row else ("first",))
            held += parameter.numel() // (tp if cut else 1)
        given = Layout(name=name, model=config, ranks=tp, tensor_parallel=tp, micro_batch_size=1)
        assert given.parameters == held


def test_the_patterns_that_a_link_carries_are_those_with_few_blocks():
    """The share of a step that communication takes; the less a link carries the more it is."""
    best = plans("albert-large", batch_size=16384)[0]
    by_link = {link: list_patterns_of(best, H100, link=link) for link in (1e12, 1e10)}
    for shares in by_link.values():
        assert shares["all"] < shares["cycle:2"] < shares["cycle:12"] < shares["none"]
    assert all(by_link[1e12][word] < by_link[1e10][word] for word in by_link[1e12])


def test_a_depth_schedule_takes_the_hours_of_its_parts():
    best = plans("albert-base")[0]
    half = replace(best.layout, model=replace(best.layout.model, num_layers=6))
    seconds = 500 * predict_step(half, H100, link=100e9).total + 500 * best.step.total
    hours = find_hours(best, H100, link=100e9, steps=1000, depth_schedule="6@0,12@50%")
    assert hours == pytest.approx(seconds / 3600)
    # Batch and length too; the length of a line is that in its middle.
    changes = {"batch_size": "2048@0,4096@20%", "sequence_length": "128@0,256@60%..512@100%"}
    parts = {(2048, 128, 6): 200, (4096, 128, 6): 300, (4096, 128, 12): 100, (4096, 384, 12): 400}
    seconds = 0.0
    for (size, length, depth), number in parts.items():
        layout = replace(
            best.layout,
            model=replace(best.layout.model, num_layers=depth),
            accumulation=best.layout.accumulation * size // 4096,
            sequence_length=length,
        )
        seconds += number * predict_step(layout, H100, link=100e9).total
    hours = find_hours(
        best, H100, link=100e9, steps=1000, depth_schedule="6@0,12@50%", schedules=changes
    )
    assert hours == pytest.approx(seconds / 3600)
    whole = 1000 * best.step.total / 3600
    assert find_hours(best, H100, link=100e9, steps=1000) == pytest.approx(whole)


def test_the_recorded_errors_are_those_of_the_model():
    """Constants fitted in November 2026 predict each recorded step as docs/raw says."""
    raw = ROOT / "docs/raw"
    recorded = json.loads((raw / "scaling_constants.json").read_text())
    machine = Machine(**recorded["machine"])
    seconds = []
    for name in recorded["inputs"]:
        report = json.loads((raw / name).read_text())
        for cell in report["cells"]:
            fields = ("ranks", "nodes", "zero", "tensor_parallel", "micro_batch_size")
            fields += ("accumulation", "sequence_length", "precision", "activation_checkpointing")
            size = cell["model"]
            shape = {field: cell[field] for field in fields}
            given = Layout(name=size, model=SIZES[size], **shape)
            devices = report["cores"] / given.ranks
            step = predict_step(given, machine, link=cell["link_bits_per_second"], devices=devices)
            seconds.append(step.total)
    assert seconds == pytest.approx([cell["predicted_seconds"] for cell in recorded["cells"]])
