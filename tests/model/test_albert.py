"""The whole model against Hugging Face's, and what holds for it whatever the weights."""

import math

import pytest
import torch
import torch.nn.functional as F

from albert_ds.model import albert
from albert_ds.model.albert import AlbertForPretraining, AlbertModel
from albert_ds.model.even_shapes import SPARE, STEP
from tests.batches import IGNORED, concatenate, pad, random_samples
from tests.model.conftest import INPUTS, build_batch, build_config
from tests.models import shake
from tests.reference import build_reference

LENGTHS = [17, 40, 3, 9]


def build_rough(config, **options) -> AlbertForPretraining:
    """A model whose biases and LayerNorms are not the neutral ones it starts with."""
    return shake(AlbertForPretraining(config, **options)).train()


def step(model, batch, seed=0) -> tuple[dict, dict]:
    """Losses and gradients of one pass."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(**batch)
    (out["mlm_loss_sum"] + out["pair_loss_sum"]).backward()
    return out, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def differ(tensor, reference) -> float:
    return ((tensor - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("embedding_size", [16, 32])
@pytest.mark.parametrize("sharing", ["all", "attention", "ffn", "none", "groups:2"])
def test_equal_to_hugging_face(sharing, embedding_size):
    """To its model in float64 on the padded batch: states, scores, losses and gradients."""
    config = build_config(sharing=sharing, embedding_size=embedding_size)
    samples = random_samples(6, vocab_size=config.vocab_size, max_length=40, seed=0)
    model = build_rough(config)
    batch = concatenate(samples).tensors
    padded = pad(samples)
    words, pairs = padded.pop("labels"), padded.pop("sentence_order_label")
    real = padded["attention_mask"].bool()
    masked = words != IGNORED
    paired = pairs != IGNORED
    reference, parameters = build_reference(config, model.state_dict())
    reference_out = reference(**padded, output_hidden_states=True)
    word_scores = reference_out.prediction_logits[masked]
    pair_scores = reference_out.sop_logits[paired]
    losses = {
        "mlm_loss_sum": F.cross_entropy(word_scores, words[masked], reduction="sum"),
        "pair_loss_sum": F.cross_entropy(pair_scores, pairs[paired], reduction="sum"),
    }
    sum(losses.values()).backward()

    out, gradients = step(model, batch)
    encoded = model.albert(**{name: batch[name] for name in INPUTS})
    assert len(encoded["hidden_states"]) == 1 + config.num_layers
    for hidden, state in zip(encoded["hidden_states"], reference_out.hidden_states, strict=True):
        assert differ(hidden, state[real]) <= 1e-5
    logits = model.mlm_head.logits(
        encoded["last_hidden_state"], model.albert.embeddings.word.weight
    )
    assert differ(logits, reference_out.prediction_logits[real]) <= 1e-5
    assert differ(model.pair_head(encoded["pooled"]), reference_out.sop_logits) <= 1e-5
    for name, loss in losses.items():
        assert differ(out[name], loss) <= 1e-5
    assert out["mlm_correct"] == (word_scores.argmax(-1) == words[masked]).sum()
    assert out["pair_correct"] == (pair_scores.argmax(-1) == pairs[paired]).sum()
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        if name.endswith("key.bias"):  # shifts all scores of a query alike: its true gradient is 0
            assert gradient.abs().max() <= 1e-6
        else:
            assert differ(gradient, parameters[name].grad) <= 1e-5, name


@pytest.mark.parametrize("checkpointing", ["attention", "block"])
@pytest.mark.parametrize("sharing", ["all", "none"])
def test_checkpointing_changes_no_gradient(sharing, checkpointing):
    config = build_config(dropout=0.3, sharing=sharing)
    batch = build_batch(LENGTHS)
    plain = step(build_rough(config), batch)
    again = step(build_rough(config, activation_checkpointing=checkpointing), batch)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    other = step(build_rough(config), batch, seed=1)
    assert other[0]["mlm_loss_sum"] != plain[0]["mlm_loss_sum"]  # there was dropout to replay


def test_checkpointing_keeps_less():
    batch = build_batch(LENGTHS)
    kept = {}
    for checkpointing in ("none", "attention", "block"):
        model = AlbertForPretraining(build_config(), activation_checkpointing=checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            model(**batch)
        kept[checkpointing] = sum(sizes)
    assert kept["block"] < kept["attention"] < kept["none"]


def test_nothing_to_predict_still_reaches_every_parameter():
    model = AlbertForPretraining(build_config(sharing="none"))
    batch = build_batch([2], masked=0)
    batch["pair_labels"][:] = -100
    out, gradients = step(model, batch)
    assert all(value == 0 for value in out.values())
    assert not any(gradient.any() for gradient in gradients.values())


def test_without_a_pair_head_there_is_no_pooler():
    model = AlbertForPretraining(build_config(pair_head=False))
    assert not [name for name in model.state_dict() if "pooler" in name or "pair" in name]
    out, _ = step(model, build_batch(LENGTHS))
    assert out["mlm_loss_sum"] > 0 and out["pair_loss_sum"] == out["pair_correct"] == 0
    assert model.albert(*list(build_batch(LENGTHS).values())[:5])["pooled"] is None


@pytest.mark.parametrize(
    "place",
    [
        "embeddings.dropout",
        "encoder.attention.0.self_attention.core",
        "encoder.attention.0.layer_norm",
        "encoder.ffn.0.layer_norm",
    ],
)
def test_dropout_falls_in_four_places(place):
    model = AlbertModel(build_config(dropout=0.3))
    inputs = list(build_batch(LENGTHS).values())[:5]
    drops = {}
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, torch.nn.Dropout) else "dropout"
        if isinstance(getattr(module, attribute, None), float):
            drops[name] = getattr(module, attribute)
            setattr(module, attribute, drops[name] if name == place else 0.0)
    assert drops[place] == 0.3
    first, second = (model(*inputs)["last_hidden_state"] for _ in range(2))
    assert not torch.equal(first, second)


def test_a_half_precision_model_reports_in_fp32():
    model = build_rough(build_config())
    expected = model(**build_batch(LENGTHS))
    out = model.bfloat16()(**build_batch(LENGTHS))
    for name in ("mlm_loss_sum", "pair_loss_sum"):
        assert out[name].dtype == torch.float32
        assert out[name].item() == pytest.approx(expected[name].item(), rel=0.03)


def test_weights_start_as_a_truncated_normal():
    model = AlbertForPretraining(build_config(vocab_size=5000, embedding_size=32, hidden_size=64))
    # The standard deviation of a normal cut at two of its own.
    density = math.exp(-2) / math.sqrt(2 * math.pi)
    std = 0.02 * math.sqrt(1 - 4 * density / math.erf(math.sqrt(2)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "layer_norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.abs().max() <= 0.04, name
            assert parameter.std().item() == pytest.approx(std, rel=8 / parameter.numel() ** 0.5)
            assert abs(parameter.mean()) <= 5 * std / parameter.numel() ** 0.5, name
    word = model.albert.embeddings.word.weight
    beyond = (word.abs() > 0.02).float().mean().item()  # refilled, not clipped: 28.5 % are out here
    assert beyond == pytest.approx(1 - math.erf(2**-0.5) / math.erf(2**0.5), abs=0.01)


def test_weights_are_a_function_of_the_seed():
    def flatten(model):
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    torch.manual_seed(7)
    first = flatten(AlbertForPretraining(build_config(), seed=3))
    torch.manual_seed(8)
    assert torch.equal(first, flatten(AlbertForPretraining(build_config(), seed=3)))
    assert not torch.equal(first, flatten(AlbertForPretraining(build_config(), seed=4)))


def test_low_rank_factors_have_draws_of_their_own():
    """Neither the seed's first numbers, which are the embedding's, nor any other tensor's."""
    model = AlbertForPretraining(build_config(per_layer="lora:2"), seed=3)
    weights = dict(model.named_parameters())
    factors = torch.cat([x.flatten() for name, x in weights.items() if name.endswith(".first")])
    others = torch.cat([x.flatten() for name, x in weights.items() if not name.endswith(".first")])
    assert len(factors) > 100 and not torch.isin(factors, others).float().mean() > 0.01


