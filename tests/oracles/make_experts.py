"""Makes ``llm/experts.npz``: gradients and router losses of decoders with experts, and gradients of Qwen3.5, Gemma,
OLMo 2 and Phi-3.

    python tests/oracles/make_experts.py [FAMILY ...]    # needs torch and transformers, and the folders of make_llm.py

The loss is the sum over the sequences of ``values.npz``, each run alone, of cross-entropies, and of
``load_balancing_loss_func`` of each layer alone times ``COEFFICIENT`` and the number of tokens, as a mean over layers.
Of DeepSeek's models, whose choice of experts that function does not know, of Qwen3.5, Gemma, OLMo 2 and Phi-3, it is
the cross-entropies alone.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

HERE = Path(__file__).parent / "llm"
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma3_text",
    "gemma2",
    "olmo2",
    "phi3",
    "gemma4_text",
    "gemma4_moe",
    "gemma4_shared",
    "gemma4_per_layer",
)
LAYERS = {
    "qwen3_5_text": ("layers.1.", "layers.2.", "embed_tokens", "norm.weight"),
    "qwen3_5_moe_text": ("layers.0.",),
    **dict.fromkeys(
        ("gemma3_text", "gemma2", "olmo2", "phi3", "gemma4_text", "gemma4_moe"),
        ("layers.1.", "layers.2.", "embed_tokens", "norm.weight"),
    ),
    "gemma4_shared": ("layers.3.", "layers.4.", "layers.7.", "embed_tokens", "norm.weight"),
    "gemma4_per_layer": ("layers.1.", "layers.3.", "embed_tokens", "norm.weight", "per_layer"),
}
"""Parts of the names of weights whose gradients are kept; of the others "layers.1." alone."""
COEFFICIENT = 0.5


def main() -> None:
    torch.set_num_threads(1)
    path = HERE / "experts.npz"
    found: dict[str, Any] = dict(np.load(path)) if path.exists() else {}
    for family in sys.argv[1:] or FAMILIES:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(HERE / family, dtype=torch.float32).eval()
        model.get_input_embeddings().padding_idx = None  # torch gives its row no gradient; tokens are drawn from all
        values = np.load(HERE / family / "values.npz")
        sequences = np.split(values["tokens"], np.cumsum(values["lengths"])[:-1])
        balance, total = torch.zeros(()), torch.zeros(())
        for tokens in sequences:
            ids = torch.from_numpy(tokens)[None].long()
            has_loss = not family.startswith(("deepseek", "qwen3_5", "gemma", "olmo", "phi"))
            out = model(input_ids=ids, output_router_logits=has_loss, output_hidden_states=True)  # see make_llm.py
            chosen = torch.log_softmax(out.logits[0, :-1], -1).gather(1, ids[0, 1:, None])
            total = total - chosen.sum()
            if has_loss:
                experts = getattr(model.config, "num_local_experts", None) or model.config.num_experts
                k = model.config.num_experts_per_tok
                by_layer = [load_balancing_loss_func((logits,), experts, k) for logits in out.router_logits]
                balance = balance + len(tokens) * torch.stack(by_layer).mean()
        (total + COEFFICIENT * balance).backward()
        found[f"{family}/balance_loss"] = balance.detach().numpy()
        for key, weight in model.named_parameters():
            if any(part in key for part in LAYERS.get(family, ("layers.1.",))):
                found[f"{family}/gradients/{key}"] = weight.grad.numpy()
        print(family, float(balance.detach()))
    versions = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    found["versions"] = versions
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main()
