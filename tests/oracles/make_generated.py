"""Makes ``llava/generated.npz`` and ``llm/generated.npz``: what ``transformers.generate`` continues prompts with.

    python tests/oracles/make_generated.py [LLM ...]    # of these language models alone

It needs torch and transformers, which mmjax does not. Prompts of the first are bytes with a token for the beginning and
places for images; each is continued alone, greedily, up to 64 tokens.
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

HERE = Path(__file__).parent / "llava"
BOS, EOS, IMAGE, TOKENS, LIMIT = 257, 258, 263, 16, 64
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PROMPTS = (
    "USER: <image>What is it? ASSISTANT: ",
    "USER: Tell me of the sea and of the ships that are on it, please. ASSISTANT: ",
    "USER: Is <image>as red as <image>? ASSISTANT: ",
)
LLMS = (
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v3",
    "qwen3_5_text",
    "gemma3_text",
    "gemma2",
    "gemma4_text",
    "gemma4_moe",
    "gemma4_shared",
    "gemma4_per_layer",
    "smollm3",
    "olmo2",
    "olmo3",
    "phi3",
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:"
"""Their tokens from 3 on; the first are those of the beginning and the end, and of what is unknown."""
SAID, LLM_LIMIT = "What do you see: the sea. ", 32


def prompt(text: str) -> list[int]:
    """Its tokens."""
    first, *rest = text.split("<image>")
    tokens = [BOS, *first.encode()]
    for part in rest:
        tokens += [IMAGE] * TOKENS + list(part.encode())
    return tokens


def versions() -> str:
    return json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})


def main() -> None:
    torch.set_num_threads(1)
    if not sys.argv[1:]:
        images_and_words()
    words(sys.argv[1:] or LLMS)


def images_and_words() -> None:
    """Writes what LLaVA says."""
    rng = np.random.default_rng(5)
    model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(HERE, dtype=torch.float32).eval()
    pixels = rng.integers(0, 256, (3, 28, 28, 3), dtype=np.uint8)
    ready = (pixels / np.float32(255) - np.asarray(MEAN, np.float32)) / np.asarray(STD, np.float32)
    values: dict[str, Any] = {"pixels": pixels}
    used = 0
    for number, text in enumerate(PROMPTS):
        tokens, count = prompt(text), text.count("<image>")
        own = torch.tensor(ready[used : used + count]).permute(0, 3, 1, 2)
        used += count
        with torch.no_grad():
            found = model.generate(
                input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                **({"pixel_values": own} if count else {}), do_sample=False, max_new_tokens=LIMIT, eos_token_id=EOS,
                pad_token_id=256, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        said = found.sequences[0, len(tokens) :]
        logits = torch.stack(found.logits)[:, 0]
        best = logits.topk(2).values
        print(text, len(said), "closest", float((best[:, 0] - best[:, 1]).min()))
        values[f"prompt_{number}"] = np.asarray(tokens, np.int32)
        values[f"tokens_{number}"] = said.numpy().astype(np.int32)
        values[f"logprobs_{number}"] = logits.log_softmax(-1).gather(1, said[:, None])[:, 0].numpy()
    np.savez_compressed(HERE / "generated.npz", versions=versions(), **values)


def words(llms: Any) -> None:
    """Writes what language models say."""
    path = HERE.parent / "llm" / "generated.npz"
    tokens = torch.tensor([[0, *(3 + CHARACTERS.index(one) for one in SAID)]])
    found: dict[str, Any] = dict(np.load(path)) if path.exists() else {}
    for name in llms:
        model = transformers.AutoModelForCausalLM.from_pretrained(HERE.parent / "llm" / name, dtype=torch.float32)
        model.config.output_hidden_states = True  # see make_llm.py
        about = dict(attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=1, eos_token_id=1)
        said = model.eval().generate(input_ids=tokens, max_new_tokens=LLM_LIMIT, **about)[0, tokens.shape[1] :]
        found[name] = said.numpy().astype(np.int32)
        print(name, found[name].tolist())
    found["versions"] = versions()
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main()
