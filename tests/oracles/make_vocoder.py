"""Makes the goldens of vocoders: a random SpeechT5HifiGan in ``vocoder/``, what it makes, and SpeechT5's frames."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import SpeechT5FeatureExtractor, SpeechT5HifiGan, SpeechT5HifiGanConfig

FOLDER = Path(__file__).parent / "vocoder"


def main() -> None:
    torch.manual_seed(0)
    config = SpeechT5HifiGanConfig(
        model_in_dim=5,
        sampling_rate=4000,
        upsample_initial_channel=16,
        upsample_rates=[5, 2],
        upsample_kernel_sizes=[9, 4],
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3], [1, 2]],
    )
    model = SpeechT5HifiGan(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn_like(parameter))
        model.mean.copy_(torch.randn(5))
        model.scale.copy_(0.5 + torch.rand(5))
    model.save_pretrained(FOLDER)
    frames = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    with torch.no_grad():
        waveform = model(torch.from_numpy(frames)).numpy()
    seconds = np.arange(4000) / 16000
    sound = 0.4 * np.sin(2 * np.pi * 440 * seconds) + 0.05 * np.random.default_rng(1).normal(size=4000)
    extractor = SpeechT5FeatureExtractor(mel_floor=1e-5)
    logs = extractor(audio_target=sound.astype(np.float32), sampling_rate=16000)["input_values"][0]
    np.savez_compressed(
        FOLDER / "values.npz", frames=frames, waveform=waveform, sound=sound.astype(np.float32), logs=np.asarray(logs)
    )


if __name__ == "__main__":
    main()
