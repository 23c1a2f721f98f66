"""A folder's rules for videos as settings of a `Source`: those of transformers' ``Qwen3VLVideoProcessor``.

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
}
"""The values of missing keys, by processor."""
_WANTED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_sample_frames": True}
FREE = ("fps", "frames", "min_frames", "max_frames", "video_pixels", "frame_pixels")
"""Settings that may differ from the folder's: they bound the cost of a video."""


def video_settings(folder: str, image: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SourceConfig` that a folder decides about videos, by name; {} if mmjax has no such rule.

    {"video": "timestamps", "fps": 2.0, "frames": 0, "min_frames": 4, "max_frames": 768, "video_pixels": (131072,
    786432), "frame_pixels": 0}.

    Args:
      folder: the path of a checkpoint's folder, in the layout of Hugging Face; video_preprocessor_config.json is read,
        or the video processor in processor_config.json.
      image: what the folder decides about images, as `image_settings` gives it: "mean", "std" and "resample" are the
        same for videos.

    Raises:
      ConfigError: a rule of the processor has no setting, or differs from that for images.
    """
    rules = read_json(folder, "video_preprocessor_config.json")
    if not rules:
        nested = read_json(folder, "processor_config.json").get("video_processor")
        rules = nested if isinstance(nested, Mapping) else {}
    name = str(rules.get("video_processor_type") or "")
    if name not in _DEFAULTS:
        return {}
    rules = {**_DEFAULTS[name], **{key: value for key, value in rules.items() if value is not None}}
    for key, wanted in _WANTED.items():
        if rules.get(key, wanted) is not wanted:
            raise ConfigError(
                f"its video processor has {key}={rules[key]!r}, not {wanted!r}; set Source.video, '' for no videos"
            )
    try:
        _require_alike(rules, image)
        return {"video": "timestamps", **_settings(rules)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"its video processor has values that no processor writes ({cause}); get it again") from None


def _require_alike(rules: Mapping[str, Any], image: Mapping[str, Any]) -> None:
    """Raises ConfigError unless frames are normalised as images are, which one setting says for both."""
    wanted: dict[str, object] = {key: tuple(map(float, rules[f"image_{key}"])) for key in ("mean", "std")}
    wanted["resample"] = RESAMPLES[int(rules["resample"])]
    for field, value in wanted.items():
        if image.get(field) != value:
            fix = f"images have {image.get(field)!r}; write one for both, or set Source.video, '' for no videos"
            raise ConfigError(f"its video processor has {field} {value!r}, and its {fix}")


def _settings(rules: Mapping[str, Any]) -> dict[str, Any]:
    size = rules["size"]
    block = int(rules["patch_size"]) * int(rules["merge_size"])
    return {
        "fps": float(rules["fps"]),
        "frames": int(rules["num_frames"] or 0),
        "min_frames": int(rules["min_frames"]),
        "max_frames": int(rules["max_frames"]),
        "video_pixels": (int(size["shortest_edge"]), int(size["longest_edge"])),
        "frame_pixels": int(rules["max_video_tokens"]) * block**2 if rules.get("cap_pixels_per_frame") else 0,
    }
