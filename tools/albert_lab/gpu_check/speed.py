"""Training steps of one size: its best micro-batch, compiled, real text, and the peer."""

from __future__ import annotations

import statistics
from importlib.util import find_spec

from albert_lab.gpu_check.check import Check, Finding, ended

SIZES_OF_TABLE_1 = (
    *("albert-base", "albert-large", "albert-xlarge", "albert-xxlarge", "bert-base", "bert-large"),
)
MICRO_BATCHES = (8, 16, 32, 64, 128, 256)
NO_GAIN = 1.02  # a larger micro-batch must be faster by this factor
# What the trainer is meant to reach on an H100 or H200.
MFU_GOALS = {"albert-large": 0.45, "albert-xlarge": 0.50, "albert-xxlarge": 0.62}
TOKEN_GOALS = {"albert-base": 600_000}
PEER_GOALS = {"albert-large": 1.5, "albert-xxlarge": 1.3}
WITHOUT_TRITON = "not run: triton, with which torch compiles for a GPU, is not installed"


def bench(check: Check, model: str, name: str, micro_batch: int, *flags: object) -> dict:
    """Steps of throughput_bench.py, in bf16 with ZeRO-1, on one GPU."""
    given: list[object] = ["--models", model, "--micro-batch", micro_batch, "--ranks", 1]
    given += ["--accumulation", 2, "--warmup", 2]
    given += ["--deepspeed_config", "ds_configs/zero1_bf16.json", *flags]
    given += ["--sequence-length", 64] if check.quick else []
    given += ["--rounds", 1 if check.quick else 3, "--steps", 1 if check.quick else 2]
    cell = f"speed-{model}/{name}-{micro_batch}"
    return check.run(cell, "tools/throughput_bench.py", *given, seconds=240)


def is_too_large(cell: dict) -> bool:
    return "out of memory" in cell["last_words"].lower()


def median_of(cell: dict, key: str) -> float:
    return statistics.median(turn[key] for turn in cell["rounds"])


def sweep(check: Check, model: str) -> tuple[int | None, list[dict]]:
    """The micro-batch from which a larger one gains nothing, and the cells that show it."""
    best, rate, cells = None, 0.0, []
    for micro_batch in (1, 2) if check.quick else MICRO_BATCHES:
        cell = bench(check, model, "rows", micro_batch)
        cells.append(cell)
        if cell["code"] != 0:
            break
        found = median_of(cell["result"]["cells"][0], "tokens_a_second")
        if found < NO_GAIN * rate:
            break
        best, rate = micro_batch, found
    return best, cells


def describe(report: dict, cell: dict, plain: dict) -> str:
    """tokens/s, MFU, peak memory and the speed-up over the plain form."""
    says = f"{median_of(cell, 'tokens_a_second'):,.4g} tokens/s"
    if report["peak_flops"]:
        says += f", MFU {median_of(cell, 'flops_a_second') / report['peak_flops']:.1%}"
    says += f", {cell['rounds'][-1]['peak_memory'] / 1e9:.1f} GB"
    return says if cell is plain else f"{says}, {speed_up(cell, plain):.2f} times the plain form"


def measure_speed(check: Check, model: str) -> list[Finding]:
    best, cells = sweep(check, model)
    failed = [c for c in cells if c["code"] != 0 and not is_too_large(c)]
    if best is None or failed:
        return [ended(f"{model}, full rows", (failed or cells)[0])]
    compiles = find_spec("triton") is not None
    compiled = ["--compile"] if compiles else []
    findings = []
    for name, flags in (
        ("full rows", compiled),
        ("real text", ["--data", *check.data, *compiled]),
    ):
        what = f"{model}, {name}, {best} sequences"
        cell = bench(check, model, name.replace(" ", "-"), best, *flags)
        if cell["code"] != 0:
            findings.append(ended(what, cell))
            continue
        report = cell["result"]
        for own in report["cells"]:
            form = "compiled" if own["compile"] else "plain"
            says = describe(report, own, report["cells"][0])
            findings.append(Finding(what=f"{what}, {form}", passed=None, says=says))
        if name == "full rows":
            findings += [advise(model, report["cells"]), *judge(model, report, report["cells"][0])]
    if not compiles:
        findings.append(Finding(what=f"{model}, compiled", passed=None, says=WITHOUT_TRITON))
    return findings


