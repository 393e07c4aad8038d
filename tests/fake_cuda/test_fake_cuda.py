"""The trainers' CUDA path, run on a fake device that is host memory.

It finds operators that mix devices, wrong arguments of flash attention, collectives of host tensors
over NCCL, and what makes the host wait for the device. It cannot find races between streams, wrong
kernels, or anything about speed.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from albert_ds.data.shards import open_shards
from tests.conftest import ROOT, finish, start_ranks, train_command
from tests.distributed import take_port
from tests.fake_cuda.build import find_compiler
from tests.finetuning import flags, write_checkpoint, write_rte, write_squad

UTILS = "site-packages/deepspeed/runtime/utils.py"
ZERO = "site-packages/deepspeed/runtime/zero"
MICRO_BATCHES = 4  # of a step here
# The places that may make the host wait, and how often in a step: one that waits at every
# micro-batch is over its bound.
WAITS = {
    # The norm goes into metrics.jsonl, and one that is not finite skips the step. At ZeRO-0 it is
    # computed here, and which tensors this rank counts in it goes to the device.
    "albert_ds/engine/engine.py": 3,
    f"{UTILS}:clip_tensors_by_global_norm": 1,
    f"{ZERO}/stage3.py:get_grad_norm_direct": 2,
    # fp16 and ZeRO-2: whether a gradient is finite.
    f"{ZERO}/stage_1_and_2.py:has_overflow": 1,
    f"{ZERO}/stage3.py:has_overflow": 1,
    # ZeRO-3 waits at EVERY MICRO-BATCH: once for the streams of its reductions, and on one rank
    # also for the two gathers. Nothing of the product can change that.
    f"{ZERO}/stage3.py:independent_gradient_partition_epilogue": MICRO_BATCHES,
    f"{ZERO}/partition_parameters.py:wait": 2 * MICRO_BATCHES,
}
# In its first step ZeRO-3 compares the order of the modules over all ranks.
FIRST_STEP_OF_ZERO_3 = {
    f"{ZERO}/utils.py:assert_lst_len_same_as_other_ranks",
    f"{ZERO}/utils.py:get_lst_from_rank0",
    f"{ZERO}/partition_parameters.py:wait",
    "site-packages/deepspeed/accelerator/cuda_accelerator.py:synchronize",
}
Run = tuple[str, list[str]]  # module, flags
SHIPPED = sorted(path.name for path in (ROOT / "ds_configs").glob("*.json"))


@pytest.fixture(scope="module")
def fake_cuda():
    """The environment of processes that see one fake device each, as --gpus-per-task=1 does it."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has the real operators of CUDA")
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    from tests.fake_cuda.__main__ import environment

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.delenv("DS_ACCELERATOR", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield


def run_on_cuda(folder: Path, runs: list[Run], ranks: int = 1) -> list[dict]:
    """Run trainers one after the other, each on `ranks` devices; returns rank 0's reports."""
    folder.mkdir(exist_ok=True)
    reports = [folder / f"report-{number}.json" for number in range(len(runs))]
    # Each has a port of its own: a rank may begin the next while the last one's store is open.
    given = [(take_port(), str(path), *run) for path, run in zip(reports, runs, strict=True)]
    (folder / "runs.json").write_text(json.dumps(given))
    command = [sys.executable, "-m", "tests.fake_cuda.run", str(folder / "runs.json")]
    assert finish(start_ranks(command, ranks)) == [0] * ranks
    return [json.loads(path.read_text()) for path in reports]


def train(data: Path, run: Path, config: str, **options) -> Run:
    """Steps of four micro-batches on one rank, or on two that share a block."""
    argv = train_command(data, run, deepspeed_config=f"ds_configs/{config}", **options)
    return "albert_ds.train", argv[2:]


def check(report: dict, steps: int, *, groups: int = 2, pinned: int = 0) -> None:
    """No operator mixes devices, and no step waits for the device more than it may.

    The trainer itself pins `pinned` tensors, its loader's thread the others.
    DeepSpeed reads the norms of all parameter groups and their sum by itself; Muon's are three.
    """
    norms = (f"{UTILS}:mask_nan_or_inf_with_val_inplace", f"{UTILS}:is_invalid_grad_norm")
    allowed = WAITS | dict(zip(norms, (groups, groups + 1), strict=True))
    allowed["albert_ds/data/micro_batch.py"] = pinned
    # A graph is compared with eager launches at its first use, which waits for two norms.
    allowed["albert_ds/engine/graphs.py"] = 2 * MICRO_BATCHES
    assert report["mixed"] == {}
    assert len(report["steps"]) == steps
    for number, step in enumerate(report["steps"]):
        counts: dict[str, int] = {}
        for event, count in step.items():
            place = event.partition(" at ")[2]
            if place.startswith("albert_ds"):
                place = place.partition(":")[0]
            counts[place] = counts.get(place, 0) + count
        over = {place: n for place, n in counts.items() if n > allowed.get(place, 0)}
        assert number == 0 and over.keys() <= FIRST_STEP_OF_ZERO_3 or over == {}


def check_each(reports: list[dict]) -> None:
    """Of two steps of each shipped configuration."""
    for name, report in zip(SHIPPED, reports, strict=True):
        check(report, 2, groups=3 if "muon" in name else 2)


def test_every_shipped_configuration(fake_cuda, data, tmp_path):
    options = dict(steps=2, eval_every=2, save_every=2)
    runs = [train(data, tmp_path / name, name, **options) for name in SHIPPED]
    check_each(run_on_cuda(tmp_path, runs))


def test_resuming_exporting_and_fine_tuning(fake_cuda, data, tmp_path):
    vocab = open_shards(data, "train").vocab
    run = tmp_path / "run"
    start = write_checkpoint(tmp_path / "pretrained", vocab, vocab_size=vocab.size)
    options = dict(deepspeed_config="ds_configs/zero1_bf16_adamw.json", micro_batch_size=2)
    rte = flags("glue/rte", write_rte(tmp_path / "RTE"), start, tmp_path / "rte", **options)
    asked = write_squad(tmp_path / "SQuAD", "v2.0")
    squad = flags("squad2", asked, start, tmp_path / "squad2", sequence_length=32, **options)
    reports = run_on_cuda(
        tmp_path,
        [
            train(data, run, "zero1_bf16.json", steps=4),
            train(data, run, "zero1_bf16.json", steps=6),
            (
                "albert_ds.commands.export",
                ["export", "--checkpoint", str(run), "--output", f"{run}-hf"],
            ),
            ("albert_ds.finetune", rte),
            ("albert_ds.finetune", squad),
        ],
    )
    for report, steps in zip(reports[:3], (4, 2, 0), strict=True):
        check(report, steps)
    for report in reports[3:]:
        check(report, 4, pinned=8 * MICRO_BATCHES)  # SQuAD has 8 tensors
    assert json.loads((run / "config.json").read_text())["num_workers"] == 2
    assert (tmp_path / "run-hf" / "model.safetensors").is_file()


def test_ranks_that_see_one_device_each_share_a_block(fake_cuda, data, tmp_path):
    run = train(data, tmp_path / "run", "zero2_bf16.json", steps=2, tensor_parallel=2)
    (report,) = run_on_cuda(tmp_path, [run], ranks=2)
    check(report, 2)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_shipped_configuration_on_two_ranks(fake_cuda, data, tmp_path, tensor_parallel):
    batch_size = 8 * 2 // tensor_parallel
    options = dict(steps=2, batch_size=batch_size, tensor_parallel=tensor_parallel)
    runs = [train(data, tmp_path / name, name, **options) for name in SHIPPED]
    check_each(run_on_cuda(tmp_path, runs, ranks=2))
