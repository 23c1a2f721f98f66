"""Whisper's encoder as transformers has it: its settings, and its tensors as our leaves.

Alone or in a folder of the whole model, whose decoder has no leaf here. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import ConfigError, one_of, require
from mmjax.models.whisper.config import WhisperConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

MODEL_TYPE = "whisper"
_PREFIXES = ("model.encoder.", "encoder.", "")
"""What keys begin with in a folder of a model with a language head, of the model without, and of the encoder alone."""
# What a config.json may leave out, with the value that transformers then takes.
_SIZES = dict(encoder_layers=4, d_model=384, encoder_attention_heads=6, encoder_ffn_dim=1536)
_SIZES |= dict(num_mel_bins=80, max_source_positions=1500)
_FRAMES = dict(sampling_rate=16000, n_fft=400, hop_length=160, dither=0.0)
_RATE = 16000
"""The only rate at which the filters of ``WhisperFeatureExtractor``, up to 8 kHz, are those of ``LogMel``."""
_STRIDE, _TAPS = 2, 3
_FIELDS = {
    "layers": "encoder_layers",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "mlp": "encoder_ffn_dim",
    "mels": "num_mel_bins",
    "length": "max_source_positions",
}


def settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``WhisperConfig`` that a config.json says.

    Args:
      theirs: the configuration; "extractor" is that of the feature extractor, if the folder has one.

    Raises:
      ConfigError: it is no Whisper, or has something that ours has not.
    """
    one_of("config.json: model_type", str(theirs.get("model_type", "")), (MODEL_TYPE,))
    c = _with_defaults(_SIZES | {"activation_function": "gelu"}, theirs)
    one_of("config.json: activation_function", c["activation_function"], ("gelu",))
    found = {ours: c[key] for ours, key in _FIELDS.items()}
    return found | _frames(theirs.get("extractor", {}), found["length"], found["mels"]) | _constant()


def _constant() -> dict[str, Any]:
    """What every Whisper has."""
    own = dict(positions="learned", pad=True, edges="reflected", activation="gelu_exact", norm_eps=1e-5, k_bias=False)
    return own | dict(sample_rate=_RATE)


def _frames(extractor: Mapping[str, Any], length: int, mels: int) -> dict[str, Any]:
    """The settings that a feature extractor decides."""
    where = "preprocessor_config.json: "
    e = _with_defaults(_FRAMES | {"feature_size": mels}, extractor)
    for key, legal in (("sampling_rate", _RATE), ("dither", 0.0), ("feature_size", mels)):
        require(e[key] == legal, f"{where}{key}", e[key], f"mmjax has {legal} alone")
    seconds = length * _STRIDE * e["hop_length"] / e["sampling_rate"]
    own = e.get("chunk_length", seconds)
    require(own == seconds, f"{where}chunk_length", own, f"the encoder has positions for {seconds:g} seconds")
    return dict(window=e["n_fft"], hop=e["hop_length"])


def _with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **{key: value for key, value in given.items() if value is not None}}


def their_config(config: WhisperConfig) -> dict[str, Any]:
    """A config.json for a folder of the encoder.

    Raises:
      ConfigError: no Whisper computes the same.
    """
    theirs = {"model_type": MODEL_TYPE, "architectures": ["WhisperModel"]}
    theirs |= {key: getattr(config, ours) for ours, key in _FIELDS.items()}
    frames = {"n_fft": config.window, "hop_length": config.hop}
    same = settings({**theirs, "extractor": frames})
    if any(getattr(config, name) != value for name, value in same.items() if name != "pad"):
        raise ConfigError("Whisper: OpenAI's models have other settings; export with --format=orbax")
    return theirs


def rows(config: WhisperConfig, model_type: str) -> tuple[Row, ...]:
    """The encoder's leaves and tensors; every folder has them under the same names, behind some prefix."""
    del model_type
    return tuple(Row(leaf, tuple(prefix + key for prefix in _PREFIXES), view) for leaf, key, view in _named(config))


def unused(config: WhisperConfig) -> tuple[str, ...]:
    """Regular expressions of the ends of keys that need no leaf: what writes or classifies."""
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
    for ours, theirs in _PRODUCTS.items():
        yield f"layers/{{}}/{ours}", f"layers.{{}}.{theirs}.weight", TRANSPOSED
        if ours != "attn/k":
            yield f"layers/{{}}/{ours}_bias", f"layers.{{}}.{theirs}.bias", SAME
    for ours, theirs in _NORMS.items():
        yield f"{ours}/scale", f"{theirs}.weight", SAME
        yield f"{ours}/bias", f"{theirs}.bias", SAME
