"""Makes a small Whisper of random weights with ``transformers``, and what it hears, for the tests of ours.

``python tests/oracles/make_whisper.py`` writes a folder as ``save_pretrained`` does, feature extractor included, with
``oracles.npz`` in it: recordings, their log-mel features and the encoder's hidden states, and the versions that made
them. It needs torch and transformers, which mmjax does not.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

HERE = Path(__file__).parent / "whisper"
RATE, SECONDS, MELS = 16000, 1, 20
SAMPLES = {"whole": 16000, "short": 6513, "brief": 300, "long": 17100}
"""Samples of each recording; the encoder hears 16000."""
STEP = 9
"""Of features with more bins than the model's, every ninth frame is kept."""


def randomise(model: torch.nn.Module) -> None:
    """Gives every parameter random values, so that none is 0 or 1 and each one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = "norm" in name and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            width = parameter[0].numel() ** -0.5 if parameter.dim() > 1 and "embed" not in name else 0.3
            parameter.copy_(noise * width + float(scale))


def recordings() -> dict[str, np.ndarray]:
    """Gliding tones with noise, loud and soft, int8 so that files stay small."""
    rng, found = np.random.default_rng(0), {}
    for number, (name, samples) in enumerate(SAMPLES.items()):
        t = np.arange(samples) / RATE
        tones = np.sin(2 * np.pi * (200 + 900 * number + 2500 * t) * t) + 0.5 * np.sin(2 * np.pi * 3000 * t)
        loudness = 0.05 + np.abs(np.sin(2 * np.pi * 1.7 * t + number))
        found[name] = np.round(50 * loudness * tones + rng.normal(size=samples)).clip(-127, 127).astype(np.int8)
    return found


def features(extractor: WhisperFeatureExtractor, samples_N: np.ndarray) -> np.ndarray:
    """Log-mel frames ``[F, M]`` by the extractor's NumPy part, cut and padded as the extractor does."""
    whole = np.zeros(SECONDS * RATE, np.float32)
    kept = samples_N[: len(whole)].astype(np.float32) / 128
    whole[: len(kept)] = kept
    by_numpy = extractor._np_extract_fbank_features(whole[None], "cpu")[0].T
    by_torch = extractor(samples_N.astype(np.float32) / 128, sampling_rate=RATE)["input_features"][0].T
    assert np.abs(by_numpy - by_torch).max() < 1e-4
    return by_numpy.astype(np.float32)


def main() -> None:
    """Writes the folder."""
    sizes = dict(d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=MELS)
    sizes |= dict(decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, max_target_positions=8)
    tokens = dict(vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    positions = dict(max_source_positions=50 * SECONDS, suppress_tokens=None, begin_suppress_tokens=None)
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **tokens, **positions)).eval().float()
    randomise(model)
    model.save_pretrained(HERE)
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    extractor.save_pretrained(HERE)
    found: dict[str, np.ndarray] = {
        "versions": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}")
    }
    for name, samples_N in recordings().items():
        frames_FM = features(extractor, samples_N)
        with torch.no_grad():
            own = model.model.encoder(torch.from_numpy(frames_FM.T[None]), output_hidden_states=True)
        found |= {
            f"{name}/samples": samples_N,
            f"{name}/frames": frames_FM,
            f"{name}/first": own.hidden_states[1][0].numpy(),
            f"{name}/last": own.last_hidden_state[0].numpy(),
        }
    for mels in (80, 128):
        wide = WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
        found[f"short/frames{mels}"] = features(wide, recordings()["short"])[::STEP]
    np.savez_compressed(HERE / "oracles.npz", allow_pickle=False, **found)


if __name__ == "__main__":
    main()
