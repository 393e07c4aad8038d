"""Predict the time and memory of an optimizer step on clusters of GPUs.

Example: albert-ds plan --model albert-xxlarge --gpus 64 --link 100 --steps 125000.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from albert_ds.base.cli import Parser, Range, flags_of, positive
from albert_ds.base.errors import UserError
from albert_ds.data.stream_config import BATCH_SIZE, VARYING, read_varying
from albert_ds.model.config import SIZES, reshape
from albert_ds.settings.shared import SharedConfig
from albert_lab.scaling.hardware import GPUS, LARGE_PRODUCT, MFU, Gpu, describe_gpu, read_gpu
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.planner import Plan, count_nodes, find_layouts, find_plans
from albert_lab.scaling.report import plan_as_text
from albert_lab.scaling.step_time import Machine, predict_step
from albert_lab.tables import table

SHARED = flags_of(SharedConfig)
CHANGING = ("batch_size", "sequence_length")  # may be schedules
# Of the model, where it was validated; a link to docs/raw/scaling_constants.json.
ERRORS = Path(__file__).parents[1] / "scaling/constants.json"


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    meaning = "predict steps of several models on clusters of any size and link"
    _add_predict(commands.add_parser("predict", help=meaning, description=meaning).add)
    meaning = "choose the layout for a model and a cluster: memory, samples/s, hours"
    _add_plan(commands.add_parser("plan", help=meaning, description=meaning).add)
    return parser


def _add_cluster(add, or_schedule: str = "") -> None:
    text = (
        f"{', '.join(GPUS)}: rates of the datasheet; or a JSON file with device, bf16_tflops, "
        "memory_bytes, memory_bandwidth_gb_s, as measured"
    )
    add("--hardware", text, "GPU_OR_REPORT", default="h100")
    text = (
        "share of the GPU's peak in large passes (default: by hidden size as measured on one H100, "
        f"{', '.join(f'{width}: {share}' for width, share in MFU.items())}); the peak of a report "
        f"is its bf16_tflops / {LARGE_PRODUCT}"
    )
    add("--mfu", text, "SHARE", Range(gt=0, le=1))
    add("--gpus-a-node", "GPUs that share one link", "GPUS", positive, default=8)
    text = f"sequences of an optimizer step{or_schedule}"
    kind = VARYING["batch_size"] if or_schedule else BATCH_SIZE
    add("--batch-size", text, "SAMPLES", kind, default=4096)
    text = f"tokens of a sequence, without padding{or_schedule}"
    kind = VARYING["sequence_length"] if or_schedule else positive
    add("--sequence-length", text, "TOKENS", kind, default=512)


def _add_predict(add) -> None:
    models = ["bert-large", "albert-large", "albert-base", "albert-xlarge", "albert-xxlarge"]
    add("--models", "sizes; the first is the baseline", nargs="+", choices=SIZES, default=models)
    counts, links = [8, 32, 128, 512, 1024, 4096], [10, 25, 100, 400, 3200]
    add("--gpus", "numbers of GPUs", "GPUS", positive, nargs="+", default=counts)
    text = "Gb/s of a node's network, all adapters together"
    add("--links", text, "GBIT/S", Range(gt=0), nargs="+", default=links)
    add("--micro-batch-size", "maximum sequences of a pass", "SAMPLES", positive, default=32)
    _add_cluster(add)


def _add_plan(add) -> None:
    add("--model", "size", choices=SIZES, required=True)
    add("--sharing", "pattern of train.py --sharing (default: the size's own)", "HOW")
    add("--per-layer", "what layers have of their own", "WHAT", default="none")
    add("--muon", "Muon, ds_configs/zero1_bf16_muon.json, instead of LAMB", action="store_true")
    text = (
        "the blocks' products in fp8: memory, and the time of bf16, since that of fp8 has not been "
        "measured"
    )
    add("--fp8", text, action="store_true")
    text = "depths of train.py --depth-schedule (default: all layers from the first step on)"
    add("--depth-schedule", text, "LAYERS@START,...")
    add("--gpus", "GPUs of the cluster", "GPUS", positive, required=True)
    add("--gpu-memory", "memory of a GPU in GB (default: that of --hardware)", "GB", Range(gt=0))
    text = "rate of a node's network in Gb/s, all adapters together"
    add("--link", text, "GBIT/S", Range(gt=0), required=True)
    add("--steps", "optimizer steps", "STEPS", SHARED["steps"].type, required=True)
    add("--micro-batch-size", "sequences of a pass (default: the best)", "SAMPLES", positive)
    text = "share of the memory reserved for CUDA, NCCL and fragmentation"
    add("--reserve", text, "SHARE", Range(ge=0, lt=1), default=0.1)
    _add_cluster(add, ", or a schedule as in train.py --help")


def run_predict(args) -> None:
    gpu = read_gpu(args.hardware)
    rows = [compare(args, gpu, *cluster) for cluster in itertools.product(args.gpus, args.links)]
    first, *others = args.models
    header = ["GPUs", "sequences per GPU", "Gb/s per node", f"{first} samples/s, exposed"]
    header += [f"{model}, speed-up" for model in others]
    print(f"PREDICTED, {gpu.name}; {gpu.source}\n\n{table(header, rows)}")


def compare(args, gpu: Gpu, gpus: int, link: float) -> list[str]:
    """The first model's speed on a cluster, and the others' over it; ZeRO-1 in bf16."""
    local, left = divmod(args.batch_size, gpus)
    if left:
        raise UserError(f"--gpus {gpus}: must divide --batch-size {args.batch_size}")
    micro = next(n for n in range(args.micro_batch_size, 0, -1) if local % n == 0)
    steps = [
        predict_step(
            Layout(
                name=name,
                model=SIZES[name],
                ranks=gpus,
                nodes=count_nodes(gpus, args.gpus_a_node),
                micro_batch_size=micro,
                accumulation=local // micro,
                sequence_length=args.sequence_length,
            ),
            describe_gpu(gpu, width=SIZES[name].hidden_size, mfu=args.mfu),
            link=link * 1e9,
        )
        for name in args.models
    ]
    first = steps[0]
    speed = f"{args.batch_size / first.total:,.0f}, {first.communication / first.total:.0%}"
    speed_ups = (f"{first.total / step.total:.2f}" for step in steps[1:])
    return [f"{gpus}", f"{local}", f"{link:g}", speed, *speed_ups]


def run_plan(args) -> None:
    schedules = {name: v for name in CHANGING if isinstance(v := getattr(args, name), str)}
    plans, machine, limit = choose_plans(args)
    print(
        plan_as_text(
            plans,
            steps=args.steps,
            depth_schedule=args.depth_schedule,
            schedules=schedules,
            limit=limit,
            link=args.link * 1e9,
            machine=machine,
            errors=json.loads(ERRORS.read_text()),
        )
    )


def choose_plans(args) -> tuple[list[Plan], Machine, float]:
    """The layouts that fit, the one to use first; the machine; the bytes that a rank may use.

    Of schedules they are those for the largest batch and the longest sequences.
    """
    gpu = read_gpu(args.hardware)
    memory = gpu.memory if args.gpu_memory is None else args.gpu_memory * 1e9
    size = SIZES[args.model]
    limit = memory * (1 - args.reserve)
    machine = describe_gpu(gpu, width=size.hidden_size, mfu=args.mfu)
    model = reshape(size, sharing=args.sharing or size.sharing, per_layer=args.per_layer)
    sizes, lengths = (
        read_varying(name, str(getattr(args, name)), args.steps).values for name in CHANGING
    )
    layouts = find_layouts(
        args.model,
        model,
        ranks=args.gpus,
        ranks_a_node=args.gpus_a_node,
        batch_size=max(sizes),
        sequence_length=max(lengths),
        micro_batch_size=args.micro_batch_size,
        muon=args.muon,
        eight_bits=args.fp8,
    )
    layouts = [x for x in layouts if not any(n % (x.batch_size // x.accumulation) for n in sizes)]
    if not layouts:
        raise UserError(f"--batch-size {args.batch_size}: --gpus {args.gpus} divide not all sizes")
    plans = find_plans(layouts, machine, link=args.link * 1e9, memory_limit=limit)
    return plans, machine, limit


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    {"predict": run_predict, "plan": run_plan}[args.command](args)
