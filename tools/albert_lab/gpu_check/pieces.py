"""The pieces of a check, in their order."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median

from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_lab.gpu_check.check import Check, Finding, ended

SIZES_OF_TABLE_1 = (
    *("albert-base", "albert-large", "albert-xlarge", "albert-xxlarge", "bert-base", "bert-large"),
)
SPEEDS = ("tokens_a_second", "flops_a_second", "peak_memory")
PRECISIONS = ("fp32", "bf16", "fp16")
GRIDS = ("1x2", "2x1", "2x2")  # tensor x data parallel ranks, all on one GPU


def look_at_machine(check: Check) -> list[Finding]:
    quick = ["--quick"] if check.quick else []
    module = "albert_lab.gpu_check.machine"
    cell = check.run("machine/rates", module, *quick, module=True)
    if cell["code"] != 0:
        return [ended("rates of the device", cell)]
    found = cell["result"]
    write_file(check.folder / "hardware.json", json.dumps(found, indent=1) + "\n")
    peak = found["peak_flops"]
    share = f", {1e12 * found['bf16_tflops'] / peak:.0%} of the datasheet's" if peak else ""
    copies, waits = found["copies_gb_s"], found["microseconds"]
    rows = {
        "versions": ", ".join(f"{name} {value}" for name, value in found["versions"].items()),
        "memory": f"{found['memory_bytes'] / 1e9:.0f} GB, "
        f"{found['memory_bandwidth_gb_s']:.0f} GB/s",
        "matrix products": f"bf16 {found['bf16_tflops']:.3g} TFLOP/s{share}; fp16 "
        f"{found['fp16_tflops']:.3g}, fp32 {found['fp32_tflops']:.3g}",
        "copies, GB/s": f"to the device {copies['pinned_to_device']:.3g} pinned, "
        f"{copies['to_device']:.3g} ordinary; back {copies['to_pinned']:.3g} and "
        f"{copies['to_host']:.3g}",
        "host": f"{waits['a_launch']:.3g} us a launch, {waits['a_wait']:.3g} us to wait for one",
    }
    return [Finding(what=what, passed=None, says=says) for what, says in rows.items()]


def run_gpu_tests(check: Check) -> list[Finding]:
    command = ("pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", "tests")
    cell = check.run("tests/pytest", *command, module=True, output=False, seconds=580)
    log = (check.folder / "cells/tests/pytest.log").read_text(errors="replace")
    return [ended("pytest -m gpu", cell, (log.strip().splitlines() or [""])[-1].strip("= "))]


def check_exactness(check: Check) -> list[Finding]:
    """The trainer against a float64 process of Hugging Face's model, in every precision."""
    findings = []
    cells = [("1x1", precision) for precision in PRECISIONS]
    cells += [(grid, precision) for grid in GRIDS for precision in PRECISIONS[:2]]
    for grid, precision in cells[:4] if check.quick else cells:
        flags = ("--grid", grid, "--precision", precision)
        cell = check.run(
            f"exactness/{grid}-{precision}", "tests.exactness.one", *flags, module=True
        )
        what = f"{precision}, {grid} ranks (tensor x data parallel)"
        if cell["result"] is None:
            findings.append(ended(what, cell))
            continue
        rows = cell["result"]["rows"]
        worst = {k: max(row["off"][k] for row in rows) for k in ("loss", "gradient", "overall")}
        says = f"{len(rows)} modes; " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
        passed = all(row["within"] for row in rows)
        findings.append(Finding(what=what, passed=passed, says=says))
    return findings


def interrupt_and_resume(check: Check) -> list[Finding]:
    flags = ["--data", check.data, "--folder", check.folder / "runs" / "resume"]
    flags += ["--quick"] if check.quick else []
    module = "tools.lab.fault_check"
    cell = check.run("resume/run", module, "resume", *flags, module=True, seconds=580)
    return [ended("USR1 and KILL, then the same weights bit for bit", cell, said(cell))]


def said(cell: dict) -> str:
    return cell["result"]["says"] if cell["result"] else ""


