"""Task heads against Hugging Face's; that of SQuAD 2.0 against the release's procedure, anew."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from albert_ds.model.hugging_face import name_pairs, task_to_hf
from albert_ds.model.task_heads import AlbertForTask, HeadConfig
from tests.model.conftest import INPUTS, build_batch, build_config
from tests.models import shake

LENGTHS = [9, 14, 6, 11]
KINDS = {"classification": 3, "regression": 1, "choice": 1, "span": 2}


def build(kind, num_labels, **changes):
    labels = tuple(f"label {number}" for number in range(num_labels))
    head = HeadConfig(kind=kind, num_labels=num_labels, dropout=0.0, labels=labels)
    config = build_config(pair_head=head.row.reads_pooled, **changes)
    return config, head, shake(AlbertForTask(config, head, seed=1)).train()


def draw_targets(kind, lengths):
    generator = torch.Generator().manual_seed(3)
    if kind == "regression":
        return {"labels": 5 * torch.rand(len(lengths), generator=generator)}
    if kind == "classification":
        return {"labels": torch.tensor([2, 0, 1, 1])}
    if kind == "choice":
        return {"labels": torch.tensor([2])}
    starts = torch.tensor([1, 0, 4, 2])
    return {"span_starts": starts, "span_ends": starts + torch.tensor([3, 0, 1, 8])}


def run_hugging_face(config, head, model, batch, targets):
    """Their output with the sum of losses, and the gradients under our names."""
    import transformers

    hf_config, hf_state = task_to_hf(config, head, model.state_dict(), "test")
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob")
    made = transformers.AlbertConfig(**hf_config | dict.fromkeys(dropouts, 0.0))
    hf_model = getattr(transformers, hf_config["architectures"][0])(made)
    hf_model.load_state_dict(hf_state)
    lengths = batch["cu_seqlens"].diff().tolist()
    inputs = {
        name: pad_sequence(batch[name].split(lengths), batch_first=True)
        for name in ("input_ids", "token_type_ids")
    }
    real = pad_sequence([torch.ones(n, dtype=torch.long) for n in lengths], batch_first=True)
    if head.kind == "choice":
        inputs = {name: x.unsqueeze(0) for name, x in inputs.items()}
        out = hf_model(**inputs, attention_mask=real.unsqueeze(0), labels=targets["labels"])
    elif head.kind == "span":
        out = hf_model(**inputs, attention_mask=real)
        scores = [x.masked_fill(real == 0, -1e30) for x in (out.start_logits, out.end_logits)]
        spans = (targets["span_starts"], targets["span_ends"])
        losses = [F.cross_entropy(x, span) for x, span in zip(scores, spans, strict=True)]
        out.loss = sum(losses) / 2
    else:
        out = hf_model(**inputs, attention_mask=real, labels=targets["labels"])
    loss = out.loss * (1 if head.kind == "choice" else len(lengths))
    loss.backward()
    grads = {n: p.grad for n, p in hf_model.named_parameters()}
    gradients = {}
    name = head.row.hugging_face.layer
    pairs = [pair for pair in name_pairs(config) if pair[0].startswith("albert.")]
    for key, other in [*pairs, *((f"head.score.{x}", f"{name}.{x}") for x in ("weight", "bias"))]:
        gradients[key] = gradients.get(key, 0) + grads[other]
    return out, loss, real.bool(), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", ["all", "attention"])
def test_logits_losses_and_gradients_are_hugging_face_s(kind, sharing):
    config, head, model = build(kind, KINDS[kind], sharing=sharing)
    batch = build_batch(LENGTHS)
    targets = draw_targets(kind, LENGTHS)
    inputs = {name: batch[name] for name in INPUTS}
    outputs = model(**inputs, **targets)
    outputs["loss_sum"].backward()
    out, loss, real, gradients = run_hugging_face(config, head, model, batch, targets)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(outputs["loss_sum"], loss, **close)
    if kind == "span":
        torch.testing.assert_close(outputs["start"], out.start_logits[real], **close)
        torch.testing.assert_close(outputs["end"], out.end_logits[real], **close)
    else:
        torch.testing.assert_close(outputs["logits"], out.logits, **close)
    model_gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(model_gradients, gradients, **close)
    # Without targets: the same scores and no loss.
    scores = model.eval()(**inputs)
    assert "loss_sum" not in scores
    for name, x in scores.items():
        torch.testing.assert_close(x, outputs[name], **close)


def released(model, states, allowed, span=None):
    """The release's SQuAD 2.0 head on one sequence of states [T, H], as its graph computes it."""
    head = model.head
    hidden = -1e30
    closed = ~allowed

    def ends_given(state):
        both = torch.cat([states, state.expand(len(states), -1)], dim=1)
        inner = head.layer_norm(torch.tanh(head.end_hidden(both)))
        scores = head.end_score(inner).squeeze(1).masked_fill(closed, hidden)
        return scores.log_softmax(0)

    start = head.start(states).squeeze(1).masked_fill(closed, hidden).log_softmax(0)
    expected = (start.exp().unsqueeze(1) * states).sum(0)
    both = torch.cat([expected, states[0]])
    impossible = head.answer_score(torch.tanh(head.answer_hidden(both)))
    if span is not None:
        begin, end, label = span
        loss = -(start[begin] + ends_given(states[begin])[end]) / 2
        return loss + F.binary_cross_entropy_with_logits(impossible, torch.tensor([label])) / 2
    tops = [ends_given(states[index]).topk(5) for index in start.topk(5).indices]
    return start.topk(5), tops, impossible


