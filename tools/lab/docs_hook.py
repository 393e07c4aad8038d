"""What mkdocs calls while it builds the site: fills in the flags and draws, without a network.

The flags in docs/flags.md come from their declarations, so no copy can be out of date. A mermaid
diagram of boxes and arrows, which GitHub draws with a program from the network, becomes an SVG.
"""

import argparse
import re
from collections.abc import Iterator

from albert_ds.__main__ import COMMANDS
from albert_ds.base.cli import Parser, Range
from albert_ds.commands.completion import find_parser

FLAGS = "<!-- flags -->"
DIAGRAM = re.compile(r"```mermaid\n(.*?)```\n", re.S)
ARROW = re.compile(r"^ +(\w+) --> (\w+)", re.M)
WIDTH, LINE, BOX = 700, 78, 30  # pixels: of a diagram, from one row to the next, of a box's height


def on_page_content(html: str, **_) -> str:
    return re.sub(r"(\d) %", r"\1&nbsp;%", html)  # a number keeps its unit where a cell is narrow


def on_page_markdown(markdown: str, **_) -> str:
    if FLAGS in markdown:
        markdown = markdown.replace(FLAGS, "\n".join(list_flags()))
    return DIAGRAM.sub(lambda match: draw(match[1]), markdown)


def list_flags() -> Iterator[str]:
    """A heading and a table for every command, and for every command of a command."""
    for commands in COMMANDS.values():
        for name in commands:
            yield from describe(name, find_parser(name))


def describe(name: str, parser: Parser) -> Iterator[str]:
    parts = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for part, subparser in (parts[0] if parts else {"": parser}).items():
        yield f"## {name} {part}\n"
        # `<doc>` is no tag of the page; a long path may break.
        yield as_reference(subparser).replace("<", "&lt;").replace("/", "/<wbr>")


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument that --help shows, those of subcommands among them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from list_actions(subparser)
        elif action.help != argparse.SUPPRESS and action.dest not in ("help", argparse.SUPPRESS):
            yield action


def as_reference(parser: argparse.ArgumentParser) -> str:
    """The flags of a command as a Markdown table: name, what it does, unit or choices, default."""
    rows = ["| flag | what it does | value | default |", "| --- | --- | --- | --- |"]
    for action in list_actions(parser):
        name = f"`{action.option_strings[-1]}`" if action.option_strings else f"`{action.metavar}`"
        value = action.metavar or ", ".join(map(str, action.choices or ()))
        if isinstance(action.type, Range):
            value = f"{value}, {action.type}"
        text, _, default = (action.help or "").replace("%%", "%").partition(" (default: ")
        default = default.removesuffix(")")
        if not default and (action.required or not action.option_strings):
            default = "required"
        elif not default and action.default not in (None, argparse.SUPPRESS):
            default = "off" if action.default is False else str(action.default)
        cells = (name, text, value, default)
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def draw(mermaid: str) -> str:
    """The arrows of a flowchart without circles as an SVG: each box below all that point to it."""
    arrows = ARROW.findall(mermaid)
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
        half = 4.5 * len(name) + 8
        boxes.append(
            f'<rect x="{x - half:.0f}" y="{y - BOX / 2:.0f}" width="{2 * half:.0f}" '
            f'height="{BOX}" rx="4" fill="var(--md-code-bg-color)"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" stroke="none" fill="currentColor" '
            f'text-anchor="middle">{name}</text>'
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
