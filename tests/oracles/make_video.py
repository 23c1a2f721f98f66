"""Makes ``video/``: what transformers makes of videos, their frames, texts and positions, and of models that see them.

    python tests/oracles/make_video.py [models|NAME …]

It needs torch, torchvision and transformers. Videos are drawn from seeds (``drawn_video``), so that only what
transformers makes of them is kept: ``values.npz`` has every fifth pixel of every temporal patch, ``dialogues.json`` the
token ids, and ``MODEL.npz`` for each of ``MODELS`` a packed row's losses, gradients, hidden states and logits, and a
greedy continuation. The models are those of ``qwen/``.

Qwen2-VL and Qwen2.5-VL have times as positions. `transformers` 5.24 lets the text behind a video go on behind its rows
and columns; its version 4, and the models' own training, behind the largest number (``published_positions``).
The models are given these; where no time is larger than rows and columns both are the same.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from drawn_videos import VIDEOS, drawn_video, named_video
from make_processors import QWEN3, image_processor
from make_qwen import END, IMAGE, MERGE, PATCH, START, VIDEO, patches_of
from make_whole_generated import SMALL, rules
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

HERE = Path(__file__).parent / "video"
FOLDERS = Path(__file__).parent
STRIDE = 5
RULES: dict[str, Any] = {"size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 40}}
MODELS = {"qwen3_vl": 12, "qwen3_5": 13, "qwen2_vl": 14, "qwen2_5_vl": 15, "qwen3_vl_moe": 16, "qwen3_5_moe": 17}
"""Models, and the seeds of their texts, with which greedy words vary and are no token of a medium."""
SIZES = ((16, 24), (24, 16), (8, 24))
"""Heights and widths of an image, of the frames of a video, and of those of another."""
SEQUENCES = ("tivt", "tv", "tiit")
"""``t`` is a run of text, ``i`` an image, ``v`` a video of the next number of ``TEMPORAL`` patches."""
TEMPORAL = (3, 2)
ANSWERING = tuple(MODELS)
"""Models of ``generated/`` that answer messages with videos."""
POSITIONS = ("qwen2_vl", "qwen2_5_vl")
"""Models whose times are positions."""
SECONDS, PROMPT_SECONDS = 0.85, 0.3
"""Seconds of a temporal patch, for Qwen2.5-VL, which has four positions a second: 0, 3, 6 and 0, 1, 2."""
PROMPT, NEW = "tivt", 24
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [{"type": "video", "video": "odd.mkv"}, {"type": "text", "text": "What is it?"}]}],
    [
        {"role": "user", "content": [{"type": "image", "image": "odd.png"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A red ball."}]},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "video", "video": "small.mkv"}]},
    ],
]
"""Messages that whole models answer; their videos are those of ``VIDEOS``."""


def processed(patch: int, make: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Pixels and indices of videos, and frames a second of those taken; ``make`` gives a processor its settings."""
    values: dict[str, Any] = {}
    for name, (count, _, _, rate, more) in VIDEOS.items():
        pixels = torch.from_numpy(named_video(name).transpose(0, 3, 1, 2).copy())
        metadata = [{"fps": rate, "total_num_frames": count}]
        found = make(more)([pixels], video_metadata=metadata, return_metadata=True, return_tensors="pt")
        times, rows, columns = (int(n) for n in found["video_grid_thw"][0])
        cut = (times, rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
        patches = found["pixel_values_videos"].numpy().reshape(cut).transpose(0, 1, 3, 7, 2, 4, 8, 6, 5)
        laid = patches.reshape(times, rows * patch, columns * patch, 6)
        values[f"{name}/shape"] = np.asarray(laid.shape)
        values[f"{name}/pixels"] = laid[:, ::STRIDE, ::STRIDE].astype(np.float32)
        values[f"{name}/frames"] = np.asarray(found["video_metadata"][0].frames_indices)
        values[f"{name}/rate"] = np.asarray(found["video_metadata"][0].sampled_fps)
    return values


def by_timestamps() -> dict[str, Any]:
    """As the processor of Qwen3-VL makes them."""
    values = processed(16, lambda more: Qwen3VLVideoProcessor(**{**RULES, "cap_pixels_per_frame": False, **more}))
    return {key: value for key, value in values.items() if not key.endswith("/rate")}


def by_position() -> dict[str, Any]:
    """As the processor of Qwen2-VL makes them, and times as positions."""

    def made(more: dict[str, Any]) -> Any:
        taken = {key: value for key, value in more.items() if key in ("fps", "num_frames")}
        small = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12}, "do_sample_frames": True}
        return Qwen2VLVideoProcessor(**{"fps": 2, **small, **taken}, cap_pixels_per_frame=False)

    values = processed(14, made)
    for name in VIDEOS:
        seconds = torch.tensor(2 / float(values.pop(f"{name}/rate")))
        values[f"{name}/numbers"] = (torch.arange(values[f"{name}/shape"][0]) * (4 * seconds)).long().numpy()
    return values


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def dialogues() -> dict[str, Any]:
    """Token ids of dialogues with videos, by the rules of the folder ``processors/qwen3_vl``."""
    own = transformers.AutoTokenizer.from_pretrained(FOLDERS / "processors" / "qwen3_vl")
    moving = "{%- elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    template = QWEN3.replace("{%- elif 'text' in part %}", moving + "{%- elif 'text' in part %}")
    processor = Qwen3VLVideoProcessor(**RULES, cap_pixels_per_frame=False)
    made = transformers.Qwen3VLProcessor(image_processor("qwen3_vl"), own, processor, chat_template=template)
    folder = HERE / "folder"
    own.save_pretrained(folder)
    processor.save_pretrained(folder)
    image_processor("qwen3_vl").save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    names |= {"vision_end": "<|vision_end|>"}
    ids = {f"{key}_token_id": own.convert_tokens_to_ids(token) for key, token in names.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **ids, "vision_config": {}}) + "\n")
    image = drawn_video(90, 1, 64, 96)[0]
    cases: dict[str, list[list[str]]] = {
        "one": [["odd", "What is in the picture?"], ["A small dog."]],
        "several": [["two", "and ", "image", " or ", "long"], ["a red ball"], ["wide", "the other?"], ["not here"]],
    }
    found: dict[str, Any] = {}
    for name, turns in cases.items():
        messages, videos, metadata, images = [], [], [], []
        for number, turn in enumerate(turns):
            parts: list[dict[str, str]] = []
            for part in turn:
                if part in VIDEOS:
                    count, _, _, rate, _ = VIDEOS[part]
                    videos.append(torch.from_numpy(named_video(part).transpose(0, 3, 1, 2).copy()))
                    metadata.append({"fps": rate, "total_num_frames": count})
                    parts.append({"type": "video"})
                elif part == "image":
                    images.append(image)
                    parts.append({"type": "image"})
                else:
                    parts.append(text(part))
            messages.append({"role": "assistant" if number % 2 else "user", "content": parts})
        by_end = {}
        for key, kept, prompt in (("ids", messages, False), ("prompt", messages[:-1], True)):
            written = own.apply_chat_template(
                kept, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            given = made(
                text=[written], videos=videos, video_metadata=[dict(m) for m in metadata], images=images or None
            )
            by_end[key] = [int(i) for i in given["input_ids"][0]]
        found[name] = {"turns": turns, **by_end}
    return found


def sequence(
    kinds: str, sizes: list[tuple[int, int]], temporal: list[int], rng: np.random.Generator, *, timed: bool
) -> list[int]:
    """Its tokens: a temporal patch has a time of text before it if `timed`, else they stand together."""
    found: list[int] = []
    for kind in kinds:
        if kind == "t":
            found += rng.integers(0, 256, 5).tolist()
            continue
        height, width = sizes.pop(0)
        count, token = height * width // (PATCH * MERGE) ** 2, IMAGE if kind == "i" else VIDEO
        if kind == "v" and not timed:
            found += [START, *[token] * (count * temporal.pop(0)), END]
            continue
        for _ in range(temporal.pop(0) if kind == "v" else 1):
            found += rng.integers(0, 256, 3).tolist() if kind == "v" else []
            found += [START, *[token] * count, END]
    return found


def inputs(name: str, kinds: str, seed: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A sequence as the model takes it, and its media: images [h, w, 3], temporal patches [h, w, 6]."""
    rng = np.random.default_rng(seed)
    sizes, temporal = list(SIZES), list(TEMPORAL)
    timed = name not in POSITIONS
    tokens = torch.tensor([sequence(kinds, list(sizes), list(temporal), rng, timed=timed)])
    given: dict[str, Any] = {"input_ids": tokens}
    given["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    media, images, videos, grids = [], [], [], []
    for kind in kinds.replace("t", ""):
        height, width = sizes.pop(0)
        count = temporal.pop(0) if kind == "v" else 1
        channels = 6 if kind == "v" else 3
        own = [rng.normal(size=(height, width, channels)).astype(np.float16).astype(np.float32) for _ in range(count)]
        media += own
        if kind == "i":
            images.append(own[0])
        else:
            videos += [_cut(patch) for patch in own]
            grids.append([count, height // PATCH, width // PATCH])
    if images:
        given["pixel_values"], given["image_grid_thw"] = patches_of(images)
    if videos:
        given["pixel_values_videos"] = torch.from_numpy(np.concatenate(videos))
        given["video_grid_thw"] = torch.tensor(grids)
        if name == "qwen2_5_vl":
            given["second_per_grid_ts"] = torch.full((len(grids),), SECONDS)
    return given, media


def published_positions(given: dict[str, Any], interval: float) -> tuple[torch.Tensor, list[list[int]]]:
    """Positions [3, 1, N] by the rule of the models' training, and the times of each image and video in order.

    interval: positions of a second; 0 for one a temporal patch.
    """
    kinds, found, times = given["mm_token_type_ids"][0].tolist(), list[list[int]](), list[list[int]]()
    grids = {1: list(given.get("image_grid_thw", ())), 2: list(given.get("video_grid_thw", ()))}
    seconds, at = given.get("second_per_grid_ts", torch.zeros(0)).clone(), 0
    while at < len(kinds):
        start = max((max(position) for position in found), default=-1) + 1
        if not kinds[at]:
            found.append([start] * 3)
            at += 1
            continue
        count, rows, columns = grids[kinds[at]].pop(0).tolist()
        numbers = torch.arange(count)
        if kinds[at] == 2 and interval:
            numbers, seconds = (numbers * (interval * seconds[0])).long(), seconds[1:]
        times.append(numbers.tolist() if kinds[at] == 2 else [])
        rows, columns = rows // MERGE, columns // MERGE
        found += [
            [start + time, start + row, start + column]
            for time in numbers.tolist()
            for row in range(rows)
            for column in range(columns)
        ]
        at += count * rows * columns
    return torch.tensor(found).T[:, None], times


def _cut(patch: np.ndarray) -> np.ndarray:
    """Patches of a temporal patch [h, w, 6] in the order of the processor: channel, frame, row, column."""
    height, width, _ = patch.shape
    rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
    cut = patch.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 2, 3).transpose(0, 3, 1, 4, 7, 6, 2, 5)
    return np.ascontiguousarray(cut.reshape(rows * columns * MERGE**2, -1))


def model_values(name: str, seed: int) -> dict[str, Any]:
    """What a model makes of the sequences, and its gradients."""
    made = transformers.AutoModelForImageTextToText.from_pretrained(FOLDERS / "qwen" / name).eval()
    values: dict[str, Any] = {}
    losses, counts = [], []
    for number, kinds in enumerate(SEQUENCES):
        given, media = inputs(name, kinds, seed + number)
        asked = dict(given)
        if name in POSITIONS:
            interval = getattr(made.config.vision_config, "tokens_per_second", 0)
            asked["position_ids"], times = published_positions(given, interval)
            values |= {f"times_{number}_{at}": np.asarray(own, np.int32) for at, own in enumerate(times)}
        output = made(**asked, output_hidden_states=True)
        tokens, logits = given["input_ids"][0], output.logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        counted = (tokens[1:] != IMAGE) & (tokens[1:] != VIDEO)
        losses.append((loss * counted).sum())
        counts.append(int(counted.sum()))
        more = {key: given[key] for key in ("second_per_grid_ts",) if key in given}
        positions, _ = made.model.get_rope_index(
            given["input_ids"],
            given["mm_token_type_ids"],
            given.get("image_grid_thw"),
            given.get("video_grid_thw"),
            **more,
        )
        if name in POSITIONS:
            equal = torch.equal(asked["position_ids"], positions)
            assert equal == (name == "qwen2_vl" or "v" not in kinds), (name, kinds)
            positions = asked["position_ids"]
        values |= {f"media_{number}_{at}": medium for at, medium in enumerate(media)}
        values |= {
            f"tokens_{number}": tokens.numpy(),
            f"positions_{number}": positions[:, 0].T.numpy(),
            f"logprobs_{number}": -loss.detach().numpy(),
            f"hidden_{number}": output.hidden_states[-1][0].detach().numpy(),
            f"logits_{number}": logits.detach().numpy(),
        }
    mean = torch.stack(losses).sum() / sum(counts)
    mean.backward()
    values["loss"] = mean.detach().numpy()
    gradients = {
        key: np.zeros(own.shape, np.float32) if own.grad is None else own.grad.numpy()
        for key, own in made.named_parameters()
    }
    values |= {f"gradient/{key}": own for key, own in gradients.items()}
    given, media = inputs(name, PROMPT, seed + 50)
    if name == "qwen2_5_vl":  # no time larger than rows and columns, so that both rules are the same
        given["second_per_grid_ts"] = torch.full_like(given["second_per_grid_ts"], PROMPT_SECONDS)
    if name in POSITIONS:
        of_video = published_positions(given, getattr(made.config.vision_config, "tokens_per_second", 0))
        theirs, _ = made.model.get_rope_index(**{key: given[key] for key in given if not key.startswith("pixel")})
        assert torch.equal(of_video[0], theirs), name
        values |= {f"prompt_times_{at}": np.asarray(own, np.int32) for at, own in enumerate(of_video[1])}
    plain = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, return_dict_in_generate=True)
    out = made.generate(**given, **plain, output_logits=True, eos_token_id=None)
    said = out.sequences[0, given["input_ids"].shape[1] :].numpy()
    top = torch.stack([own[0].topk(2).values for own in out.logits])
    values |= {f"prompt_media_{at}": medium for at, medium in enumerate(media)}
    values |= {"prompt": given["input_ids"][0].numpy(), "generated": said}
    values["lead"] = (top[:, 0] - top[:, 1]).min().numpy()
    return values


def answers(name: str) -> dict[str, Any]:
    """What a whole model of ``generated/`` says to messages with videos, greedily."""
    if name in POSITIONS:
        return positions_answers(name)
    own = transformers.AutoTokenizer.from_pretrained(HERE / "folder")
    small = {"patch_size": PATCH, "size": {"shortest_edge": 256, "longest_edge": 4 * 24 * 24}}
    processor = Qwen3VLVideoProcessor(**small, cap_pixels_per_frame=False)
    processor.save_pretrained(HERE / "answers")
    images = Qwen2VLImageProcessorPil(**{**rules("qwen3_vl"), **SMALL})
    template = (HERE / "folder" / "chat_template.jinja").read_text()
    made = transformers.Qwen3VLProcessor(images, own, processor, chat_template=template)
    return _answers(name, made, {})


def positions_answers(name: str) -> dict[str, Any]:
    """As `answers`; rules for videos are left to the file for images, as in the published folders."""
    own = transformers.AutoTokenizer.from_pretrained(FOLDERS / "processors" / "qwen2_vl")
    folder = FOLDERS / "generated" / name
    written = json.loads((FOLDERS / "processors" / "qwen2_vl" / "chat_template.json").read_text())["chat_template"]
    moving = "{%- elif part.type == 'video' %}\n{{ '<|vision_start|><|video_pad|><|vision_end|>' }}\n"
    template = written.replace("{%- elif 'text' in part %}", moving + "{%- elif 'text' in part %}")
    (HERE / "positions").mkdir(exist_ok=True)
    (HERE / "positions" / "chat_template.json").write_text(json.dumps({"chat_template": template}) + "\n")
    videos = Qwen2VLVideoProcessor.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    kind = transformers.Qwen2VLProcessor if name == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
    made = kind(images, own, videos, chat_template=template)
    return _answers(name, made, {"videos_kwargs": {"fps": 2, "do_sample_frames": True}})


def _answers(name: str, made: Any, settings: dict[str, Any]) -> dict[str, Any]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(FOLDERS / "generated" / name).eval()
    values: dict[str, Any] = {}
    for number, asked in enumerate(MESSAGES):
        parts = [part for message in asked for part in message["content"]]
        names = [Path(part["video"]).stem for part in parts if part["type"] == "video"]
        pictures = [
            load_image(str(FOLDERS / "processors" / part["image"])) for part in parts if part["type"] == "image"
        ]
        given = made(
            text=[made.apply_chat_template(asked, add_generation_prompt=True)],
            images=[pictures] if pictures else None,
            videos=[torch.from_numpy(named_video(name).transpose(0, 3, 1, 2).copy()) for name in names],
            video_metadata=[{"fps": VIDEOS[name][3], "total_num_frames": VIDEOS[name][0]} for name in names],
            return_tensors="pt",
            **settings,
        )
        with torch.no_grad():
            out = model.generate(
                **given, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True
            )
        said, logits = out.sequences[0, given["input_ids"].shape[1] :], torch.stack(out.logits)[:, 0]
        best = logits.topk(2).values
        print(name, given["input_ids"].shape, "closest", float((best[:, 0] - best[:, 1]).min()), said.tolist())
        values |= {f"prompt_{number}": given["input_ids"][0].numpy(), f"tokens_{number}": said.numpy()}
        values[f"logprobs_{number}"] = logits.log_softmax(-1).gather(1, said[:, None])[:, 0].numpy()
    return values


def main() -> None:
    torch.set_num_threads(1)
    HERE.mkdir(exist_ok=True)
    versions = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    names = [name for name in sys.argv[1:] if name in MODELS]
    if not sys.argv[1:]:
        np.savez_compressed(HERE / "values.npz", versions=versions, **by_timestamps())
        np.savez_compressed(HERE / "positions.npz", versions=versions, **by_position())
        (HERE / "dialogues.json").write_text(json.dumps(dialogues(), ensure_ascii=False) + "\n")
    (HERE / "messages.jsonl").write_text("".join(json.dumps(asked) + "\n" for asked in MESSAGES))
    np.savez_compressed(
        HERE / "answers.npz", **{f"{name}/{key}": own for name in ANSWERING for key, own in answers(name).items()}
    )
    for name, seed in ((name, MODELS[name]) for name in names or MODELS):
        values = model_values(name, seed)
        print(name, float(values["loss"]), float(values["lead"]), values["generated"].tolist())
        np.savez_compressed(HERE / f"{name}.npz", versions=versions, **values)


if __name__ == "__main__":
    main()