def speed_up(cell: dict, plain: dict) -> float:
    """Over the plain form, round by round."""
    pairs = zip(cell["rounds"], plain["rounds"], strict=True)
    return statistics.median(a["tokens_a_second"] / b["tokens_a_second"] for a, b in pairs)


def advise(model: str, cells: list[dict]) -> Finding:
    """Whether train.py's --compile makes this size's steps shorter here."""
    ratio = max((speed_up(cell, cells[0]) for cell in cells[1:]), default=0.0)
    wins = ratio >= NO_GAIN
    says = f"--compile ({ratio:.2f} times as fast)" if wins else "none: plain is as fast"
    return Finding(what=f"{model}, flags to train with", passed=None, says=says)


def judge(model: str, report: dict, cell: dict) -> list[Finding]:
    """The goals of a size, for full rows without compiling; they miss or are reached."""
    rows = []
    if model in MFU_GOALS and report["peak_flops"]:
        found, goal = median_of(cell, "flops_a_second") / report["peak_flops"], MFU_GOALS[model]
        rows.append((f"MFU at least {goal:.0%}", found >= goal, f"{found:.1%}"))
    if model in TOKEN_GOALS:
        found, goal = median_of(cell, "tokens_a_second"), TOKEN_GOALS[model]
        rows.append((f"at least {goal:,} tokens/s", found >= goal, f"{found:,.4g}"))
    return [as_goal(model, *row) for row in rows]


def as_goal(model: str, goal: str, is_reached: bool, says: str) -> Finding:
    """A goal is no fault of a machine: a miss is said, and fails nothing."""
    word = "reached" if is_reached else "MISSED"
    return Finding(what=f"goal: {model}, {goal}", passed=None, says=f"{word}: {says}")


def best_micro_batch(check: Check, model: str) -> int:
    """As the size's own piece found it; 32 where that has not run."""
    rates = {}
    for micro_batch in (1, 2) if check.quick else MICRO_BATCHES:
        report = check.read(f"speed-{model}/rows-{micro_batch}")
        if report:
            rates[micro_batch] = median_of(report["cells"][0], "tokens_a_second")
    return max(rates, key=rates.__getitem__) if rates else 2 if check.quick else 32


def compare_with_peer(check: Check, model: str) -> list[Finding]:
    """Hugging Face's model in the same process and on the same sequences, each at its best."""
    compiles = find_spec("triton") is not None
    config = "ds_configs/zero1_bf16_adamw.json"
    flags: list[object] = ["--model", model, "--deepspeed_config", config]
    flags += ["--compile"] if compiles else ["--peers", "sdpa", "eager"]
    flags += ["--sequence-length", 64] if check.quick else []
    flags += ["--rounds", 2 if check.quick else 5, "--warmup", 2]
    findings = []
    text = ["--padding", "row", "--data", *check.data]
    for name, own in (("full rows", []), ("real text", text)):
        micro_batch, cell = best_micro_batch(check, model), None
        while cell is None or (is_too_large(cell) and micro_batch > 1):
            given = [*flags, *own, "--micro-batch-size", micro_batch]
            path = f"peer-{model}/{name.replace(' ', '-')}-{micro_batch}"
            cell = check.run(path, "tools/lab/peer_bench.py", *given, seconds=290)
            micro_batch //= 2
        what = f"{model}, {name}, the peer's time over ours"
        if cell["code"] != 0:
            findings.append(ended(what, cell))
            continue
        rounds = cell["result"]["rounds"]
        total = {kind: sum(turn[kind] for turn in rounds) for kind in rounds[0]}
        ours = {kind: total.pop(kind) for kind in list(total) if kind.startswith("albert-ds")}
        best, own_best = min(total, key=total.__getitem__), min(ours, key=ours.__getitem__)
        ratio = total[best] / ours[own_best]
        size = cell["result"]["settings"]["micro_batch_size"]
        says = f"{ratio:.2f} ({best} over {own_best}, {size} sequences)"
        findings.append(Finding(what=what, passed=None, says=says))
        if name == "full rows" and model in PEER_GOALS:
            goal = PEER_GOALS[model]
            findings.append(as_goal(model, f"{goal} times the peer", ratio >= goal, f"{ratio:.2f}"))
    return findings
