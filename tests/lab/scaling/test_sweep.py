"""Up to what batch sharing pays: the largest one that still reaches a speed-up, and no larger."""

import pytest
from albert_lab.scaling.hardware import GPUS, describe_gpu
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.planner import Recipe, largest_batch, predict_grid
from albert_lab.scaling.step_time import predict_step

from albert_ds.model.config import SIZES

PAIR = ("bert-large", "albert-large")
RECIPE = Recipe(gpus_a_node=8, micro_batch_size=32, sequence_length=512)
H100 = describe_gpu(GPUS["h100"])


def speed_up(sequences: int, link: float) -> float:
    micro = min(sequences, 32)
    seconds = [
        predict_step(
            Layout(
                name=name,
                model=SIZES[name],
                ranks=512,
                nodes=64,
                micro_batch_size=micro,
                accumulation=sequences // micro,
            ),
            H100,
            link=link * 1e9,
        ).total
        for name in PAIR
    ]
    return seconds[0] / seconds[1]


@pytest.mark.parametrize(("link", "wanted"), [(3200, 1.7), (400, 1.7), (100, 1.1), (10, 1.7)])
def test_the_largest_batch_is_the_last_that_reaches_it(link, wanted):
    found = largest_batch(PAIR, H100, RECIPE, link=link, speed_up=wanted, nodes=64)
    assert found and speed_up(found, link) >= wanted
    assert speed_up(found + (1 if found < 32 else 32), link) < wanted


def test_what_no_batch_reaches_and_what_every_batch_does():
    for wanted, expected in ((30.0, 0), (0.5, None)):
        assert expected == largest_batch(PAIR, H100, RECIPE, link=100, speed_up=wanted, nodes=64)


def test_a_grid_keeps_the_global_batch_and_compares_with_the_first():
    rows = predict_grid(list(PAIR), H100, RECIPE, gpus=[8, 128], links=[10, 400], batch_size=4096)
    assert len(rows) == 8
    for row in rows:
        assert row["gpus"] * row["sequences_a_gpu"] == 4096
        assert row["samples_a_second"] == pytest.approx(4096 / row["step_seconds"])
    # One node crosses no link; on several a slow one makes the first model slower, not the ratio 1.
    alone = {row["link_gbits"]: row["speed_up"] for row in rows if row["gpus"] == 8}
    assert alone[10] == alone[400]
