"""A folder's rules for images as settings of a `Source`. The rules are those of transformers' processors for Pillow.

A rule without a setting is an error: pixels that are nearly right train a model that is nearly right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import read_json
from mmjax.data.sources.config import RESAMPLES, SourceConfig

_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_CLIP = {f"image_{name}": SourceConfig.presets["clip"][name] for name in ("mean", "std")}
_BICUBIC, _BILINEAR = RESAMPLES.index("bicubic"), RESAMPLES.index("bilinear")
_CROPPED = {
    **_CLIP,
    "resample": _BICUBIC,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_convert_rgb": True,
}
_DINOV3 = "DINOv3ViTImageProcessor"
"""It resizes levels between 0 and 1, which are not rounded."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CROPPED,
    "BitImageProcessor": _CROPPED,
    "LlavaImageProcessor": {**_CROPPED, "do_pad": False},
    "SiglipImageProcessor": {
        **_HALF,
        "resample": _BICUBIC,
        "size": {"height": 224, "width": 224},
        "do_convert_rgb": True,
    },
    "ViTImageProcessor": {**_HALF, "resample": _BILINEAR, "size": {"height": 224, "width": 224}},
    "Siglip2ImageProcessor": {**_HALF, "resample": _BILINEAR, "max_num_patches": 256},
    "Qwen2VLImageProcessor": {
        **_CLIP,
        "resample": _BICUBIC,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "do_convert_rgb": True,
    },
    _DINOV3: {
        **{"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)},
        **{"resample": _BILINEAR, "size": {"height": 224, "width": 224}},
    },
    "Gemma3ImageProcessor": {
        **_HALF,
        "resample": _BILINEAR,
        "size": {"height": 224, "width": 224},
        "do_convert_rgb": True,
    },
    "LlavaNextImageProcessor": _CROPPED,
    "Gemma4ImageProcessor": {
        "image_mean": (0.0, 0.0, 0.0),
        "image_std": (1.0, 1.0, 1.0),
        "resample": _BICUBIC,
        "do_normalize": False,
        "do_convert_rgb": True,
        "max_soft_tokens": 280,
        "pooling_kernel_size": 3,
    },
    "LlavaOnevisionImageProcessor": {
        **_CLIP,
        "resample": _BICUBIC,
        "size": {"height": 384, "width": 384},
        "do_convert_rgb": True,
    },
}
"""The values of missing keys, by processor."""
_FIXED = (("do_resize", True), ("do_rescale", True), ("rescale_factor", 1 / 255), ("do_pan_and_scan", False))
"""Rules with one value."""
_PINPOINTS = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
"""LLaVA-OneVision's grids if the file has none."""
_NEXT_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""LLaVA-NeXT's, of tiles of 336 pixels."""
FREE = ("max_pixels", "min_pixels", "max_patches", "draft")
"""Settings that may differ from the folder's: they bound the cost of an image."""


def image_settings(folder: str) -> dict[str, Any]:
    """Fields of `SourceConfig` that a folder decides, by name, such as "resize"; {} if it has no rules for images.

    {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resample": "bicubic", "draft": False, "white": True, "rounded":
    True, "resize": "fixed", "fit": "stretch", "size": (224, 224)}. After "rounded" come "resize" and the fields that
    this rule reads, with "smart" for example "min_pixels", "max_pixels" and "max_patches".

    folder: the path of a checkpoint's folder, in the layout of Hugging Face; preprocessor_config.json is read, or the
    image processor in processor_config.json.

    Raises:
      ConfigError: mmjax has no such rule; the message does not name the folder.
    """
    processor = read_json(folder, "preprocessor_config.json")
    if "image_mean" not in processor and "image_processor_type" not in processor:
        nested = read_json(folder, "processor_config.json").get("image_processor")
        processor = nested if isinstance(nested, Mapping) else processor
    if not processor:
        return {}
    kind = str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "")
    name = kind.removesuffix("Pil").removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if name not in _DEFAULTS:
        raise ConfigError(f"image_processor_type={kind!r} is none of {', '.join(_DEFAULTS)}; set Source.resize")
    rules = {**_DEFAULTS[name], **{key: value for key, value in processor.items() if value is not None}}
    try:
        return _settings(name, rules)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"its image processor has values that no processor writes ({cause}); get it again") from None


