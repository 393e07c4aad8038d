"""Predicted memory against the bytes of tensors in real steps."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from albert_lab.bench_run import accumulation_of, bench_config
from albert_lab.measurement import open_bench_run, synthetic_batches, take_step
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.memory import bytes_a_token, predict_memory

from albert_ds.data.stream_config import StreamConfig
from albert_ds.model import encoder
from albert_ds.model.albert import AlbertForPretraining, MlmHead
from albert_ds.model.config import SIZES
from albert_ds.model.teacher import Teacher
from tests import eight_bits
from tests.distributed import run_ranks
from tests.model.conftest import build_batch
from tests.model.test_fp8 import build
from tests.runs import join


def measure(rank: int, cases: list[tuple[str, dict, str, dict | None]]) -> list[dict]:
    """Bytes of a rank between steps and at the peak of a later one: measured, predicted."""
    cells = []
    device, mesh = join(1)
    for again, changes, file, of_teacher in cases:
        config = bench_config(
            "albert-tiny",
            replace(SIZES["albert-tiny"], dropout=0.0, **changes),
            deepspeed_config=f"ds_configs/{file}.json",
            micro_batch_size=4,
            sequence_length=128,
            ranks=mesh.world_size,
            activation_checkpointing=again,
        )
        before = held_bytes()
        run = open_bench_run(config, mesh, device)
        teacher = of_teacher and replace(config.model, **of_teacher)
        if teacher:
            run.engine.deepspeed.module.teacher = Teacher(AlbertForPretraining(teacher), 1.0)
        lives = held_bytes() - before
        take_step(run)  # also allocates what all steps use
        layout = Layout(
            name=config.size,
            model=config.model,
            ranks=mesh.world_size,
            micro_batch_size=4,
            accumulation=accumulation_of(config, mesh.dp_size),
            sequence_length=128,
            precision="fp32",
            activation_checkpointing=again,
            muon=file.endswith("muon"),
            teacher=teacher,
        )
        memory = predict_memory(layout, on_cuda=False)
        # Gloo's thread may keep a tensor for a moment after its work: the least of three steps.
        peak = lives + min(measure_peak(lambda run=run: take_step(run)) for _ in range(3))
        predicted = (memory.lives + memory.teacher, memory.peak)
        cell = {"measured": (lives, peak), "predicted": predicted, "parts": list(memory.at_peak)}
        cells.append(cell)
        run.engine.deepspeed.destroy()
        del run
    return cells


def held_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure_peak(act: Callable[[], object]) -> int:
    """The most bytes that `act` allocates at once, as PyTorch's allocator tells its profiler."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        act()
    changes = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_peak_is_predicted():
    own = {"per_layer": "norm,scale,position,lora:8", "sharing": "cycle:2"}
    # The update of a wide model takes more than its passes.
    wide = {"hidden_size": 512, "ffn_size": 2048, "num_layers": 1, "vocab_size": 500}
    lamb, muon = "zero1_fp32", "zero1_fp32_muon"
    cases = [("none", {}, lamb), ("block", {}, lamb), ("none", own, lamb), ("none", wide, muon)]
    cells = run_ranks(measure, 2, [(*case, None) for case in cases])[0]
    for cell in cells:
        (lives, peak), (lives_predicted, peak_predicted) = cell["measured"], cell["predicted"]
        assert abs(peak_predicted / peak - 1) < 0.1, cell
        assert abs(lives_predicted / lives - 1) < 0.01, cell
    keeps, again, more, _ = (cell["measured"][1] for cell in cells)
    assert more > keeps > again
    added = cells[2]["predicted"][1] - cells[0]["predicted"][1]
    assert added == pytest.approx(more - keeps, rel=0.05)


