"""A folder's rules for videos as settings of a `Source`: those of transformers' processors of Qwen's models.

Videos of other processors are refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import read_json
from mmjax.data.sources.config import RESAMPLES

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3VLVideoProcessor": {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "resample": 3,
        "fps": 2,
        "num_frames": None,
        "min_frames": 4,
        "max_frames": 768,
        "patch_size": 16,
        "merge_size": 2,
        "max_video_tokens": 768,
    },
    "Qwen2VLVideoProcessor": {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "resample": 3,
        "fps": 2,
        "num_frames": None,
        "min_frames": 4,
        "max_frames": 768,
    },
}
"""The values of missing keys, by processor. ``Qwen2VLVideoProcessor`` takes all frames; ``fps`` is qwen-vl-utils'."""
_TIMES = {"Qwen3VLVideoProcessor": "timestamps", "Qwen2VLVideoProcessor": "positions"}
_BY_MODEL: Mapping[str, str] = dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "Qwen2VLVideoProcessor")
"""The processor of models whose published folders have no file for videos, where they have that for images."""
_POSITIONS = {"qwen2_vl": 0.0, "qwen2_5_vl": 4.0}
"""Positions of a second, where the file of the model has none; 0 is one for each temporal patch."""
_WANTED = {"do_resize": True, "do_rescale": True, "do_normalize": True}
FREE = ("fps", "frames", "min_frames", "max_frames", "video_pixels", "frame_pixels")
"""Settings that may differ from the folder's: they bound the cost of a video."""


def video_settings(folder: str, image: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SourceConfig` that a folder decides about videos, by name; {} if mmjax has no such rule.

    {"video": "timestamps", "fps": 2.0, "frames": 0, "min_frames": 4, "max_frames": 768, "video_pixels": (131072,
    786432), "frame_pixels": 0}; where times are positions "time_positions" in place of "frame_pixels".

    Args:
      folder: the path of a checkpoint's folder, in the layout of Hugging Face; video_preprocessor_config.json is read,
        or the video processor in processor_config.json.
      image: what the folder decides about images, as `image_settings` gives it: "mean", "std" and "resample" are the
        same for videos.

    Raises:
      ConfigError: a rule of the processor has no setting, or differs from that for images.
    """
    model = read_json(folder, "config.json")
    rules = _rules_of(folder, str(model.get("model_type") or ""))
    name = str(rules.get("video_processor_type") or "")
    if name not in _DEFAULTS:
        return {}
    rules = {**_DEFAULTS[name], **{key: value for key, value in rules.items() if value is not None}}
    video = _TIMES[name]
    for key, wanted in (*_WANTED.items(), *((("do_sample_frames", True),) if video == "timestamps" else ())):
        if rules.get(key, wanted) is not wanted:
            raise ConfigError(
                f"its video processor has {key}={rules[key]!r}, not {wanted!r}; set Source.video, '' for no videos"
            )
    try:
        _require_alike(rules, image)
        of_times = _timestamps(rules) if video == "timestamps" else _positions(rules, model)
        return {"video": video, **_settings(rules), **of_times}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"its video processor has values that no processor writes ({cause}); get it again") from None


def _rules_of(folder: str, model_type: str) -> dict[str, Any]:
    """The values for videos in a folder's files, {} without any.

    Qwen2-VL and Qwen2.5-VL were published with a file for images alone, whose values `transformers` takes for both.
    """
    rules = read_json(folder, "video_preprocessor_config.json")
    if rules:
        return dict(rules)
    nested = read_json(folder, "processor_config.json").get("video_processor")
    if isinstance(nested, Mapping):
        return dict(nested)
    images = read_json(folder, "preprocessor_config.json") if model_type in _BY_MODEL else {}
    if not images:
        return {}
    return {**images, "video_processor_type": _BY_MODEL[model_type]}


def _require_alike(rules: Mapping[str, Any], image: Mapping[str, Any]) -> None:
    """Raises ConfigError unless frames are normalised as images are, which one setting says for both."""
    wanted: dict[str, object] = {key: tuple(map(float, rules[f"image_{key}"])) for key in ("mean", "std")}
    wanted["resample"] = RESAMPLES[int(rules["resample"])]
    for field, value in wanted.items():
        if image.get(field) != value:
            fix = f"images have {image.get(field)!r}; write one for both, or set Source.video, '' for no videos"
            raise ConfigError(f"its video processor has {field} {value!r}, and its {fix}")


def _settings(rules: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "fps": float(rules["fps"]),
        "frames": int(rules["num_frames"] or 0),
        "min_frames": int(rules["min_frames"]),
        "max_frames": int(rules["max_frames"]),
    }


def _timestamps(rules: Mapping[str, Any]) -> dict[str, Any]:
    size = rules["size"]
    block = int(rules["patch_size"]) * int(rules["merge_size"])
    is_capped = bool(rules.get("cap_pixels_per_frame"))
    return {
        "video_pixels": (int(size["shortest_edge"]), int(size["longest_edge"])),
        "frame_pixels": int(rules["max_video_tokens"]) * block**2 if is_capped else 0,
    }


def _positions(rules: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    if rules.get("cap_pixels_per_frame"):
        fix = "it bounds all frames together; write false and bound each, or set Source.video, '' for no videos"
        raise ConfigError(f"its video processor has cap_pixels_per_frame={rules['cap_pixels_per_frame']!r}: {fix}")
    size, default = rules["size"], _POSITIONS.get(str(model.get("model_type")), 0.0)
    least, most = rules.get("min_pixels") or size["shortest_edge"], rules.get("max_pixels") or size["longest_edge"]
    return {
        "video_pixels": (int(least), int(most)),
        "time_positions": float((model.get("vision_config") or {}).get("tokens_per_second", default)),
    }
