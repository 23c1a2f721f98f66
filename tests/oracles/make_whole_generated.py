"""Makes ``generated/``: tiny models that see images, and what transformers answers to messages with files of images.

    python tests/oracles/make_whole_generated.py [llava qwen2_vl qwen3_vl qwen3_5 gemma3 gemma4 ...]

It needs torch, transformers and Pillow, no torchvision. Tokenizers, templates and rules for images are those of
``processors/`` (see ``make_processors.py``), which are not repeated here. Each prompt is answered alone, greedily.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_gemma
import make_gemma4
import make_llava
import make_llava_next
import make_onevision
import make_qwen
import numpy as np
import torch
import transformers
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
PROCESSORS, OUT, LIMIT = HERE / "processors", HERE / "generated", 64
SMALL = {"patch_size": make_qwen.PATCH, "size": {"shortest_edge": 128, "longest_edge": 1536}}
"""Rules of Qwen2-VL's processor for the small patches of ``make_qwen.models``."""
Made = tuple[Any, Any]
"""A model, and its processor."""


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


def rules(folder: str, file: str = "preprocessor_config.json") -> dict[str, Any]:
    """The settings of a folder's image processor."""
    found = json.loads((PROCESSORS / folder / file).read_text())
    found = found.get("image_processor", found)
    return {key: value for key, value in found.items() if key != "image_processor_type"}


def llava(own: Any) -> Made:
    about = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    template = (PROCESSORS / "llava" / "chat_template.jinja").read_text()
    images = CLIPImageProcessorPil(**rules("llava", "processor_config.json"))
    made = make_llava.model(vocabulary=304, image=own.convert_tokens_to_ids("<image>"))
    return made, transformers.LlavaProcessor(images, own, chat_template=template, **about)


