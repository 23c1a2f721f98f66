"""Makes ``processors/``: tiny folders with tokenizers, templates and image rules, and what transformers makes of them.

    python tests/oracles/make_processors.py [gemma3 paligemma2]    # adds these two to the others

It needs transformers and Pillow, no torchvision: the image processors are those for Pillow. ``values.npz`` has every
fifth pixel of every image under every rule, ``dialogues.json`` the token ids of dialogues.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.image_utils import load_image

HERE = Path(__file__).parent / "processors"
STRIDE = 5
TEXTS = [
    "USER: What is in the picture? ASSISTANT: A red ball and a blue box on the table.",
    "You are a helpful assistant. Describe the two images, please. The first one shows a small dog.",
    "system user assistant yes no and the other is not here \n\n",
]

LLAVA = """\
{% for message in messages %}
{% if message['role'] != 'system' %}
{{ message['role'].upper() + ': ' }}
{%- endif %}
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}
{{ '<image>\\n' }}
{%- endfor %}
{% if message['role'] == 'assistant' %}
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{% generation %}
{{- part['text'] + ' ' }}
{%- endgeneration %}
{% endfor %}
{% else %}
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{{ part['text'] + ' ' }}
{%- endfor %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ 'ASSISTANT:' }}
{%- endif %}
"""
QWEN3 = """\
{%- macro written(content, counter) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {%- set counter.images = counter.images + 1 %}
                {%- if add_vision_id %}Picture {{ counter.images }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set counter = namespace(images=0) %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + written(messages[0].content, counter) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + written(message.content, counter) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHATML = """\
{% for message in messages %}
{% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{ message.content }}
{%- else %}
{% for part in message.content %}
{% if part.type == 'image' %}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{ part.text }}
{%- endif %}
{% endfor %}
{% endif %}
{{ '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
ONEVISION = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + ' ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}
{{ '<image>' }}
{%- endfor %}
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{% if message['role'] == 'assistant' %}
{% generation %}
{{- '\\n' + part['text'] }}
{%- endgeneration %}
{% else %}
{{ '\\n' + part['text'] }}
{%- endif %}
{% endfor %}
{{ '<|im_end|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
GEMMA4 = """\
{{ bos_token }}
{%- for message in messages -%}
    {{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}
                {{ '<|image|>' }}
            {%- elif part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|turn>model\\n' }}
{%- endif -%}
"""
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}
{% set rest = messages %}{% set system = false %}
{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must take turns') }}
{% endif %}
{% if loop.index0 == 0 and system != false %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}
{% set content = message['content'] %}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}
{{ ' ' + content.strip() + ' ' + eos_token }}
{%- endif %}
{% endfor %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- raise_exception('there is no system prompt') }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""


NEXT_MISTRAL = """\
{% for message in messages %}
{%- if message['role'] == 'system' %}
{{- '<<SYS>>\\n' + message['content'][0]['text'] + '\\n<</SYS>>\\n\\n' }}
{%- elif message['role'] == 'user' %}
{{- '[INST] ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}
{{- '<image>\\n' }}
{%- endfor %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{{- part['text'] + ' [/INST]' }}
{%- endfor %}
{%- else %}
{{- ' ' + message['content'][0]['text'] + '</s> ' }}
{%- endif %}
{%- endfor %}
"""


def tokenizer(special: list[str], **about: Any) -> Any:
    """A byte-level tokenizer with 40 merges, its special tokens behind all others."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=296, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(special)
    if about.pop("begins", False):
        bos = about["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **about)


def pictures() -> None:
    """Small files: odd sizes, formats and modes; one lies on its side."""
    rng = np.random.default_rng(0)

    def drawn(height: int, width: int, channels: int = 3) -> np.ndarray:
        y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
        waves = [np.sin(9 * (c + 1) * x + 7 * y * (c + 2)) for c in range(channels)]
        noise = rng.normal(0, 12, (height, width, channels))
        return np.clip(127 + 100 * np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)

    rgb = Image.fromarray(drawn(37, 61))
    rgb.save(HERE / "odd.png")
    Image.fromarray(drawn(70, 23, 1)[..., 0]).save(HERE / "grey.png")
    Image.fromarray(drawn(30, 45, 4)).save(HERE / "alpha.png")
    palette = Image.fromarray(drawn(33, 33)).quantize(8)
    palette.save(HERE / "palette.png", transparency=3)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(drawn(90, 130)).save(HERE / "turned.jpg", quality=85, exif=exif.tobytes())
    Image.fromarray(drawn(64, 48)).save(HERE / "small.webp", quality=80)


IMAGES = ("odd.png", "grey.png", "alpha.png", "palette.png", "turned.jpg", "small.webp")

CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
PINPOINTS = [[h, w] for h in (28, 56, 84) for w in (28, 56, 84)]
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("clip.CLIP", CLIP),
    "llava": ("clip.CLIP", CLIP),
    "llava_square": ("llava.Llava", {**CLIP, "do_pad": True}),
    "siglip": ("siglip.Siglip", {"size": {"height": 28, "width": 28}}),
    "siglip2_fixed": ("siglip.Siglip", {"size": {"height": 32, "width": 32}, "resample": 2}),
    "siglip2": ("siglip2.Siglip2", {"patch_size": 8, "max_num_patches": 24}),
    "dinov2": ("bit.Bit", {**CLIP, "size": {"shortest_edge": 32}}),
    "dinov2_small": ("bit.Bit", {**CLIP, "size": {"shortest_edge": 23}}),
    "vit": ("vit.ViT", {"size": {"height": 32, "width": 32}}),
    "dinov3": ("", {"size": {"height": 32, "width": 48}}),
    "qwen2_vl": ("qwen2_vl.Qwen2VL", {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 9, "patch_size": 14}),
    "qwen3_vl": (
        "qwen2_vl.Qwen2VL",
        {
            **{"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 9}, "patch_size": 16},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        },
    ),
    "llava_onevision": (
        "llava_onevision.LlavaOnevision",
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
    ),
    **dict.fromkeys(
        ("llava_next", "llava_next_mistral"),
        (
            "llava_next.LlavaNext",
            {**CLIP, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]},
        ),
    ),
    "gemma3": ("gemma3.Gemma3", {"size": {"height": 48, "width": 48}}),
    "gemma4": ("gemma4.Gemma4", {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}),
    "paligemma2": ("siglip.Siglip", {"size": {"height": 28, "width": 28}, "image_seq_length": 16}),
}
"""By folder, the module and name of the image processor, and its settings."""


class Dinov3:
    """Its processor in ``transformers`` needs torchvision, whose ``resize`` of floats is torch's ``interpolate``."""

    rules: ClassVar = {
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_resize": True, "resample": 2, "do_normalize": True},
        **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "do_center_crop": None},
        "image_processor_type": "DINOv3ViTImageProcessorFast",
    }

    def __init__(self, size: dict[str, int]) -> None:
        self.size = size

    def __call__(self, image: Any, return_tensors: str) -> dict[str, np.ndarray]:
        """Scales to 0 to 1, then resizes, then normalises."""
        levels = (
            torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())[None].float() * self.rules["rescale_factor"]
        )
        sides = (self.size["height"], self.size["width"])
        resized = torch.nn.functional.interpolate(levels, sides, mode="bilinear", align_corners=False, antialias=True)
        mean, std = (torch.tensor(self.rules[f"image_{name}"])[:, None, None] for name in ("mean", "std"))
        return {"pixel_values": ((resized - mean) / std).numpy()}

    def save_pretrained(self, folder: Path) -> None:
        """Writes its rules."""
        (folder / "preprocessor_config.json").write_text(json.dumps({**self.rules, "size": self.size}, indent=1) + "\n")


def image_processor(name: str) -> Any:
    where, settings = RULES[name]
    if name == "dinov3":
        return Dinov3(**settings)
    family, cls = where.split(".")
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{cls}ImageProcessorPil")(**settings)


def seen(name: str, made: Any, image: Any) -> list[np.ndarray]:
    """Media [h, w, 3] of an image."""
    if name.startswith(("llava_onevision", "llava_next")):
        return [one.transpose(1, 2, 0) for one in made(image, return_tensors="np")["pixel_values"][0]]
    if name == "siglip2":
        found = made(image, return_tensors="np")
        rows, columns = (int(n) for n in found["spatial_shapes"][0])
        patches = found["pixel_values"][0][: rows * columns].reshape(rows, columns, 8, 8, 3)
        return [patches.transpose(0, 2, 1, 3, 4).reshape(rows * 8, columns * 8, 3)]
    if name == "gemma4":
        found, side = made(image, return_tensors="np"), made.patch_size
        columns, rows = found["image_position_ids"][0].max(axis=0) + 1
        assert rows * columns == 9 * found["num_soft_tokens_per_image"][0]
        patches = found["pixel_values"][0][: rows * columns].reshape(rows, columns, side, side, 3)
        # The model moves pixels from 0 to 1 to -1 to 1 itself.
        return [2 * (patches.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, 3) - 0.5)]
    if name in ("qwen2_vl", "qwen3_vl"):
        found, side = made(image, return_tensors="np"), made.patch_size
        _, rows, columns = (int(n) for n in found["image_grid_thw"][0])
        patches = found["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)
        assert np.array_equal(patches[..., 0, :, :], patches[..., 1, :, :])
        laid = patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
        return [laid.reshape(rows * side, columns * side, 3)]
    return [made(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)]


def resized(made: Any) -> np.ndarray:
    """Heights and widths of images, and what Gemma 4's processor makes of them."""
    rule = importlib.import_module(type(made).__module__).get_aspect_ratio_preserving_size
    rng, found = np.random.default_rng(0), []
    for height, width in [*rng.integers(1, 3000, (60, 2)), (1, 900), (900, 1), (3, 8000), (40, 30), (1, 71), (5, 5)]:
        size = rule(int(height), int(width), made.patch_size, made.max_soft_tokens * 9, made.pooling_kernel_size)
        found.append((height, width, *size))
    return np.asarray(found)


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def picture(name: str) -> dict[str, str]:
    return {"type": "image", "path": str(HERE / name)}


def dialogues(images: bool) -> dict[str, list[dict[str, Any]]]:
    """Dialogues by name, messages as transformers takes them."""
    ask = "What is in the picture?"
    several = [
        {"role": "system", "content": [text("You are a helpful assistant.")]},
        {"role": "user", "content": [text("Describe the two images.")]},
        {"role": "assistant", "content": [text(" A red ball\n")]},
        {"role": "user", "content": [text("and the other?")]},
        {"role": "assistant", "content": [text("é漢 not here")]},
    ]
    found = {
        "one": [{"role": "user", "content": [text(ask)]}, {"role": "assistant", "content": [text("A small dog.")]}],
        "several": several,
        "without_system": several[1:],
    }
    if not images:
        return {
            name: [{**message, "content": message["content"][0]["text"]} for message in messages]
            for name, messages in found.items()
        }
    first, second = picture("odd.png"), picture("turned.jpg")
    return found | {
        "image": [{"role": "user", "content": [first, text(ask)]}, found["one"][1]],
        "images": [
            several[0],
            {"role": "user", "content": [first, text("Describe the two images."), second]},
            several[2],
            {"role": "user", "content": [text("and "), picture("grey.png"), text("the other?")]},
            several[4],
        ],
    }


def tokens_of(made: Any, images: bool, marks: bool) -> dict[str, Any]:
    """By dialogue, its messages, ids, the ids of the prompt of its last answer and the mask of the answers."""
    found: dict[str, Any] = {}
    for name, messages in dialogues(images).items():
        about: dict[str, Any] = {"tokenize": True, "return_dict": True}
        kept = [{**m, "content": [_kept(part) for part in m["content"]] if images else m["content"]} for m in messages]
        try:
            whole = made.apply_chat_template(messages, return_assistant_tokens_mask=marks, **about)
            prompt = made.apply_chat_template(messages[:-1], add_generation_prompt=True, **about)
        except Exception as error:  # a template may refuse a system prompt
            found[name] = {"messages": kept, "refused": str(error)}
            continue
        entry = {"messages": kept, "ids": _row(whole["input_ids"]), "prompt": _row(prompt["input_ids"])}
        found[name] = entry | ({"mask": _row(whole["assistant_masks"])} if marks else {})
    return found


def _kept(part: dict[str, str]) -> dict[str, str]:
    return {**part, "path": os.path.basename(part["path"])} if "path" in part else part


def _row(ids: Any) -> list[int]:
    ids = ids[0] if isinstance(ids[0], (list, tuple, np.ndarray)) else ids
    return [int(i) for i in ids]


def config(name: str, model_type: str, **values: Any) -> None:
    (HERE / name / "config.json").write_text(json.dumps({"model_type": model_type, **values}, indent=1) + "\n")


CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def wholes() -> dict[str, Any]:
    """Folders of models that see images, and the dialogues."""
    found: dict[str, Any] = {}
    own = tokenizer(
        ["<unk>", "<s>", "</s>", "<pad>", "<image>"], bos_token="<s>", eos_token="</s>", pad_token="<pad>", begins=True
    )
    about = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    made = transformers.LlavaProcessor(image_processor("llava"), own, chat_template=LLAVA, **about)
    made.save_pretrained(HERE / "llava")
    config("llava", "llava", image_token_index=own.convert_tokens_to_ids("<image>"), vision_config={})
    found["llava"] = tokens_of(made, images=True, marks=True)

    own = tokenizer(
        [*CHATML_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made = transformers.Qwen2VLProcessor(image_processor("qwen2_vl"), own, chat_template=CHATML)
    own.save_pretrained(HERE / "qwen2_vl")  # a processor without its part for videos is not saved
    (HERE / "qwen2_vl" / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}) + "\n")
    config("qwen2_vl", "qwen2_vl", image_token_id=own.convert_tokens_to_ids("<|image_pad|>"), vision_config={})
    generation = {"eos_token_id": [own.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]}
    (HERE / "qwen2_vl" / "generation_config.json").write_text(json.dumps(generation) + "\n")
    found["qwen2_vl"] = tokens_of(made, images=True, marks=False)
    of_3 = transformers.Qwen3VLProcessor(image_processor("qwen3_vl"), own, chat_template=QWEN3)
    own.save_pretrained(HERE / "qwen3_vl")
    (HERE / "qwen3_vl" / "chat_template.json").write_text(json.dumps({"chat_template": QWEN3}) + "\n")
    config("qwen3_vl", "qwen3_vl", image_token_id=own.convert_tokens_to_ids("<|image_pad|>"), vision_config={})
    (HERE / "qwen3_vl" / "generation_config.json").write_text(json.dumps(generation) + "\n")
    found["qwen3_vl"] = tokens_of(of_3, images=True, marks=False)
    newer = transformers.Qwen2_5_VLProcessor(image_processor("qwen2_vl"), own, chat_template=CHATML)
    assert tokens_of(newer, images=True, marks=False) == found["qwen2_vl"], "Qwen2.5-VL's has its own rules"

    own = tokenizer([*CHATML_TOKENS, "<image>", "<video>"], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    about = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "chat_template": ONEVISION}
    made = transformers.LlavaOnevisionProcessor(image_processor("llava_onevision"), own, **about)
    own.save_pretrained(HERE / "llava_onevision")
    (HERE / "llava_onevision" / "chat_template.jinja").write_text(ONEVISION)
    config(
        "llava_onevision", "llava_onevision", image_token_index=own.convert_tokens_to_ids("<image>"), vision_config={}
    )
    found["llava_onevision"] = tokens_of(made, images=True, marks=True)
    return found


def nexts() -> dict[str, Any]:
    """Folders of LLaVA-NeXT, of Vicuna and of Mistral, and the dialogues."""
    found: dict[str, Any] = {}
    about = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    for name, template in (("llava_next", LLAVA), ("llava_next_mistral", NEXT_MISTRAL)):
        own = tokenizer(
            ["<unk>", "<s>", "</s>", "<pad>", "<image>"],
            **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
            begins=True,
        )
        made = transformers.LlavaNextProcessor(image_processor(name), own, chat_template=template, **about)
        made.save_pretrained(HERE / name)
        config(name, "llava_next", image_token_index=own.convert_tokens_to_ids("<image>"), vision_config={})
        found[name] = tokens_of(made, images=True, marks=name == "llava_next")
    return found


def gemmas() -> dict[str, Any]:
    """Folders of Gemma 3, 4 and PaliGemma 2, and the dialogues. The last has no template, and questions and answers."""
    found: dict[str, Any] = {}
    turns = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    media = dict(zip(("boi_token", "eoi_token", "image_token"), turns[2:], strict=True))
    own = tokenizer(["<pad>", "<eos>", "<bos>", *turns], **ends, extra_special_tokens=media, begins=True)
    token = own.convert_tokens_to_ids
    made = transformers.Gemma3Processor(image_processor("gemma3"), own, chat_template=GEMMA3, image_seq_length=9)
    made.save_pretrained(HERE / "gemma3")
    ids = {f"{name[:3]}_token_index": token(text) for name, text in media.items() if name != "image_token"}
    config("gemma3", "gemma3", image_token_index=token(turns[4]), **ids, vision_config={})
    generation = {"eos_token_id": [token("<eos>"), token("<end_of_turn>")]}
    (HERE / "gemma3" / "generation_config.json").write_text(json.dumps(generation) + "\n")
    found["gemma3"] = tokens_of(made, images=True, marks=False)

    found["gemma4"] = gemma4(ends)

    transformers.models.paligemma.processing_paligemma.EXTRA_TOKENS[:] = ["<loc0000>", "<seg000>"]
    own = tokenizer(["<pad>", "<eos>", "<bos>", "<image>"], **ends, extra_special_tokens={"image_token": "<image>"})
    made = transformers.PaliGemmaProcessor(image_processor("paligemma2"), own)
    made.save_pretrained(HERE / "paligemma2")
    config(
        "paligemma2", "paligemma", image_token_index=token_of(own, "<image>"), vision_config={},
        text_config={"eos_token_id": token_of(own, "<eos>")},
    )  # fmt: skip
    first, second, ask = picture("odd.png"), picture("turned.jpg"), text("What is in the picture?")
    found["paligemma2"] = {}
    for name, parts in {
        "image": [first, ask],
        "images": [first, second, ask],
        "inside": [text("dog "), first, ask],
    }.items():
        question = "".join("<image>" if "path" in part else part["text"] for part in parts)
        images = [[load_image(part["path"]) for part in parts if "path" in part]]
        whole = made(images=images, text=[question], suffix=["A small dog."])
        prompt = made(images=images, text=[question])
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": [text("A small dog.")]}]
        kept = [{**message, "content": [_kept(part) for part in message["content"]]} for message in messages]
        ids, mask = _row(whole["input_ids"]), _row(whole["token_type_ids"])
        found["paligemma2"][name] = {"messages": kept, "ids": ids, "prompt": _row(prompt["input_ids"]), "mask": mask}
    return found


def gemma4(ends: dict[str, str]) -> dict[str, Any]:
    """The folder of Gemma 4, whose processor writes tokens around an image's, and the dialogues."""
    media = {f"{name}_token": text for name, text in (("boi", "<|image>"), ("eoi", "<image|>"), ("image", "<|image|>"))}
    heard = {f"{name}_token": text for name, text in (("boa", "<|audio>"), ("eoa", "<audio|>"), ("audio", "<|audio|>"))}
    added = ["<|turn>", "<turn|>", *media.values(), *heard.values(), "<|video|>"]
    own = tokenizer(["<pad>", "<eos>", "<bos>", *added], **ends, extra_special_tokens=media | heard, begins=True)
    own.save_pretrained(HERE / "gemma4")  # a processor without its part for videos is not saved
    made = transformers.Gemma4Processor(None, image_processor("gemma4"), own, None, chat_template=GEMMA4)
    (HERE / "gemma4" / "chat_template.jinja").write_text(GEMMA4)
    ids = {f"{name}_token_id": token_of(own, media[f"{name}_token"]) for name in ("boi", "eoi", "image")}
    config("gemma4", "gemma4", **ids, video_token_id=token_of(own, "<|video|>"), vision_config={})
    generation = {"eos_token_id": [token_of(own, "<eos>"), token_of(own, "<turn|>")]}
    (HERE / "gemma4" / "generation_config.json").write_text(json.dumps(generation) + "\n")
    return tokens_of(made, images=True, marks=False)


def token_of(made: Any, text: str) -> int:
    return made.convert_tokens_to_ids(text)


def languages() -> dict[str, Any]:
    """Folders of language models, and the dialogues."""
    content = "{{ message.content }}"
    learned = f"{{% generation %}}{content}{{% endgeneration %}}"
    chatml = CHATML.replace(
        content, f"{{% if message.role == 'assistant' %}}{learned}{{% else %}}{content}{{% endif %}}"
    )
    header = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    folders = {
        "chatml": ("qwen2", chatml, CHATML_TOKENS, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
        "llama2": ("llama", LLAMA2, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>", "begins": True}),
        "llama3": (
            "llama",
            LLAMA3,
            ["<|begin_of_text|>", "<|end_of_text|>", *header],
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "begins": True},
        ),
        "mistral": ("mistral", MISTRAL, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>", "begins": True}),
    }
    found: dict[str, Any] = {}
    for name, (kind, template, special, about) in folders.items():
        own = tokenizer(special, **about)
        own.chat_template = template
        own.save_pretrained(HERE / name)
        config(name, kind)
        found[name] = tokens_of(own, images=False, marks=name == "chatml")
    for name, legacy in (("blanks", False), ("old_blanks", True)):
        found[name] = tokens_of(blanks(name, legacy), images=False, marks=False)
    return found


def blanks(name: str, legacy: bool) -> Any:
    """A tokenizer as the folders of Llama 2 and Vicuna have it, which transformers builds anew."""
    own = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    own += sorted({*"".join(TEXTS)} - {" ", "\n"})
    vocabulary = {token: i for i, token in enumerate([*own, "\u2581W", "\u2581a"])}
    merges = [("\u2581", "W"), ("\u2581", "a")]
    made = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    undone = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(undone)
    made.add_special_tokens(own[:3])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    (HERE / name).mkdir()
    made.save(str(HERE / name / "tokenizer.json"))
    said = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "bos_token": "<s>", "eos_token": "</s>"}
    (HERE / name / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": LLAMA2}) + "\n")
    config(name, "llama")
    return transformers.AutoTokenizer.from_pretrained(HERE / name)


def main() -> None:
    # Processors ask for one of videos too, which needs torchvision.
    transformers.ProcessorMixin.check_argument_for_proper_class = lambda self, name, argument: None
    versions = {"transformers": transformers.__version__, "pillow": PIL.__version__}
    values: dict[str, Any] = {"versions": json.dumps(versions)}
    if added := sys.argv[1:]:
        values = dict(np.load(HERE / "values.npz"))
    else:
        shutil.rmtree(HERE, ignore_errors=True)
        HERE.mkdir()
        pictures()
    for name in added or RULES:
        made = image_processor(name)
        (HERE / name).mkdir(exist_ok=True)
        if name != "llava":  # whose rules are in processor_config.json
            made.save_pretrained(HERE / name)
        for file in IMAGES:
            for number, medium in enumerate(seen(name, made, load_image(str(HERE / file)))):
                values[f"{name}/{file}/{number}/shape"] = np.asarray(medium.shape[:2])
                values[f"{name}/{file}/{number}"] = medium[::STRIDE, ::STRIDE].astype(np.float32)
        if name == "gemma4":
            values["gemma4/sizes"] = resized(made)
        if name == "llava_onevision":
            pair = [load_image(str(HERE / file)) for file in IMAGES[:2]]
            for file, medium in zip(IMAGES, made([pair], return_tensors="np")["pixel_values"], strict=False):
                values[f"several/{file}"] = medium[0].transpose(1, 2, 0)[::STRIDE, ::STRIDE].astype(np.float32)
    file = HERE / "dialogues.json"
    apart = {**gemmas(), **nexts()}
    found = {**json.loads(file.read_text("utf-8")), **apart} if added else {**wholes(), **apart, **languages()}
    np.savez_compressed(HERE / "values.npz", **values)
    file.write_text(json.dumps({"versions": versions, **found}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
