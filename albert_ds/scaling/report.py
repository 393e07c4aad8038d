"""What the scaling model has found, for people: tables in Markdown."""

from albert_ds.scaling.fit import START, Check, summarise
from albert_ds.scaling.plan import Plan
from albert_ds.scaling.predict import Machine


def checks_as_table(
    machine: Machine, fitted: list[Check], held_back: dict[str, list[Check]]
) -> str:
    """Constants, then every cell's measured and predicted step; those held back by group."""
    lines = ["| constant | seconds |", "| --- | ---: |"]
    lines += [f"| {name} | {getattr(machine, name):.3g} |" for name in START]
    for title, checks in {"fitted": fitted, **held_back}.items():
        found = summarise(checks)
        label = title if title == "fitted" else f"held back: {title}"
        lines += [
            "",
            f"{label}: {found['cells']} cells, error {found['mean']:.1%} mean, "
            f"{found['median']:.1%} median, {found['largest']:.1%} at most",
            "",
            "| cell | measured s | predicted s | of it compute, communication, optimizer | error |",
            "| --- | ---: | ---: | --- | ---: |",
        ]
        for check in checks:
            step = check.predicted
            lines.append(
                f"| {check.cell.label} | {check.cell.total:.2f} | {step.total:.2f} | "
                f"{step.compute:.2f}, {step.communication:.2f}, "
                f"{step.optimizer + step.other:.2f} | {check.error:+.1%} |"
            )
    return "\n".join(lines)


def predictions_as_table(rows: list[dict], machine: Machine) -> str:
    """Speed-up over the first model, a line a cluster and overlap, a column a model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [
        f"PREDICTED, {machine.name}; {machine.source}",
        "",
        "| GPUs | sequences a GPU | Gb/s a node | overlap | "
        f"{models[0]} samples/s, exposed | " + " | ".join(f"{m}, speed-up" for m in models[1:]),
        "| ---: " * (5 + len(models[1:])) + "|",
    ]
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = (row["gpus"], row["sequences_a_gpu"], row["link_gbits"], row["overlap"])
        found.setdefault(key, {})[row["model"]] = row
    for key, by_model in found.items():
        first = by_model[models[0]]
        exposed = first["communication_seconds"] / first["step_seconds"]
        cells = [f"{first['samples_a_second']:,.0f}, {exposed:.0%}"]
        cells += [f"{by_model[name]['speed_up']:.2f}" for name in models[1:]]
        lines.append("| " + " | ".join([f"{value:g}" for value in key] + cells) + " |")
    return "\n".join(lines)


def batches_as_table(batches: list[dict], models: list[str], nodes: int) -> str:
    """Up to how many sequences a GPU and step each speed-up lasts, a line a link and overlap."""
    if not batches:
        return ""
    wanted = list(dict.fromkeys(found["speed_up"] for found in batches))
    lines = [
        "",
        f"{models[1]} is so many times as fast as {models[0]} up to so many sequences a GPU and "
        f"step, on {nodes} nodes:",
        "",
        "| Gb/s a node | overlap | " + " | ".join(f"{value:g} times" for value in wanted) + " |",
        "| ---: " * (2 + len(wanted)) + "|",
    ]
    found = {(b["link_gbits"], b["overlap"], b["speed_up"]): b["sequences_a_gpu"] for b in batches}
    for link, overlap in dict.fromkeys(key[:2] for key in found):
        sizes = [found[link, overlap, value] for value in wanted]
        cells = ["always" if n is None else f"{n:,}" if n else "never" for n in sizes]
        lines.append(f"| {link:g} | {overlap:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plan_as_text(
    plans: list[Plan], *, steps: int, limit: float, machine: Machine, errors: dict
) -> str:
    """The best plan with each figure's error, its command, and what else would fit."""
    best = plans[0]
    layout, memory, step = best.layout, best.memory, best.step
    in_memory, in_time = "not validated", "not validated"
    if errors.get("memory"):
        in_memory = (
            f"{errors['memory']['largest']:.0%} at most, {errors['memory']['mean']:.0%} on average "
            f"of {errors['memory']['cells']} measured layouts (CPU)"
        )
    if errors.get("held_back"):
        mean = max(group["mean"] for group in errors["held_back"].values())
        in_time = f"{mean:.0%} on held-back cells (CPU); of {machine.name}'s rates none is claimed"
    lines = [
        f"PREDICTED: {layout.name} on {layout.ranks} {machine.name.upper()} "
        f"in {layout.nodes} nodes",
        "",
        "| | | error of the model |",
        "| --- | ---: | --- |",
        f"| micro-batch x accumulation | {layout.micro_batch_size} x {layout.accumulation} | |",
        f"| ZeRO stage | {layout.zero} | |",
        f"| tensor parallel | {layout.tensor_parallel} | |",
        f"| activation checkpointing | {layout.activation_checkpointing} | |",
        f"| memory of a GPU, GB (at most {limit / 1e9:.1f}) | {memory.peak / 1e9:.2f} | "
        f"{in_memory} |",
        f"| - weights, masters, moments | {memory.lives / 1e9:.2f} | |",
        f"| - activations | {memory.activations / 1e9:.2f} | |",
        f"| - scores of the vocabulary | {memory.head / 1e9:.2f} | |",
        f"| step, seconds | {step.total:.3f} | {in_time} |",
        f"| - exposed communication | {step.communication / step.total:.0%} | |",
        f"| samples/s | {best.samples_a_second:,.0f} | as the step's |",
        f"| hours for {steps:,} steps | {best.hours(steps):,.1f} | as the step's; no evaluation, "
        "checkpoint or restart in it |",
        f"| sent by a GPU in a step, MB | {step.wire_bytes / 1e6:,.1f} | 2 % (counted, a test "
        "holds it) |",
        f"| through a node's link in all, TB | {step.link_bytes * steps / 1e12:,.2f} | 2 % |",
        "",
        as_command(best, steps),
        "",
        "The fastest others within the memory:",
        "",
        "| micro-batch | accumulation | ZeRO | TP | checkpointing | GB | samples/s |",
        "| ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for plan in plans[1:6]:
        other = plan.layout
        lines.append(
            f"| {other.micro_batch_size} | {other.accumulation} | {other.zero} | "
            f"{other.tensor_parallel} | {other.activation_checkpointing} | "
            f"{plan.memory.peak / 1e9:.2f} | {plan.samples_a_second:,.0f} |"
        )
    return "\n".join(lines)


def as_command(plan: Plan, steps: int) -> str:
    """What to type; data and output are the user's."""
    layout = plan.layout
    flags = [
        f"    deepspeed albert_ds/train.py --model {layout.name} --data DATA --output RUN",
        f"--steps {steps} --batch-size {layout.batch_size}",
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--sequence-length {layout.sequence_length}",
    ]
    if layout.tensor_parallel > 1:
        flags.append(f"--tensor-parallel {layout.tensor_parallel}")
    if layout.activation_checkpointing != "none":
        flags.append(f"--activation-checkpointing {layout.activation_checkpointing}")
    flags.append(f"--deepspeed_config ds_configs/zero{layout.zero}_bf16.json")
    return " \\\n        ".join(flags)
