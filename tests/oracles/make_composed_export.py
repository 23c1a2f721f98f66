"""Makes ``composed_export.npz``: logits of transformers from folders that mmjax composed of several.

    python tests/oracles/make_composed_export.py NAME=FOLDER ...

FOLDER is what ``tests/test_composed_export.py`` exports under NAME. It needs torch and transformers, which mmjax does
not. A folder that lacks a tensor, or has one too many, is refused.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

OUT = Path(__file__).parent / "composed_export.npz"


def logits_of(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens with an image among them, as the test makes them, and the model's logits."""
    found = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, dtype="float32"
    )
    made: Any = found[0]
    assert not any(found[1][kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found[1]
    c = made.config
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<image>") == c.image_token_id
    processor = json.loads((Path(folder) / "processor_config.json").read_text())
    assert processor["image_token"] == "<image>" and processor["patch_size"] == c.vision_config.patch_size
    side, rng = c.vision_config.image_size // c.vision_config.patch_size, np.random.default_rng(0)
    image = np.full(side**2, c.image_token_id)
    tokens = np.concatenate([rng.integers(1, 12, 5), image, rng.integers(1, 12, 7)]).astype(np.int32)
    pixels = rng.normal(size=(side * c.vision_config.patch_size, side * c.vision_config.patch_size, 3))
    given = torch.tensor(pixels.astype(np.float32)).permute(2, 0, 1)[None]
    with torch.no_grad():
        logits = made.eval()(input_ids=torch.tensor(tokens)[None].long(), pixel_values=given).logits[0]
    return tokens, logits.numpy()


def main() -> None:
    torch.set_num_threads(1)
    values: dict[str, Any] = {}
    for argument in sys.argv[1:]:
        name, _, folder = argument.partition("=")
        values[f"{name}_tokens"], values[f"{name}_logits"] = logits_of(folder)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(OUT, versions=json.dumps(versions), **values)


if __name__ == "__main__":
    main()