def _settings(name: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    _check(rules)
    normalised = rules.get("do_normalize", True)
    values: dict[str, Any] = {
        name: tuple(map(float, rules[f"image_{name}"])) if normalised else () for name in ("mean", "std")
    }
    if name == "Gemma4ImageProcessor":
        values = _centred(values)
    white = bool(rules.get("do_convert_rgb"))
    values |= {"resample": RESAMPLES[int(rules["resample"])], "draft": False, "white": white}
    values["rounded"] = name != _DINOV3
    return values | _sizes(name, rules)


def _centred(values: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """The mean and deviation of pixels that the model itself doubles and moves from 0 to 1 to -1 to 1."""
    means, deviations = values["mean"] or (0.0,) * 3, values["std"] or (1.0,) * 3
    halves = tuple(deviation / 2 for deviation in deviations)
    return {"mean": tuple(map(sum, zip(means, halves, strict=True))), "std": halves}


def _check(rules: Mapping[str, Any]) -> None:
    for key, wanted in _FIXED:
        value = rules.get(key, wanted)
        if abs(value - wanted) > 1e-9:
            raise ConfigError(f"its image processor has {key}={value!r}, not {wanted!r}; set Source.resize")


def _sizes(name: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    size = rules.get("size")
    if isinstance(size, int):
        size = {"height": size, "width": size} if "height" in _DEFAULTS[name]["size"] else {"shortest_edge": size}
    size = dict(size or {})
    if name == "Qwen2VLImageProcessor":
        low, high = rules.get("min_pixels") or size["shortest_edge"], rules.get("max_pixels") or size["longest_edge"]
        return {"resize": "smart", "min_pixels": int(low), "max_pixels": int(high), "max_patches": 0}
    if name == "Gemma4ImageProcessor":
        patches = int(rules["max_soft_tokens"]) * int(rules["pooling_kernel_size"]) ** 2
        return {"resize": "largest", "max_patches": patches}
    if name == "Siglip2ImageProcessor":
        return {"resize": "naflex", "max_patches": int(rules["max_num_patches"])}
    edge, fixed = size.get("shortest_edge"), (size.get("height"), size.get("width"))
    if name == "LlavaOnevisionImageProcessor":
        return _tiled((edge, edge) if edge else fixed, rules, _PINPOINTS, alone=True)
    if name == "LlavaNextImageProcessor":
        return _tiled(_uncut_tile(size, rules), rules, _NEXT_GRIDS, alone=False)
    if not rules.get("do_center_crop"):
        if edge:
            raise ConfigError(f"its image processor has size={size!r} and crops nothing; set Source.resize")
        return {"resize": "fixed", "fit": "stretch", "size": fixed}
    crop = rules["crop_size"]
    crop = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
    if not edge:
        if fixed != crop:
            raise ConfigError(f"its image processor has size={size!r} and crop_size={crop!r}; set Source.resize")
        return {"resize": "fixed", "fit": "stretch", "size": crop}
    fit = "square" if rules.get("do_pad") and name == "LlavaImageProcessor" else "crop"
    return {"resize": "fixed", "fit": fit, "size": crop, "edge": int(edge)}


def _uncut_tile(size: Mapping[str, Any], rules: Mapping[str, Any]) -> tuple[int, int]:
    """The size of LLaVA-NeXT's tiles, from which its cut of the middle takes nothing."""
    crop = rules["crop_size"]
    edge, sides = size.get("shortest_edge"), (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
    whole = ((edge, edge) if edge else (size.get("height"), size.get("width"))) == sides and sides[0] == sides[1]
    if not whole or not rules.get("do_center_crop"):
        raise ConfigError(
            f"its image processor has size={size!r} and crop_size={crop!r}, no equal squares; set Source.resize"
        )
    return sides


def _tiled(
    size: tuple[Any, ...], rules: Mapping[str, Any], usual: tuple[tuple[int, int], ...], *, alone: bool
) -> dict[str, Any]:
    """The settings of tiles: their ``size``, and the grids of the file or the ``usual`` ones.

    alone: whether only an image that is its dialogue's only one has tiles.
    """
    height, width = size
    pinpoints = rules.get("image_grid_pinpoints")
    if pinpoints and any(point[0] % height or point[1] % width for point in pinpoints):
        raise ConfigError(
            f"image_grid_pinpoints={pinpoints[:3]!r}… are no multiples of size={size!r}; set Source.resize"
        )
    grids = tuple((point[0] // height, point[1] // width) for point in pinpoints) if pinpoints else usual
    return {"resize": "anyres", "size": (height, width), "grids": grids, "alone": alone}
