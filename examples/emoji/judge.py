"""Judges made pictures: what a classifier of real ones sees in them, and how near they are to training pictures.

python judge.py --data=data --made=made made2 made3

The classifier is a kernel ridge regression onto the categories of real training pictures. It judges real held-out
pictures, pictures made of held-out captions, and the same under captions of another category, exchanged. A folder of
made pictures is that of ``mmjax.generate`` over ``data/prompts.jsonl``; several are of several seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 32
WIDTH, RIDGE = 0.2, 0.1  # of the kernel, in medians of squared distances, and of the regression
DRAWS = 1000  # of the bootstrap


class Judge:
    """A classifier of pictures by category.

    Args:
      pictures_NX: the training pictures.
      labels_N: the category of each, from 0.
    """

    def __init__(self, pictures_NX: np.ndarray, labels_N: np.ndarray):
        self.pictures_NX = pictures_NX
        squared_NN = squared_distances(pictures_NX, pictures_NX)
        self._scale = WIDTH * float(np.median(squared_NN))
        # Each category counts as much as any other, whatever its number of pictures.
        counts = np.bincount(labels_N)
        ridge_N = RIDGE * counts[labels_N] / counts.mean()
        kernel_NN = np.exp(-squared_NN / self._scale) + np.diag(ridge_N)
        self._weights_NK = np.linalg.solve(kernel_NN, np.eye(len(counts))[labels_N])

    def __call__(self, pictures_MX: np.ndarray) -> np.ndarray:
        """The category of each picture, int [M]."""
        kernel_MN = np.exp(-squared_distances(pictures_MX, self.pictures_NX) / self._scale)
        return (kernel_MN @ self._weights_NK).argmax(axis=1)


def squared_distances(a_MX: np.ndarray, b_NX: np.ndarray) -> np.ndarray:
    """The squared distance of each pair of pictures, [M, N]."""
    return np.maximum(np.sum(a_MX**2, 1)[:, None] + np.sum(b_NX**2, 1) - 2 * a_MX @ b_NX.T, 0)


def pictures_of(files: Sequence[Path]) -> np.ndarray:
    """Pictures as numbers in -1 to 1, [N, X], of one size."""
    opened = (Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC) for file in files)
    return np.stack([np.asarray(picture, np.float32).ravel() / 127.5 - 1 for picture in opened])


def number_of(file: Path) -> int:
    """The number of the prompt of a file such as "12-1.png"."""
    return int(file.stem.partition("-")[0])


def captions_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines()]


def interval(right_SM: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds and captions [S, M], by a bootstrap of captions."""
    by_caption_M = right_SM.mean(axis=0)
    drawn = np.random.default_rng(0).integers(0, len(by_caption_M), (DRAWS, len(by_caption_M)))
    low, high = np.quantile(by_caption_M[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def exchanged(labels_M: np.ndarray) -> np.ndarray:
    """The label of another caption, of another category, for each caption; -1 where none is left."""
    order, result = np.random.default_rng(0).permutation(len(labels_M)), np.full(len(labels_M), -1)
    for at in range(len(labels_M)):
        result[at] = next((label for label in labels_M[np.roll(order, -at)] if label != labels_M[at]), -1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that from_npm.py has written")
    parser.add_argument("--made", type=Path, nargs="+", required=True, help="folders of pictures, one for each seed")
    arguments = parser.parse_args()
    sides = {side: captions_of(arguments.data / side) for side in ("train", "test")}
    categories = sorted({record["category"] for record in sides["train"]})
    labels = {side: np.array([categories.index(r["category"]) for r in records]) for side, records in sides.items()}
    real = {
        side: pictures_of([arguments.data / side / record["file_name"] for record in records])
        for side, records in sides.items()
    }
    judge = Judge(real["train"], labels["train"])
    made = [pictures_of(sorted(folder.glob("*.png"), key=number_of)) for folder in arguments.made]
    for folder, pictures in zip(arguments.made, made, strict=True):
        if len(pictures) != len(labels["test"]):
            raise SystemExit(f"{folder} has {len(pictures)} pictures for {len(labels['test'])} captions")
    seen = np.stack([judge(pictures) for pictures in made])
    rows = {
        "real held-out pictures": (judge(real["test"])[None], labels["test"]),
        "made of held-out captions": (seen, labels["test"]),
        "under captions exchanged": (seen, exchanged(labels["test"])),
    }
    for name, (judged_SM, wanted_M) in rows.items():
        right_SM = judged_SM == wanted_M
        rare = np.mean([right_SM[:, labels["test"] == k].mean() for k in np.unique(labels["test"])])
        low, high = interval(right_SM)
        print(f"{name}: right {right_SM.mean():.1%} ({low:.1%} to {high:.1%}), mean over categories {rare:.1%}")
    for name, pictures in {"real held-out": real["test"], "made": np.concatenate(made)}.items():
        nearest = np.sqrt(squared_distances(pictures, real["train"]).min(axis=1) / pictures.shape[1])
        print(f"{name}: nearest training picture, root of the mean square: median {np.median(nearest):.3f}")


if __name__ == "__main__":
    main()
