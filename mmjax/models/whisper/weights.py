"""Whisper's encoder in folders of transformers: settings and weights table.

The folder is of the encoder alone or of the complete model, whose decoder has no leaves in mmjax. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import ConfigError, one_of, require
from mmjax.models.whisper.config import WhisperConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

MODEL_TYPE = "whisper"
_PREFIXES = ("model.encoder.", "encoder.", "")
"""Key prefixes in folders of a model with a language head, of the model without, and of the encoder alone."""
# Defaults of transformers for keys that a config.json may leave out.
_SIZES = {"encoder_layers": 4, "d_model": 384, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
_SIZES |= {"num_mel_bins": 80, "max_source_positions": 1500}
_FRAMES = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "dither": 0.0}
_RATE = 16000
"""The only sampling rate for which the filters of ``WhisperFeatureExtractor`` (up to 8 kHz) are those of ``LogMel``."""
_STRIDE, _TAPS = 2, 3
_FIELDS = {
    "layers": "encoder_layers",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "mlp": "encoder_ffn_dim",
    "mels": "num_mel_bins",
    "length": "max_source_positions",
}


_CONSTANT = {
    "positions": "learned",
    "pad": True,
    "edges": "reflected",
    "activation": "gelu_exact",
    "norm_eps": 1e-5,
    "k_bias": False,
    "sample_rate": _RATE,
}
"""The settings that are the same for every Whisper model."""


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``WhisperConfig``, by name, from a config.json: {"layers": 4, "width": 384, …}.

    Args:
      hf_config: the configuration; its "extractor" is the configuration of the feature extractor, if the folder has
        one.

    Raises:
      ConfigError: it is no Whisper model, or mmjax cannot compute it.
    """
    one_of("config.json: model_type", str(hf_config.get("model_type", "")), (MODEL_TYPE,))
    c = _with_defaults(_SIZES | {"activation_function": "gelu"}, hf_config)
    one_of("config.json: activation_function", c["activation_function"], ("gelu",))
    values = {name: c[key] for name, key in _FIELDS.items()}
    return values | _frames(hf_config.get("extractor", {}), values["length"], values["mels"]) | _CONSTANT


def _frames(extractor: Mapping[str, Any], length: int, mels: int) -> dict[str, Any]:
    """The settings that the feature extractor determines."""
    where = "preprocessor_config.json: "
    e = _with_defaults(_FRAMES | {"feature_size": mels}, extractor)
    for key, legal in (("sampling_rate", _RATE), ("dither", 0.0), ("feature_size", mels)):
        require(e[key] == legal, f"{where}{key}", e[key], f"mmjax has {legal} alone")
    seconds = length * _STRIDE * e["hop_length"] / e["sampling_rate"]
    chunk_length = e.get("chunk_length", seconds)
    require(
        chunk_length == seconds,
        f"{where}chunk_length",
        chunk_length,
        f"the encoder has positions for {seconds:g} seconds",
    )
    return {"window": e["n_fft"], "hop": e["hop_length"]}


def _with_defaults(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}


def to_hf_config(config: WhisperConfig, *, model_type: str = MODEL_TYPE) -> dict[str, Any]:
    """The config.json, as a dict, of a folder of the encoder, whose only `model_type` is "whisper".

    Raises:
      ConfigError: no Whisper model computes the same.
    """
    hf_config = {"model_type": model_type, "architectures": ["WhisperModel"]}
    hf_config |= {key: getattr(config, name) for name, key in _FIELDS.items()}
    frames = {"n_fft": config.window, "hop_length": config.hop}
    restored = settings({**hf_config, "extractor": frames})
    if any(getattr(config, name) != value for name, value in restored.items() if name != "pad"):
        raise ConfigError("Whisper: OpenAI's models have other settings; export with --format=orbax")
    return hf_config


def rows(config: WhisperConfig, model_type: str) -> tuple[Row, ...]:
    """The encoder's weights table. ``model_type`` is not read.

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", the possible ``keys`` of its tensor, with the prefixes
    "model.encoder.", "encoder." and "", and its ``view`` of the tensor, such as the transpose.
    """
    del model_type
    return tuple(Row(leaf, tuple(prefix + key for prefix in _PREFIXES), view) for leaf, key, view in _named(config))


def unused(config: WhisperConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that need no leaf: decoders and classification heads."""
    del config
    return (r"decoder\..*", r"proj_out\..*", r"projector\..*", r"classifier\..*", "layer_weights")


_PRODUCTS = {
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.out_proj",
    "mlp/up": "fc1",
    "mlp/down": "fc2",
}
_NORMS = {
    "layers/{}/attn_norm": "layers.{}.self_attn_layer_norm",
    "layers/{}/mlp_norm": "layers.{}.final_layer_norm",
    "norm": "layer_norm",
}


def _named(c: WhisperConfig) -> Iterator[tuple[str, str, View]]:
    for name, channels in (("conv1", c.mels), ("conv2", c.width)):
        yield f"{name}/kernel", f"{name}.weight", View((2, 1, 0), (c.width, channels, _TAPS))
        yield f"{name}/bias", f"{name}.bias", SAME
    yield "position", "embed_positions.weight", SAME
    for name, hf_name in _PRODUCTS.items():
        yield f"layers/{{}}/{name}", f"layers.{{}}.{hf_name}.weight", TRANSPOSED
        if name != "attn/k":
            yield f"layers/{{}}/{name}_bias", f"layers.{{}}.{hf_name}.bias", SAME
    for name, hf_name in _NORMS.items():
        yield f"{name}/scale", f"{hf_name}.weight", SAME
        yield f"{name}/bias", f"{hf_name}.bias", SAME
