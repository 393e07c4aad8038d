"""Steps of a recipe against the release's command lines and the paper's Table 14."""

from albert_ds.tasks.recipes import RECIPES


def test_squad_steps_follow_from_questions():
    """The paper's Table 14 has 3,649 steps for SQuAD 1.1, 365 of them warm-up (release: 364)."""
    steps = RECIPES["squad1"].count_steps(examples=87_599, batch_size=48)
    assert (steps, RECIPES["squad1"].count_warmup(steps)) == (3649, 364)
    steps = RECIPES["squad2"].count_steps(examples=130_319, batch_size=48)
    assert (steps, RECIPES["squad2"].count_warmup(steps)) == (5429, 542)
    assert RECIPES["squad1"].count_steps(examples=7_938, batch_size=48) == 330
    assert RECIPES["squad1"].count_steps(examples=3, batch_size=48) == 1


def test_glue_steps_and_warm_up_are_those_of_the_script():
    steps = {name: r.steps for name, r in RECIPES.items() if r.steps}
    warmup = {name: RECIPES[name].count_warmup(n) for name, n in steps.items()}
    assert (steps["glue/sst2"], warmup["glue/sst2"]) == (20935, 1256)
    assert (steps["glue/qnli"], warmup["glue/qnli"]) == (33112, 1986)
    assert (steps["glue/cola"], warmup["glue/cola"]) == (5336, 320)
    assert (steps["race"], warmup["race"]) == (12000, 1000)
