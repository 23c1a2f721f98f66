"""Makes ``generated/llava/``: a tiny LLaVA, and what transformers answers to messages with files of images.

    python tests/oracles/make_whole_generated.py

It needs torch, transformers and Pillow, no torchvision. Tokenizer, template and rules for images are those of
``processors/llava`` (see ``make_processors.py``), which are not repeated here. Each prompt is answered alone, greedily.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_llava import model as make_model
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

HERE = Path(__file__).parent
FROM, OUT, LIMIT = HERE / "processors" / "llava", HERE / "generated" / "llava", 64


def messages() -> list[list[dict[str, Any]]]:
    """An image, none, two with another turn between."""
    text = lambda said: {"type": "text", "text": said}  # noqa: E731
    image = lambda name: {"type": "image", "image": name}  # noqa: E731
    user, assistant = (
        lambda *content, role=role: {"role": role, "content": [*content]} for role in ("user", "assistant")
    )
    return [
        [user(image("odd.png"), text("What is in the picture?"))],
        [user(text("Describe the dog, please."))],
        [
            user(image("turned.jpg"), text("What is this?")),
            assistant(text("A red ball.")),
            user(image("odd.png"), text("And this?")),
        ],
    ]


def main() -> None:
    transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, argument: None
    torch.manual_seed(3)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FROM)
    settings = json.loads((FROM / "processor_config.json").read_text())["image_processor"]
    template = (FROM / "chat_template.jinja").read_text()
    about = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    rules = CLIPImageProcessorPil(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    processor = transformers.LlavaProcessor(rules, tokenizer, chat_template=template, **about)
    model = make_model(vocabulary=304, image=tokenizer.convert_tokens_to_ids("<image>"))
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = transformers.GenerationConfig(**ends)
    for name, value in ends.items():
        setattr(model.config.text_config, name, value)
    found: dict[str, Any] = {}
    for number, asked in enumerate(messages()):
        named = [part["image"] for one in asked for part in one["content"] if part["type"] == "image"]
        images = [load_image(str(FROM.parent / name)) for name in named]
        prompt = processor.apply_chat_template(asked, add_generation_prompt=True)
        given = processor(text=prompt, images=images or None, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(
                **given, do_sample=False, max_new_tokens=LIMIT, return_dict_in_generate=True, output_logits=True
            )
        said, logits = made.sequences[0, given["input_ids"].shape[1] :], torch.stack(made.logits)[:, 0]
        best = logits.topk(2).values
        print(repr(prompt), len(said), "closest", float((best[:, 0] - best[:, 1]).min()))
        found[f"prompt_{number}"], found[f"tokens_{number}"] = given["input_ids"][0].numpy(), said.numpy()
        found[f"logprobs_{number}"] = logits.log_softmax(-1).gather(1, said[:, None])[:, 0].numpy()
    OUT.mkdir(exist_ok=True, parents=True)
    model.save_pretrained(OUT)
    (OUT / "model.safetensors").chmod(0o644)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(OUT / "values.npz", versions=json.dumps(versions), **found)
    (OUT / "messages.jsonl").write_text("".join(json.dumps(asked) + "\n" for asked in messages()))


if __name__ == "__main__":
    main()
