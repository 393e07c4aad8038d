"""What mkdocs calls while it builds the site: fills in the flags and draws, without a network.

The flags in docs/flags.md come from their declarations, so no copy can be out of date. A mermaid
diagram of boxes and arrows, which GitHub draws with a program from the network, becomes an SVG.
"""

import re
from collections.abc import Iterator
from importlib import import_module

from albert_ds.cli import Parser, as_reference

# Command -> the module whose build_parser() reads its command line, in the order of use.
COMMANDS = {
    "vocab": "albert_ds.commands.build_vocab",
    "shards": "albert_ds.commands.build_shards",
    "inspect": "albert_ds.commands.inspect_shards",
    "train": "albert_ds.config",
    "finetune": "albert_ds.finetuning.config",
    "probe": "albert_ds.commands.probe",
    "convert": "albert_ds.commands.convert_hf",
    "fill-mask": "albert_ds.commands.fill_mask",
    "ensemble": "albert_ds.commands.ensemble",
    "plan": "albert_ds.lab.commands.scaling_model",
    "bench": "albert_ds.lab.commands.throughput_bench",
    "traffic": "albert_ds.lab.commands.comm_volume",
    "plots": "albert_ds.lab.commands.plots",
    "push": "albert_ds.commands.push",
    "learn": "albert_ds.lab.commands.learn",
    "gpu": "albert_ds.lab.commands.gpu_check",
}
FLAGS = "<!-- flags -->"
DIAGRAM = re.compile(r"```mermaid\n(.*?)```\n", re.S)
ARROW = re.compile(r"^ +(\w+)(?:\[.*?\])? --> (\w+)", re.M)
LABEL = re.compile(r'(\w+)\["(.*?)"\]')
WIDTH, LINE, BOX = 700, 78, 30  # pixels: of a diagram, from one row to the next, of a box's height


def on_page_markdown(markdown: str, **_) -> str:
    if FLAGS in markdown:
        markdown = markdown.replace(FLAGS, "\n".join(list_flags()))
    return DIAGRAM.sub(lambda found: draw(found[1]), markdown)


def list_flags() -> Iterator[str]:
    """A heading and a table for every command, and for every command of a command."""
    for command, module in COMMANDS.items():
        yield from describe(command, import_module(module).build_parser())


def describe(command: str, parser: Parser) -> Iterator[str]:
    yield f"## {command}\n"
    yield as_reference(parser)


def draw(mermaid: str) -> str:
    """The arrows of a flowchart without circles as an SVG: each box below all that point to it."""
    arrows, labels = ARROW.findall(mermaid), dict(LABEL.findall(mermaid))
    rows = dict.fromkeys([name for arrow in arrows for name in arrow], 0)
    for _ in rows:  # the longest way to each box
        for begin, end in arrows:
            rows[end] = max(rows[end], rows[begin] + 1)
    places = {}
    for row in range(max(rows.values()) + 1):
        names = [name for name in rows if rows[name] == row]
        above = {name: [places[a][0] for a, b in arrows if b == name] for name in names}
        names.sort(key=lambda name: sum(above[name]) / max(1, len(above[name])))
        for number, name in enumerate(names):
            places[name] = (WIDTH * (number + 0.5) / len(names), LINE * row + BOX)
    lines = [
        f'<line x1="{places[a][0]:.0f}" y1="{places[a][1] + BOX / 2:.0f}" '
        f'x2="{places[b][0]:.0f}" y2="{places[b][1] - BOX / 2 - 3:.0f}" marker-end="url(#tip)"/>'
        for a, b in arrows
    ]
    boxes = []
    for name, (x, y) in places.items():
        text = labels.get(name, name)
        half = 4.5 * len(text) + 8
        boxes.append(
            f'<rect x="{x - half:.0f}" y="{y - BOX / 2:.0f}" width="{2 * half:.0f}" '
            f'height="{BOX}" rx="4" fill="var(--md-code-bg-color)"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" stroke="none" fill="currentColor" '
            f'text-anchor="middle">{text}</text>'
        )
    height = LINE * max(rows.values()) + 2 * BOX
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/>'
        "</marker></defs>"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="which part imports which" '
        f'stroke="currentColor" font-size="14">{tip}{"".join(lines)}{"".join(boxes)}</svg>\n'
    )
