"""ONNX files of an export: with one copy of the shared block, and with 8-bit weights.

albert-ds export --checkpoint runs/base --output hf/base
python tools/examples/onnx_export.py --model hf/base --output hf/base-onnx
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch.export import Dim
from transformers import AutoModelForMaskedLM, AutoTokenizer

TEXTS = ["The capital of France is [MASK].", "[MASK]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder that albert-ds export wrote")
    parser.add_argument("--output", required=True, type=Path, help="folder for the ONNX files")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Another AutoModel class for a fine-tuned one.
    model = AutoModelForMaskedLM.from_pretrained(args.model).eval()
    model.config.return_dict = False
    inputs = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    args.output.mkdir()
    shape = {0: Dim("batch"), 1: Dim("length", max=tokenizer.model_max_length)}
    torch.onnx.export(
        model,
        kwargs=inputs,
        f=args.output / "model.onnx",
        dynamic_shapes=dict.fromkeys(inputs, shape),
        output_names=["logits"],
        dynamo=True,
        external_data=False,
    )
    with TemporaryDirectory() as folder:
        # Weights that are transposed as the model runs are not seen as weights.
        quant_pre_process(args.output / "model.onnx", f"{folder}/model", skip_symbolic_shape=True)
        quantize_dynamic(f"{folder}/model", args.output / "model-int8.onnx")
    texts = ["Another text, and longer.", "A [MASK].", "x"]  # of another shape than the traced
    inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        expected = model(**inputs)[0].numpy()
    for path in sorted(args.output.glob("*.onnx")):
        session = onnxruntime.InferenceSession(path)
        (logits,) = session.run(["logits"], {name: x.numpy() for name, x in inputs.items()})
        distance = np.abs(logits - expected).max()
        print(f"{path}: {path.stat().st_size:,} bytes, logits within {distance:.1e} of PyTorch's")


if __name__ == "__main__":
    main()
