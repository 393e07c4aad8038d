"""Fill the masks of sentences with the pieces that a pretrained model finds most likely."""

from itertools import islice

import numpy as np
import torch

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.micro_batch import concatenate
from albert_ds.vocab.vocab import CLS, MASK, SEP

MASK_WORD = "[MASK]"


def fill_masks(folder: ModelFolder, sentences: list[str], top: int) -> list[list[list]]:
    """For each sentence and each of its masks the `top` pairs (piece, probability), best first."""
    model = folder.build_model()
    vocab = folder.vocab
    if top > vocab.size:
        raise UserError(f"--top {top}: must be at most {vocab.size}, the vocabulary's size")
    samples = [np.array(encode(vocab, s, folder.trained_length)) for s in sentences]
    inputs = concatenate(samples, [len(sample) for sample in samples])
    masks = inputs["input_ids"] == MASK
    with torch.inference_mode():
        states = model.eval().albert(**inputs)["last_hidden_state"][masks]
        logits = model.mlm_head.logits(states, model.albert.embeddings.word.weight)
        best = logits.softmax(-1).topk(top)
    best_of_masks = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    fills = ([(vocab.pieces[i], p) for i, p in zip(*mask, strict=True)] for mask in best_of_masks)
    return [list(islice(fills, int((sample == MASK).sum()))) for sample in samples]


def encode(vocab, sentence: str, limit: int) -> list[int]:
    """[CLS] sentence [SEP] as ids, one id for each [MASK], as Hugging Face's tokenizer does."""
    if MASK_WORD not in sentence:
        raise UserError(f"{sentence!r}: has no {MASK_WORD}")
    ids = [CLS]
    for part in vocab.encode(sentence.split(MASK_WORD)):
        ids += [*part, MASK]
    ids[-1] = SEP
    if len(ids) > limit:
        raise UserError(f"{sentence[:40]!r}...: {len(ids)} tokens, the model has seen {limit}")
    return ids