def measure_speed(check: Check) -> list[Finding]:
    """Steps of each size in bf16 with ZeRO-1 on one GPU, with small and with large passes."""
    findings = []
    for model in ("albert-tiny",) if check.quick else SIZES_OF_TABLE_1:
        flags = ["--models", model, "--ranks", 1, "--accumulation", 2, "--warmup", 2]
        flags += ["--deepspeed_config", "ds_configs/zero1_bf16.json"]
        flags += ["--micro-batch", "1,2" if check.quick else "8,32,128"]
        flags += ["--sequence-length", 64] if check.quick else []
        cell = check.run(f"speed/{model}", "tools/throughput_bench.py", *flags, seconds=600)
        report = cell["result"] or {"cells": []}  # of the passes that fitted
        for own in report["cells"]:
            turn = {key: median(turn[key] for turn in own["rounds"]) for key in SPEEDS}
            says = f"{turn['tokens_a_second']:,.4g} tokens/s, {turn['peak_memory'] / 1e9:.1f} GB"
            if report["peak_flops"]:
                says += f", MFU {turn['flops_a_second'] / report['peak_flops']:.1%}"
            what = f"{model}, {own['micro_batch_size']} sequences"
            findings.append(Finding(what=what, passed=None, says=says))
        if cell["code"] != 0:
            too_large = report["cells"] and "out of memory" in cell["last_words"].lower()
            what, says = f"{model}, larger passes", cell["last_words"]
            findings.append(Finding(what=what, passed=None if too_large else False, says=says))
    return findings


def use_all_gpus(check: Check) -> list[Finding]:
    """NCCL, its traffic, tensor parallelism, and what happens when a rank is lost."""
    if check.gpus < 2:
        return [Finding(what="two or more GPUs", passed=None, says="not run: one GPU is present")]
    model = "albert-tiny" if check.quick else "albert-large"
    small = ("--sequence-length", 64) if check.quick else ()
    several = ("--ranks", f"1,{check.gpus}", "--tensor-parallel", "1,2", *small)
    several += ("--micro-batch", 2 if check.quick else 32)
    speed = check.run("gpus/speed", "tools/throughput_bench.py", "--models", model, *several)
    findings = [ended("data and tensor parallel steps", speed)]
    for cell in speed["result"]["cells"] if speed["code"] == 0 else ():
        turn = cell["rounds"][len(cell["rounds"]) // 2]
        waited = turn["communication_seconds"] / turn["seconds_a_step"]
        says = f"{turn['samples_a_second']:.4g} samples/s, {waited:.0%} of the step waits for ranks"
        what = f"{model}, {cell['ranks']} ranks, tensor parallel {cell['tensor_parallel']}"
        findings.append(Finding(what=what, passed=None, says=says))
    config = ("--deepspeed_config", "ds_configs/zero1_bf16.json", "--models", model)
    ranks = ("--ranks", check.gpus)
    volume = check.run("gpus/traffic", "tools/comm_volume.py", *config, *ranks)
    findings.append(ended("bytes of each kind", volume, "in cells/gpus/traffic.log"))
    for word in ("KILL", "STOP"):
        flags = ("lost", "--signal", word, "--data", check.data)
        folder = ("--folder", check.folder / "runs" / f"lost-{word}")
        module = "tools.lab.fault_check"
        cell = check.run(f"gpus/{word}", module, *flags, *folder, module=True, seconds=280)
        findings.append(ended(f"a rank gets SIG{word}", cell, said(cell)))
    return findings


PIECES: dict[str, Callable[[Check], list[Finding]]] = {
    "machine": look_at_machine,
    "tests": run_gpu_tests,
    "exactness": check_exactness,
    "resume": interrupt_and_resume,
    "speed": measure_speed,
    "gpus": use_all_gpus,
}


def build_text(check: Check) -> str:
    """A folder of shards made of this Python's own documentation; for a check without --data."""
    text, vocab = check.folder / "text.txt", check.folder / "vocab"
    size, length = (200_000, 64) if check.quick else (4_000_000, 512)
    pieces = 800 if check.quick else 8000
    shards = check.folder / "shards"
    input_ = ("--input", text)
    commands = {
        "corpus": ("tools/demo/demo_corpus.py", "--max-bytes", size, "--output", text),
        "vocab": ("tools/build_vocab.py", *input_, "--vocab-size", pieces, "--output", vocab),
        "shards": (
            *("tools/build_shards.py", *input_, "--vocab", vocab / "spiece.model"),
            *("--sequence-length", length, "--holdout", 0.05, "--output", shards),
        ),
    }
    for name, command in commands.items():
        cell = check.run(f"text/{name}", *command, output=False)
        if cell["code"] != 0:
            raise UserError(f"no text for the check: {cell['last_words']}; allowed: --data")
    return str(shards)