@pytest.fixture
def conditional():
    _, _, model = build("conditional_span", 1)
    batch = build_batch(LENGTHS)
    lengths = batch["cu_seqlens"].diff().tolist()
    allowed = torch.cat([(torch.arange(n) > n // 2 - 2) | (torch.arange(n) == 0) for n in lengths])
    inputs = {name: batch[name] for name in INPUTS}
    return model, inputs, allowed, lengths


def test_the_expected_start_is_summed_in_fp32():
    # CUDA adds term by term in the type of the tensors, and in bf16 512 times 1/512 would be 0.5.
    _, _, model = build("conditional_span", 1)
    head = model.head.bfloat16()
    summed = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "index_add" in func.name():
                summed.extend(x.dtype for x in (args[0], args[3]))
            return func(*args, **kwargs or {})

    ends = torch.tensor([0, 512])
    states = torch.ones(512, head.start.in_features).bfloat16()
    with Watch():
        head._judge(states, torch.zeros(1, 512), ends[:1], ends)
    assert summed == [torch.float32] * 2


def test_the_conditional_head_trains_as_released(conditional):
    model, inputs, allowed, lengths = conditional
    spans = [(8, 8, 0.0), (0, 0, 1.0), (4, 5, 0.0), (5, 9, 0.0)]
    starts, ends, labels = (torch.tensor(x) for x in zip(*spans, strict=True))
    targets = {"span_starts": starts, "span_ends": ends, "impossible": labels.long()}
    loss = model(**inputs, **targets, allowed=allowed)["loss_sum"]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    states = model.albert(**inputs)["last_hidden_state"].split(lengths)
    parts = zip(states, allowed.split(lengths), spans, strict=True)
    expected = sum(released(model, *part) for part in parts)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.squeeze(), rtol=1e-5, atol=1e-5)
    released_gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(gradients, released_gradients, rtol=1e-5, atol=1e-5)


def test_the_conditional_head_proposes_five_by_five_as_released(conditional):
    model, inputs, allowed, lengths = conditional
    with torch.no_grad():
        out = model.eval()(**inputs, allowed=allowed)
        states = model.albert(**inputs)["last_hidden_state"].split(lengths)
        for row, (state, may) in enumerate(zip(states, allowed.split(lengths), strict=True)):
            start, tops, impossible = released(model, state, may)
            real = start.values > -1e20  # fewer places than five: the rest is nowhere
            pairs = [("start_score", start.values), ("start_index", start.indices)]
            for name, expected in pairs:
                torch.testing.assert_close(out[name][row][real], expected[real])
            for k in real.nonzero().flatten().tolist():
                open_ = tops[k].values > -1e20
                torch.testing.assert_close(out["end_score"][row][k][open_], tops[k].values[open_])
                torch.testing.assert_close(out["end_index"][row][k][open_], tops[k].indices[open_])
            torch.testing.assert_close(out["impossible"][row : row + 1], impossible)


def test_a_sequence_shorter_than_five_has_proposals_too():
    _, _, model = build("conditional_span", 1)
    batch = build_batch([3, 4])
    out = model.eval()(
        **{name: batch[name] for name in INPUTS}, allowed=torch.ones(7, dtype=torch.bool)
    )
    assert out["end_index"].shape == (2, 5, 5)
    assert (out["start_score"][0] > -1e20).sum() == 3


def test_dropout_falls_before_the_head_only():
    head = HeadConfig(kind="classification", num_labels=2, dropout=0.5)
    model = AlbertForTask(build_config(), head, seed=1)
    inputs = {name: build_batch(LENGTHS)[name] for name in INPUTS}
    again = [model(**inputs)["logits"] for _ in range(2)]
    assert not torch.equal(*again)
    calm = [model.eval()(**inputs)["logits"] for _ in range(2)]
    assert torch.equal(*calm)
