"""Makes ``adapters/``: low-rank adapters that PEFT has saved for the tiny Qwen2 of ``llm/``, and the logits under them.

    python tests/oracles/make_peft.py

It needs torch, transformers and peft, which mmjax does not.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

HERE = Path(__file__).parent
BASE, OUT = HERE / "llm" / "qwen2", HERE / "adapters"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype="float32")
    about = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    made = peft.get_peft_model(base, about).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
        tokens = torch.randint(0, base.config.vocab_size, (1, 12))
        logits = made(input_ids=tokens).logits[0]
    made.save_pretrained(OUT)
    config = json.loads((OUT / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "llm/qwen2", "target_modules": sorted(config["target_modules"])}
    (OUT / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (OUT / "README.md").unlink(missing_ok=True)
    versions = {name: module.__version__ for name, module in (("torch", torch), ("peft", peft))}
    values = {"tokens": tokens[0].numpy(), "logits": logits.numpy(), "versions": np.array(json.dumps(versions))}
    np.savez_compressed(OUT / "values.npz", allow_pickle=False, **values)


if __name__ == "__main__":
    main()
