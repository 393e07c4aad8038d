"""Predict the time and memory of an optimizer step on clusters of GPUs.

Example: albert-ds plan --model albert-xxlarge --gpus 64 --link 100 --steps 125000.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

from albert_ds.base.cli import Parser, Range, as_flag, flags_of, path, positive
from albert_ds.base.errors import UserError
from albert_ds.data.stream_config import BATCH_SIZE, VARYING, read_varying
from albert_ds.model.config import SIZES, ModelConfig, reshape
from albert_ds.settings.models import check_teacher
from albert_ds.settings.shared import SharedConfig
from albert_lab.corpus_plan import PAPER, plan_text
from albert_lab.scaling.hardware import GPUS, LARGE_PRODUCT, MFU, Gpu, describe_gpu, read_gpu
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.planner import Plan, count_nodes, find_layouts, find_plans
from albert_lab.scaling.report import plan_as_text
from albert_lab.scaling.step_time import Machine, predict_step
from albert_lab.small_recipe import HOURS
from albert_lab.tables import table

SHARED = flags_of(SharedConfig)
CHANGING = ("batch_size", "sequence_length")  # may be schedules
# Flags of a plan that have no use without TEXT, with it, and without --gpus.
OF_TEXT = ("--hours", "--language", "--text-field", "--output", "--price")
OF_MODEL = ("--sharing", "--per-layer", "--muon", "--fp8", "--depth-schedule", "--steps")
OF_MODEL += ("--teacher", "--batch-size", "--micro-batch-size", "--sequence-length")
OF_GPUS = ("--price", "--model", "--link", "--gpu-memory", "--reserve", "--hardware", "--mfu")
OF_GPUS += ("--gpus-a-node",)
# Of the model, where it was validated; a link to docs/raw/scaling_constants.json.
ERRORS = Path(__file__).parents[1] / "scaling/constants.json"


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    meaning = "predict steps of several models on clusters of any size and link"
    _add_predict(commands.add_parser("predict", help=meaning, description=meaning).add)
    meaning = (
        "choose the layout for a model and a cluster (memory, samples/s, hours), or for TEXT and "
        "hours all commands to type"
    )
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
    counts = [8, 32, 128, 512, 1024, 4096]
    links = [10, 25, 100, 400, 3200]
    add("--gpus", "numbers of GPUs", "GPUS", positive, nargs="+", default=counts)
    text = "Gb/s of a node's network, all adapters together"
    add("--links", text, "GBIT/S", Range(gt=0), nargs="+", default=links)
    add("--micro-batch-size", "maximum sequences of a pass", "SAMPLES", positive, default=32)
    _add_cluster(add)


def _add_plan(add) -> None:
    text = "files, folders or URLs of text, as `albert-ds vocab --input` takes them"
    add("text", text, "TEXT", path, nargs="*")
    add("--hours", "of TEXT: time of the training", "HOURS", HOURS, default=2.0)
    add("--language", "of TEXT: its language", "CODE", default="en")
    text = "of TEXT: the field of JSON lines or the column of a table that holds the text"
    add("--text-field", text, "NAME", default="text")
    text = "of TEXT: folder that the commands write to"
    add("--output", text, "DIR", Path, default=Path("albert"))
    add("--price", "of TEXT: of a GPU an hour (default: none is named)", "PRICE", Range(ge=0))
    add("--model", "size (default: of TEXT, what it and the hours are enough for)", choices=SIZES)
    add("--sharing", "pattern of train.py --sharing (default: the size's own)", "HOW")
    add("--per-layer", "what layers have of their own", "WHAT", default="none")
    add("--muon", "Muon, ds_configs/zero1_bf16_muon.json, instead of LAMB", action="store_true")
    text = "the blocks' products in fp8: its memory, and the time of two sizes on one H200"
    add("--fp8", text, action="store_true")
    text = "depths of train.py --depth-schedule (default: all layers from the first step on)"
    add("--depth-schedule", text, "LAYERS@START,...")
    text = (
        "folder of train.py --teacher: its memory and its forward passes; the model has the size "
        "of its vocabulary"
    )
    add("--teacher", text, "RUN_OR_HF", path)
    text = "GPUs of the cluster (default: for TEXT none, the CPU of this machine)"
    add("--gpus", text, "GPUS", positive)
    add("--gpu-memory", "memory of a GPU in GB (default: that of --hardware)", "GB", Range(gt=0))
    text = "rate of a node's network in Gb/s, all adapters together (default: none, of one node "
    text += "with TEXT)"
    add("--link", text, "GBIT/S", Range(gt=0))
    add("--steps", "optimizer steps (default: none, with TEXT)", "STEPS", SHARED["steps"].type)
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
    if args.text:
        print(plan_text(args, lambda flags: choose_plans(flags)[0]))
        return
    schedules = {name: v for name in CHANGING if isinstance(v := getattr(args, name), str)}
    plans, machine, limit = choose_plans(args)
    print(
        plan_as_text(
            plans,
            steps=args.steps,
            depth_schedule=args.depth_schedule,
            schedules=schedules,
            teacher=args.teacher,
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
    machine = describe_gpu(gpu, width=size.hidden_size, mfu=args.mfu, eight_bits=args.fp8)
    model = reshape(size, sharing=args.sharing or size.sharing, per_layer=args.per_layer)
    sizes, lengths = (
        read_varying(name, str(getattr(args, name)), args.steps).values for name in CHANGING
    )
    teacher = read_teacher(args, max(lengths))
    if teacher is not None:
        model = replace(model, vocab_size=teacher.vocab_size)
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
        teacher=teacher,
    )
    layouts = [x for x in layouts if not any(n % (x.batch_size // x.accumulation) for n in sizes)]
    if not layouts:
        raise UserError(f"--batch-size {args.batch_size}: --gpus {args.gpus} divide not all sizes")
    link = math.inf if args.link is None else args.link * 1e9  # within a node
    plans = find_plans(layouts, machine, link=link, memory_limit=limit)
    return plans, machine, limit


def read_teacher(args, length: int) -> ModelConfig | None:
    """The shape of the model of --teacher, for sequences up to `length`; None without one."""
    if args.teacher is None:
        return None
    from albert_ds.checkpoint.model_folder import ModelFolder

    folder = ModelFolder(args.teacher, needs_mlm_head=True)
    check_teacher(folder, None, length)
    return folder.config


def check_flags(args, argv: list[str]) -> None:
    """Raise UserError for flags of a plan that its text or the lack of it leaves without use."""
    typed = {word.partition("=")[0] for word in argv}
    is_text = bool(args.text)
    is_here = args.gpus is None
    for flags, is_used, says in (
        (OF_TEXT, is_text, "only with TEXT"),
        (OF_MODEL, not is_text, "not with TEXT, whose recipe and hours decide"),
        (OF_GPUS, not is_here or not is_text, "only with --gpus: this is the plan of a CPU"),
    ):
        if not is_used and (wrong := [flag for flag in flags if flag in typed]):
            raise UserError(f"{wrong[0]}: {says}")
    needed = [] if is_text else ["model", "gpus", "link", "steps"]
    if is_text and not is_here and args.gpus > args.gpus_a_node:
        needed = ["link"]
    if missing := [as_flag(name) for name in needed if getattr(args, name) is None]:
        raise UserError(f"the following arguments are required: {', '.join(missing)}")
    if is_text and args.model not in (None, *PAPER):
        raise UserError(f"--model {args.model}: must be, with TEXT, one of {', '.join(PAPER)}")


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "plan":
        check_flags(args, argv)
    {"predict": run_predict, "plan": run_plan}[args.command](args)
