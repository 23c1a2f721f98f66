"""Makes smollm2.json: greedy answers of SmolLM2-135M-Instruct by transformers, which dequantises the same GGUF file.

python make_smollm2.py FILE.gguf, in an environment with torch, transformers, accelerate and gguf.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours and say what each reminds you of.",
)


def main() -> None:
    file = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        made = model.generate(
            prompt, max_new_tokens=48, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        tokens = made.sequences[0, prompt.shape[1] :].tolist()
        pairs = zip(made.logits, tokens, strict=True)
        logprobs = [round(torch.log_softmax(logits[0].float(), -1)[token].item(), 6) for logits, token in pairs]
        answers.append({"question": question, "tokens": tokens, "logprobs": logprobs})
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    Path(__file__).with_name("smollm2.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
