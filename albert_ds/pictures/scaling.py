"""What sharing would buy on clusters of GPUs: predictions of tools/scaling_model.py."""

from pathlib import Path

from albert_ds.pictures.style import COLORS, LINES, MARKERS, label, new_figure, save

PAPER = ("albert-large", 1.7)  # over bert-large (Table 2)


def draw_scaling(rows: list[dict], output: Path) -> None:
    """Left: one model's speed-up against the link, a line a cluster. Right: against the batch.

    Where two overlaps were predicted, a band lies between them: nothing of the yardstick's
    reduction hidden (the line), and all of it that can be. Within one node no link is crossed.
    """
    first, shown = list(dict.fromkeys(row["model"] for row in rows))[:2]
    rows = [row for row in rows if row["model"] == shown and row["nodes"] > 1]
    figure, (left, right) = new_figure(2)
    links = sorted({row["link_gbits"] for row in rows})
    clusters = sorted({(row["gpus"], row["sequences_a_gpu"]) for row in rows})
    for number, (count, local) in enumerate(clusters):
        name = f"{count:,} GPUs ({local} sequence{'s' * (local > 1)} each)"
        _draw_line(left, rows, "link_gbits", {"gpus": count}, number, name)
    for number, link in enumerate(links):
        _draw_line(
            right, rows, "sequences_a_gpu", {"link_gbits": link}, number, f"{link:g} Gb/s a node"
        )
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter("")
        axis.set_ylim(0.85, 45)
        axis.set_yticks([1, 1.4, 2, 3, 5, 10, 20])
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter("{x:g}")
        axis.axhline(1, color="black", linewidth=0.8)
        if (shown, first) == (PAPER[0], "bert-large"):
            axis.axhline(PAPER[1], color="black", linewidth=0.8, linestyle=(0, (1, 2)))
            axis.text(axis.get_xlim()[0] * 1.1, PAPER[1] * 1.03, "the paper's 1.7", fontsize=8)
        axis.legend(fontsize=8)
    left.set_xticks(links)
    right.set_xticks(sorted({local for _, local in clusters}))
    right.xaxis.set_minor_formatter("")
    speed_up = f"speed-up of {shown} over {first}"
    label(left, "link of a node (Gb/s)", speed_up, "predicted, not measured")
    label(right, "sequences a GPU in a step", speed_up, "predicted, not measured")
    save(figure, output)


def _select(rows: list[dict], **where) -> list[dict]:
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def _draw_line(axis, rows: list[dict], x: str, where: dict, number: int, name: str) -> None:
    overlaps = sorted({row["overlap"] for row in rows})
    lines = []
    for overlap in overlaps:
        found = sorted(_select(rows, overlap=overlap, **where), key=lambda row: row[x])
        lines.append(([row[x] for row in found], [row["speed_up"] for row in found]))
    color = COLORS[number % len(COLORS)]
    axis.plot(
        *lines[0],
        linestyle=LINES[number % len(LINES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        color=color,
        label=name,
    )
    if len(lines) > 1:
        axis.fill_between(lines[0][0], lines[0][1], lines[-1][1], alpha=0.18, color=color)