@pytest.mark.parametrize("lengths", [[20, 31, 9], [40, 40, 40, 8], [12]])
def test_rounding_changes_nothing_that_is_read(lengths, monkeypatch):
    """In float64, where a sum over more rows keeps its value."""
    batch = build_batch(lengths)
    runs = []
    for is_rounded in (False, True):
        monkeypatch.setattr(albert, "is_shape_bound", lambda _, x=is_rounded: x)
        model = AlbertForPretraining(build_config(), seed=3).double()
        outputs = model(**batch)
        (outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]).backward()
        encoded = model.albert(**{name: batch[name] for name in INPUTS})
        states = [*encoded["hidden_states"], encoded["last_hidden_state"], encoded["pooled"]]
        gradients = [p.grad for p in model.parameters()]
        runs.append(([outputs[name] for name in sorted(outputs)], gradients, states))
    for exact, rounded in zip(*runs, strict=True):
        torch.testing.assert_close(exact, rounded)


def test_only_16_bit_models_on_cpus_round():
    seen = []
    model = AlbertForPretraining(build_config())
    model.albert.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[:2]))
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)(**build_batch([20, 31, 9]))
    model(**build_batch([40] * 3 + [STEP + SPARE - 120]))
    (exact, ends), (rounded, rounded_ends), (round_already, _) = seen
    assert len(exact) == 60 and ends.tolist() == [0, 20, 51, 60]
    assert len(rounded) == STEP + SPARE == len(round_already)
    # No sequence is longer than the longest of them.
    assert rounded_ends.tolist() == [0, 20, 51, 60, 88, 116, STEP + SPARE]