def onevision(own: Any) -> Made:
    settings = rules("llava_onevision")
    template = (PROCESSORS / "llava_onevision" / "chat_template.jinja").read_text()
    image, side = own.convert_tokens_to_ids("<image>"), settings["size"]["height"]
    made = make_onevision.model(304, image, side, 7, settings["image_grid_pinpoints"])
    about = {"num_image_tokens": (side // 7) ** 2, "vision_feature_select_strategy": "full", "chat_template": template}
    about |= {"vision_aspect_ratio": made.config.vision_aspect_ratio}
    return made, transformers.LlavaOnevisionProcessor(LlavaOnevisionImageProcessorPil(**settings), own, **about)


def llava_next(folder: str) -> Callable[[Any], Made]:
    def made_of(own: Any) -> Made:
        settings = rules(folder)
        about = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        template = (PROCESSORS / folder / "chat_template.jinja").read_text()
        image, side = own.convert_tokens_to_ids("<image>"), settings["crop_size"]["height"]
        made = make_llava_next.model(304, image, side, 7, settings["image_grid_pinpoints"])
        images = LlavaNextImageProcessorPil(**settings)
        return made, transformers.LlavaNextProcessor(images, own, chat_template=template, **about)

    return made_of


def qwen(name: str) -> Callable[[Any], Made]:
    def made_of(own: Any) -> Made:
        token = own.convert_tokens_to_ids
        ids = {
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
            "video_token_id": token("<|video_pad|>"),
            "image_token_id": token("<|image_pad|>"),
        }
        ends = {"bos_token_id": token("<|endoftext|>"), "eos_token_id": token("<|im_end|>")}
        made = dict(make_qwen.models({"vocab_size": 304, **ends}, ids))[name]
        make_qwen.randomise(made, make_qwen.SEEDS[name])
        folder = MODELS[name][0]
        template = json.loads((PROCESSORS / folder / "chat_template.json").read_text())["chat_template"]
        images = Qwen2VLImageProcessorPil(**{**rules(folder), **SMALL})
        kind = {"qwen2_vl": transformers.Qwen2VLProcessor, "qwen2_5_vl": transformers.Qwen2_5_VLProcessor}
        return made.eval(), kind.get(name, transformers.Qwen3VLProcessor)(images, own, chat_template=template)

    return made_of


def gemma3(own: Any) -> Made:
    ids = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    media = {f"{name}_token_index": getattr(own, f"{name}_token_id") for name in ("boi", "eoi", "image")}
    made = dict(make_gemma.models({"vocab_size": 304, **ids}, media))["gemma3"]
    make_gemma.randomise(made, 9)  # with which it never says an image's token
    template = (PROCESSORS / "gemma3" / "chat_template.jinja").read_text()
    images = Gemma3ImageProcessorPil(**rules("gemma3"))
    length = make_gemma.TOKENS["gemma3"]
    processor = transformers.Gemma3Processor(images, own, chat_template=template, image_seq_length=length)
    return made.eval(), processor


def gemma4(own: Any) -> Made:
    ids = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    media = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in ("boi", "eoi", "image")}
    video = {"video_token_id": own.convert_tokens_to_ids("<|video|>")}
    made = make_gemma4.model({"vocab_size": 312, **ids}, media | video, window=80, limit=70)
    make_gemma4.randomise(made, 19)  # with which it never says an image's or a video's token
    template = (PROCESSORS / "gemma4" / "chat_template.jinja").read_text()
    images = Gemma4ImageProcessorPil(**rules("gemma4"))
    return made, transformers.Gemma4Processor(None, images, own, None, chat_template=template)


MODELS: dict[str, tuple[str, Callable[[Any], Made]]] = {
    "llava": ("llava", llava),
    "llava_onevision": ("llava_onevision", onevision),
    "llava_next": ("llava_next", llava_next("llava_next")),
    "llava_next_mistral": ("llava_next_mistral", llava_next("llava_next_mistral")),
    "qwen2_vl": ("qwen2_vl", qwen("qwen2_vl")),
    "qwen2_5_vl": ("qwen2_vl", qwen("qwen2_5_vl")),
    "qwen3_vl": ("qwen3_vl", qwen("qwen3_vl")),
    "qwen3_vl_moe": ("qwen3_vl", qwen("qwen3_vl_moe")),
    "qwen3_5": ("qwen3_vl", qwen("qwen3_5")),
    "qwen3_5_moe": ("qwen3_vl", qwen("qwen3_5_moe")),
    "gemma3": ("gemma3", gemma3),
    "gemma4": ("gemma4", gemma4),
}
"""By name, the folder among ``processors``, and what makes model and processor of its tokenizer."""


def main(name: str) -> None:
    torch.manual_seed(3)
    folder, make = MODELS[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(PROCESSORS / folder)
    model, processor = make(tokenizer)
    ends = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    file = PROCESSORS / folder / "generation_config.json"
    given_ends = ends | (json.loads(file.read_text()) if file.exists() else {})
    model.generation_config = transformers.GenerationConfig(**given_ends)
    for key, value in ends.items():
        setattr(model.config.get_text_config(), key, value)
    found: dict[str, Any] = {}
    for number, asked in enumerate(messages()):
        named = [part["image"] for one in asked for part in one["content"] if part["type"] == "image"]
        images = [load_image(str(PROCESSORS / image)) for image in named]
        prompt = processor.apply_chat_template(asked, add_generation_prompt=True)
        # In a list of their own, as ``apply_chat_template`` gives them: else each is a conversation's only image.
        begun = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)  # as ``apply_chat_template`` asks
        about = {"add_special_tokens": False} if begun else {}
        given = processor(text=prompt, images=[images] if images else None, return_tensors="pt", **about)
        with torch.no_grad():
            made = model.generate(
                **given, do_sample=False, max_new_tokens=LIMIT, return_dict_in_generate=True, output_logits=True
            )
        said, logits = made.sequences[0, given["input_ids"].shape[1] :], torch.stack(made.logits)[:, 0]
        best = logits.topk(2).values
        closest = float((best[:, 0] - best[:, 1]).min())
        print(
            name, len(given["input_ids"][0]), "tokens asked,", len(said), "said, closest", closest, said[:20].tolist()
        )
        found[f"prompt_{number}"], found[f"tokens_{number}"] = given["input_ids"][0].numpy(), said.numpy()
        found[f"logprobs_{number}"] = logits.log_softmax(-1).gather(1, said[:, None])[:, 0].numpy()
    out = OUT / name
    out.mkdir(exist_ok=True, parents=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    if folder in ("qwen2_vl", "qwen3_vl"):
        theirs = json.loads((PROCESSORS / folder / "preprocessor_config.json").read_text())
        (out / "preprocessor_config.json").write_text(json.dumps({**theirs, **SMALL}, indent=1) + "\n")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(out / "values.npz", versions=json.dumps(versions), **found)
    (OUT / "messages.jsonl").write_text("".join(json.dumps(asked) + "\n" for asked in messages()))


if __name__ == "__main__":
    # Processors ask for one of videos too, which needs torchvision.
    transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, argument: None
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or MODELS:
        main(chosen)
