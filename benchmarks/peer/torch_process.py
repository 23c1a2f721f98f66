"""PyTorch's process of the benchmark ``peer``: transformers' LLaVA and torch's AdamW, its fused kernels."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peer.protocol import Settings, serve

NOT_LEARNED = -100


def start(settings: Settings) -> tuple[Callable[[], float], Callable[[], Mapping[str, float]]]:
    """See ``serve``."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # transformers' checks of inputs are not compiled
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.LlavaForConditionalGeneration.from_pretrained(settings.folder, dtype=torch.float32).to(device)
    model.train()
    model.model.vision_tower.requires_grad_(False)
    optimizer = _optimizer(model, settings)
    batches = _batches(settings, device)
    compute = torch.compile(model) if settings.compiled else model
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            loss = compute(**next(batches), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())  # waits for the device

    def ops() -> dict[str, float]:
        for _ in range(2):  # the first includes the profiler's own start
            with torch.profiler.profile() as profile:
                step()
        on_device = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        seconds = {event.key: getattr(event, on_device) / 1e6 for event in profile.key_averages()}
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    return step, ops


def _optimizer(model: Any, s: Settings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": s.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.b1, s.b2), eps=s.eps, fused=True)


def _batches(settings: Settings, device: str) -> Any:
    """The inputs of each step. All rows are of one length, so that no mask but the causal one is needed."""
    values = np.load(settings.dialogues)
    images = torch.from_numpy(values["images"]).permute(0, 3, 1, 2).contiguous().to(device)
    learned = torch.from_numpy(values["learned"]).to(device)
    while True:
        for tokens in values["tokens"]:
            ids = torch.from_numpy(tokens).long().to(device)
            yield {"input_ids": ids, "pixel_values": images, "labels": torch.where(learned, ids, NOT_LEARNED)}


if __name__ == "__main__":
    serve(start)
