"""A small vision transformer of transformers on scikit-learn's digits, trained by its Trainer: FP32, and NVFP4.

python examples/trainer_fp32.py --steps 400
python examples/trainer_fp4.py --steps 400     differs by two lines: import fp4deploy, fp4deploy.prepare(model)
"""

import argparse
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=400)
options = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images[:, None] / 8 - 1, dtype=torch.float32)
samples = [{"pixel_values": x, "labels": int(label)} for x, label in zip(images, digits.target, strict=True)]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """The share of digits that are recognised."""
    return {"accuracy": float((np.argmax(found.predictions, 1) == found.label_ids).mean())}


torch.manual_seed(0)
size = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
model = ViTForImageClassification(
    ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, **size)
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=options.steps, learning_rate=1e-3, per_device_train_batch_size=32, report_to="none", seed=0
    )
    trainer = Trainer(model, arguments, train_dataset=samples[:1437], eval_dataset=samples[1437:])
    trainer.compute_metrics = accuracy
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
