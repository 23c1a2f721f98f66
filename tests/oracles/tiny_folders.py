"""What the scripts that make tiny whole models have in common."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def continuation(made: Any, prompt: list[int], tokens: int, **inputs: Any) -> dict[str, Any]:
    """A prompt and its greedy continuation, and by how much at least each token led before the second."""
    plain = dict(do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None)
    out = made.generate(**inputs, **plain, use_cache=True, return_dict_in_generate=True, output_logits=True)
    said = out.sequences[0, len(prompt) :].numpy()
    top = torch.stack([logits[0].topk(2).values for logits in out.logits])
    assert len(said) == tokens
    return {"prompt": np.asarray(prompt), "generated": said, "lead": (top[:, 0] - top[:, 1]).min().numpy()}


def save(made: Any, folder: Path, values: dict[str, Any], *, with_gradients: bool = True) -> None:
    """Writes a model's folder, what it computed, and the gradients that its parameters have."""
    made.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    print(
        folder.name, sum(weight.numel() for weight in made.parameters()), float(values["loss"]), float(values["lead"])
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    values["versions"] = np.array(json.dumps(versions))
    np.savez_compressed(folder / "values.npz", allow_pickle=False, **values)
    if with_gradients:
        gradients = {
            key: np.zeros(weight.shape, np.float32) if weight.grad is None else weight.grad.numpy()
            for key, weight in made.named_parameters()
        }
        np.savez_compressed(folder / "gradients.npz", allow_pickle=False, **gradients)