def test_what_a_teacher_adds_is_predicted():
    """Of many layers its states are the peak, of a large vocabulary the student's divergence."""
    deep = {"hidden_size": 256, "ffn_size": 1024, "num_layers": 16, "sharing": "cycle:2"}
    few, many = {"vocab_size": 1000}, {"vocab_size": 30000}
    cases = [(size, teacher) for size in (few, many) for teacher in (None, deep)]
    cells = run_ranks(measure, 2, [("none", s, "zero1_fp32", teacher) for s, teacher in cases])[0]
    parts = ("the teacher's pass", "scores over the vocabulary")
    for without, taught, part in zip(cells[::2], cells[1::2], parts, strict=True):
        assert {part, "the teacher's weights"} <= {*taught["parts"]}
        measured, predicted = (
            [more - less for more, less in zip(taught[kind], without[kind], strict=True)]
            for kind in ("measured", "predicted")
        )
        assert predicted == pytest.approx(measured, rel=0.05), cells


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_scores_of_a_teacher_and_a_student_take_what_is_predicted(precision):
    """The teacher's states are gone before its scores exist."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = SIZES["albert-tiny"]
    deep = replace(model, num_layers=48)
    rows = {"micro_batch_size": 4, "sequence_length": 128}
    layout = Layout(name="", model=model, teacher=deep, ranks=1, precision=precision, **rows)
    stream = StreamConfig(sequence_length=128)
    batch = next(synthetic_batches(stream, vocab_size=30_000, micro_batch_size=4, seed=0))
    tokens = batch.on(torch.device("cpu"))
    labels = tokens.pop("masked_labels")
    del tokens["pair_labels"], tokens["seeds"]
    teacher = Teacher(AlbertForPretraining(deep).to(dtype), 1.0)
    goals = teacher.score(**tokens)
    head = MlmHead(model).to(dtype)
    word = torch.randn(model.vocab_size, 64, dtype=dtype)
    hidden = torch.randn(len(labels), model.hidden_size, dtype=dtype)

    def take_pass() -> None:
        loss, _, divergence = head(hidden, labels, word, False, goals)
        (loss + divergence).backward()

    take_pass()  # the gradients stay
    memory = predict_memory(layout)
    peaks = [measure_peak(lambda: teacher.score(**tokens)), measure_peak(take_pass)]
    assert [memory.teacher_pass, memory.head] == pytest.approx(peaks, rel=0.02)


class FlashAttention(torch.autograd.Function):
    """It keeps for backward what the operator of CUDA keeps; its numbers mean nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        mixed = q + k + v
        ctx.save_for_backward(q, k, v, mixed)
        return mixed

    @staticmethod
    def backward(ctx, dy):
        return dy, dy, dy


def test_what_a_layer_keeps_on_cuda_is_predicted_in_bf16_and_in_fp8(monkeypatch):
    """By the bytes that the blocks of CUDA save, their kernels taken from the host."""
    lengths = [64, 100, 92]
    tokens = sum(lengths)
    batch = build_batch(lengths)
    kept = {}
    monkeypatch.setattr(encoder, "is_faster_in_triton", lambda x: True)
    attend = encoder.VarlenAttention
    monkeypatch.setattr(attend, "forward", lambda self, *qkv: FlashAttention.apply(*qkv[:3]))

    def measure(in_eight: bool, num_layers: int) -> int:
        model = build(num_layers=num_layers, max_position_embeddings=100).bfloat16()
        model.albert.encoder.eight_bits = in_eight
        x = torch.randn(tokens, 64).bfloat16().requires_grad_()
        storages = {}

        def keep(saved: torch.Tensor) -> torch.Tensor:
            storages[saved.untyped_storage().data_ptr()] = saved
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            model.albert.encoder(x, batch["cu_seqlens"], batch["max_seqlen"])
        return sum(saved.untyped_storage().nbytes() for saved in storages.values())

    model = replace(SIZES["albert-xlarge"], num_layers=4)
    with eight_bits.emulated():
        for in_eight in (False, True):
            kept[in_eight] = (measure(in_eight, 5) - measure(in_eight, 3)) / 2
            settings = {"micro_batch_size": 1, "eight_bits": in_eight}
            layout = Layout(name="", model=model, ranks=1, **settings)
            predicted, again = bytes_a_token(layout, on_cuda=True)
            assert again == 0
            # Mean and deviation of two norms are not counted, nor are scales.
            measured = kept[in_eight] / tokens / 64 * model.hidden_size
            assert measured == pytest.approx(predicted, rel=0.01)
    assert kept[True] < 0.9 * kept[False]
