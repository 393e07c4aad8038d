"""A plan as Markdown."""

from shlex import quote

from albert_ds.model.config import SIZES
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.planner import RULE, Plan, find_hours, list_patterns_of
from albert_lab.scaling.step_time import Machine
from albert_lab.tables import table

LIGHT = 0.1  # share of a step
DATA, RUN = "DATA", "RUN"  # for the user to fill in


def plan_as_text(
    plans: list[Plan],
    *,
    steps: int,
    depth_schedule: str | None,
    schedules: dict[str, str],
    teacher: str | None,
    limit: float,
    link: float,
    machine: Machine,
    errors: dict,
) -> str:
    """The best plan with the error of each figure, its command, and the fastest layouts that fit.

    limit: bytes of a GPU; link: bits/s of a node; errors: docs/raw/scaling_constants.json.
    """
    best = plans[0]
    layout = best.layout
    changing = {"depth_schedule": depth_schedule, "schedules": schedules}
    hours = find_hours(best, machine, link=link, steps=steps, **changing)
    rows = figures_of(best, machine, steps=steps, hours=hours, limit=limit, errors=errors)
    header = ("micro-batch", "accumulation", "ZeRO", "TP", "checkpointing", "GB", "samples/s")
    fastest = sorted(plans, key=lambda plan: plan.step.total)[:5]
    parts = [
        f"PREDICTED, not measured: {layout.name} on {layout.ranks} {machine.name}, nodes: "
        f"{layout.nodes}, {link / 1e9:g} Gb/s a node",
        table(("", "", "error of the model"), rows),
        as_command(best, steps, teacher=teacher, **changing),
        patterns_as_text(list_patterns_of(best, machine, link=link)),
        f"{RULE} The fastest layouts that fit, whatever their stage:",
        table(header, map(_row, fastest)),
        f"Rates: {machine.source}.",
    ]
    return "\n\n".join(parts)


def figures_of(
    plan: Plan, machine: Machine, *, steps: int, hours: float, limit: float, errors: dict
) -> list[tuple[str, object, str]]:
    """What a plan predicts: its name, the figure, the error of the model."""
    layout = plan.layout
    step = plan.step
    gpu_hours = hours * layout.ranks
    # Rounded first, so that the rows add up as printed.
    live = {part: round(size / 1e9, 2) for part, size in plan.memory.at_peak.items()}
    in_memory = (
        f"{errors['memory']['largest']:.0%} at most, {errors['memory']['mean']:.0%} on average "
        f"of {errors['memory']['cells']} measured layouts (CPU)"
    )
    mean = max(group["mean"] for group in errors["held_back"].values())
    in_time = f"{mean:.0%} on held-back cells (CPU); no error is claimed for {machine.name}"
    of_eight_bits = []
    if layout.eight_bits:
        in_memory = "5% at most of two sizes on one H200"
        in_time = "from the speed of these sizes there; no error is claimed"
        of_eight_bits = [("share of the FLOPs in fp8", f"{layout.eight_bit_share:.1%}", "")]
    return [
        ("micro-batch x accumulation", f"{layout.micro_batch_size} x {layout.accumulation}", ""),
        ("ZeRO stage", layout.zero, ""),
        ("tensor parallel", layout.tensor_parallel, ""),
        ("activation checkpointing", layout.activation_checkpointing, ""),
        (f"GB per GPU, peak (at most {limit / 1e9:.1f})", f"{sum(live.values()):.2f}", in_memory),
        *((f"- {part}", f"{size:.2f}", "") for part, size in live.items()),
        *of_eight_bits,
        ("step, seconds", f"{step.total:.3f}", in_time),
        ("- exposed communication", f"{step.communication / step.total:.0%}", ""),
        ("samples/s", f"{plan.samples_per_second:,.0f}", "as the step"),
        (
            f"hours for {steps:,} steps",
            format(hours, ",.1f" if hours >= 10 else ".2g"),
            "as the step; without evaluation, checkpoints, restarts",
        ),
        ("GPU-hours", format(gpu_hours, ",.0f" if gpu_hours >= 10 else ".2g"), "as the step"),
        ("MB sent by a GPU per step", f"{step.wire_bytes / 1e6:,.1f}", "2 % (a test checks it)"),
        ("TB over a node's link in all", f"{step.link_bytes * steps / 1e12:,.2f}", "2 %"),
    ]


