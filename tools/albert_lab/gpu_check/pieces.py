"""The pieces of a check, in their order; each takes less than ten minutes on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_lab.gpu_check.check import ROOT, Check, Finding, ended
from albert_lab.gpu_check.speed import SIZES_OF_TABLE_1, compare_with_peer, measure_speed

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


def try_fused_lamb(check: Check) -> list[Finding]:
    """DeepSpeed's LAMB, which is compiled on the spot; a machine without nvcc is told so."""
    config = json.loads((ROOT / "ds_configs/zero0_fp32.json").read_text())
    config["optimizer"]["type"] = "FusedLamb"
    file = check.folder / "fused_lamb.json"
    write_file(file, json.dumps(config, indent=1) + "\n")
    flags = ("--models", "albert-tiny", "--micro-batch", 4, "--rounds", 2, "--ranks", 1)
    flags += ("--deepspeed_config", file, "--sequence-length", 64, "--steps", 2)
    cell = check.run("fused-lamb/steps", "tools/throughput_bench.py", *flags, seconds=580)
    is_refused = cell["code"] == 2 and "CUDA toolkit" in cell["last_words"]
    if is_refused:
        return [Finding(what="FusedLamb", passed=None, says=cell["last_words"])]
    return [ended("FusedLamb", cell, "compiles and steps")]


def interrupt_and_resume(check: Check) -> list[Finding]:
    flags = ["--data", check.data[0], "--folder", check.folder / "runs" / "resume"]
    flags += ["--quick"] if check.quick else []
    module = "tools.lab.fault_check"
    cell = check.run("resume/run", module, "resume", *flags, module=True, seconds=580)
    return [ended("USR1 and KILL, then the same weights bit for bit", cell, said(cell))]


def said(cell: dict) -> str:
    return cell["result"]["says"] if cell["result"] else ""


def cost_of_lamb(check: Check) -> list[Finding]:
    models = ["albert-tiny"] if check.quick else ["albert-base", "albert-large", "albert-xxlarge"]
    cell = check.run("lamb/steps", "tools/lab/lamb_bench.py", "--models", *models)
    if cell["code"] != 0:
        return [ended("LAMB", cell)]
    findings = []
    for model, seconds in cell["result"].items():
        lamb, adamw = (sorted(each)[len(each) // 2] for each in seconds.values())
        says = f"{1e3 * lamb:.3g} ms a step, fused AdamW {1e3 * adamw:.3g} ms"
        findings.append(Finding(what=f"{model}, LAMB", passed=None, says=says))
    return findings


def compare_memory(check: Check) -> list[Finding]:
    """The peak beside the plan's; the plan keeps a tenth of the memory in reserve."""
    models = ["albert-tiny"] if check.quick else ["albert-xlarge", "albert-xxlarge"]
    flags: list[object] = ["--deepspeed_config", "ds_configs/zero1_bf16.json"]
    flags += ["--sequence-length", 64 if check.quick else 512]
    findings = []
    for model in models:
        for micro, again in ((8, "none"), (32, "none"), (32, "block")):
            own: list[object] = ["--models", model, "--micro-batch-size", micro]
            own += ["--activation-checkpointing", again]
            name = f"memory/{model}-{micro}-{again}"
            cell = check.run(name, "tools/lab/memory_bench.py", *flags, *own)
            what = f"{model}, {micro} sequences, checkpointing {again}"
            if cell["code"] != 0:
                findings.append(ended(what, cell))
                continue
            (row,) = cell["result"]["cells"]
            says = f"{row['measured']['peak'] / 1e9:.2f} GB, planned "
            says += f"{row['predicted']['peak'] / 1e9:.2f} ({row['error']:+.1%})"
            findings.append(Finding(what=what, passed=row["error"] > -0.1, says=says))
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
        flags = ("lost", "--signal", word, "--data", check.data[0])
        folder = ("--folder", check.folder / "runs" / f"lost-{word}")
        module = "tools.lab.fault_check"
        cell = check.run(f"gpus/{word}", module, *flags, *folder, module=True, seconds=280)
        findings.append(ended(f"a rank gets SIG{word}", cell, said(cell)))
    return findings


def find_pieces(quick: bool) -> dict[str, Callable[[Check], list[Finding]]]:
    """Name -> what it does."""
    models = ("albert-tiny",) if quick else SIZES_OF_TABLE_1
    return {
        "machine": look_at_machine,
        "tests": run_gpu_tests,
        "exactness": check_exactness,
        "fused-lamb": try_fused_lamb,
        "resume": interrupt_and_resume,
        **{f"speed-{m}": lambda check, m=m: measure_speed(check, m) for m in models},
        **{
            f"peer-{m}": lambda check, m=m: compare_with_peer(check, m)
            for m in (("albert-tiny",) if quick else SIZES_OF_TABLE_1[1:4:2])
        },
        "lamb": cost_of_lamb,
        "memory": compare_memory,
        "gpus": use_all_gpus,
    }


def build_text(check: Check) -> str:
    """A folder of shards made of this Python's own documentation; for a check without --data."""
    text, vocab = check.folder / "text.txt", check.folder / "vocab"
    size, length = (200_000, 64) if check.quick else (4_000_000, 512)
    pieces = 800 if check.quick else 8000
    shards = check.folder / "shards"
    commands = {
        "corpus": ("tools/demo/demo_corpus.py", "--max-bytes", size, "--output", text),
        "vocab": (
            "tools/build_vocab.py",
            "--input",
            text,
            "--vocab-size",
            pieces,
            "--output",
            vocab,
        ),
        "shards": (
            *("tools/build_shards.py", "--input", text, "--vocab", vocab / "spiece.model"),
            *("--sequence-length", length, "--holdout", 0.05, "--output", shards),
        ),
    }
    for name, command in commands.items():
        cell = check.run(f"text/{name}", *command, output=False)
        if cell["code"] != 0:
            raise UserError(f"no text for the check: {cell['last_words']}; allowed: --data")
    return str(shards)