def patterns_as_text(patterns: dict[str, float]) -> str:
    """Which patterns of --sharing keep communication light on this link."""
    light = [f"{word} {share:.0%}" for word, share in patterns.items() if share < LIGHT]
    heavy = [f"{word} {share:.0%}" for word, share in patterns.items() if share >= LIGHT]
    return (
        f"Exposed communication in this layout is under {LIGHT:.0%} of a step with --sharing: "
        f"{', '.join(light) or 'none of the patterns'}\n"
        f"and more with: {', '.join(heavy) or 'no pattern'} (cycle:M: any M whole blocks)"
    )


def _row(plan: Plan) -> list[object]:
    layout = plan.layout
    return [
        *(layout.micro_batch_size, layout.accumulation, layout.zero, layout.tensor_parallel),
        layout.activation_checkpointing,
        f"{plan.memory.peak / 1e9:.2f}",
        f"{plan.samples_per_second:,.0f}",
    ]


def as_command(
    plan: Plan,
    steps: int,
    *,
    depth_schedule: str | None,
    schedules: dict[str, str],
    teacher: str | None,
) -> str:
    """The trainer's command; the user fills in DATA, RUN and the hosts."""
    layout = plan.layout
    lines = command_lines(plan, steps, depth_schedule=depth_schedule, schedules=schedules)
    if teacher is not None:
        lines.append(f"--teacher {quote(teacher)}")
    command = "    " + " \\\n        ".join(lines)
    if layout.eight_bits:
        command += f'\n\nFP8.json is {name_config(layout)} with "fp8": {{"enabled": true}} in it.'
    if layout.nodes == 1:
        return command
    return (
        f"{command}\n\nHOSTFILE has a line `NAME slots={layout.ranks_a_node}` for each of the "
        f"{layout.nodes} nodes; under Slurm use a recipe of slurm/ instead."
    )


def command_lines(
    plan: Plan, steps: int, *, depth_schedule: str | None = None, schedules: dict[str, str]
) -> list[str]:
    """The words of that command, some a line."""
    layout = plan.layout
    batch_size = schedules.get("batch_size", layout.batch_size)
    ranks = f"--num_gpus {layout.ranks}" if layout.nodes == 1 else "--hostfile HOSTFILE"
    lines = [
        f"deepspeed {ranks} --module albert_ds.train",
        f"--model {layout.name} --data {DATA} --output {RUN}",
        f"--steps {steps} --batch-size {batch_size}",
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--sequence-length {schedules.get('sequence_length', layout.sequence_length)}",
    ]
    model = layout.model
    if layout.name in SIZES and model.sharing != SIZES[layout.name].sharing:
        lines.append(f"--sharing {model.sharing}")
    if model.per_layer != "none":
        lines.append(f"--per-layer {model.per_layer}")
    if depth_schedule:
        lines.append(f"--depth-schedule {depth_schedule}")
    if layout.tensor_parallel > 1:
        lines.append(f"--tensor-parallel {layout.tensor_parallel}")
    if layout.activation_checkpointing != "none":
        lines.append(f"--activation-checkpointing {layout.activation_checkpointing}")
    config = "FP8.json" if layout.eight_bits else name_config(layout)
    return [*lines, f"--deepspeed_config {config}"]


def name_config(layout: Layout) -> str:
    """The file of the project with the JSON of a layout."""
    return f"ds_configs/zero{layout.zero}_bf16{'_muon' * layout.muon}.json"
