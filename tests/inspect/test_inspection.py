"""``python -m mmjax.inspect``: its figures by hand, its text, its pictures, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from trial_runs import write_tiny

from mmjax.assembly.model import encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.reorder import METHODS
from mmjax.data.tokenizer import FileTokenizer
from mmjax.data.types import Sample
from mmjax.inspect.__main__ import main
from mmjax.inspect.inspection import inspect
from mmjax.inspect.sample_text import first_samples, spans_of, write_samples
from mmjax.recipe import Recipe
from mmjax.viz.mask import draw_mask, first_row, seen_shares

UNEVEN = (
    "--gin.Train.global_batch=16",
    "--gin.Train.microbatches=4",
    "--gin.Digits.images=(1, 4)",
    "--gin.Digits.digits=(1, 4)",
    "--gin.Digits.scale=(1.0, 2.0)",
    "--gin.Data.sequence_length=320",
    "--gin.Data.reorder=best",
    "--gin.llm/Packing.buckets=((2, 160), (2, 320))",
    "--gin.vision/Packing.buckets=((4, 64), (8, 64), (16, 64))",
)


@pytest.mark.long
def test_figures_text_and_pictures(tmp_path, capsys):
    gin = write_tiny(tmp_path)
    inspected = inspect(load_config([gin], [flag.removeprefix("--gin.") for flag in UNEVEN]), 2)
    found = json.loads(json.dumps(inspected.numbers()))
    assert (found["steps"], found["samples"], found["configured"]) == (2, 32, "best")
    assert found["lengths"]["llm"]["count"] == 32
    media, patches = found["media"]["vision"], found["lengths"]["vision"]
    assert patches["count"] == round(32 * media["mean"]) and 1 <= media["median"] <= media["most"] <= 4
    real = {name: own["count"] * own["mean"] for name, own in found["lengths"].items()}
    for method in METHODS:
        own = found["reorder"][method]
        for module, uses in own["buckets"].items():
            assert sum(use["count"] for use in uses) == 8 and sum(use["real"] for use in uses) == round(real[module])
            for use in uses:
                assert use["all"] == use["count"] * use["rows"] * use["width"] * 2  # cells
                assert use["waste"] == pytest.approx(1 - use["real"] / use["all"] if use["all"] else 0)
            assert own["efficiency"][module] == pytest.approx(real[module] / sum(use["all"] for use in uses))
        assert 0 < own["bubble"] < 1 <= own["imbalance"]
    none, best = found["reorder"]["none"], found["reorder"]["best"]
    assert best["makespan"] < none["makespan"] and best["imbalance"] < none["imbalance"]
    assert main([f"--gin_file={gin}", *UNEVEN, "--steps=2", f"--out={tmp_path / 'pictures'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    described = list(inspected.describe())
    assert lines[: len(described)] == described and lines[0] == "32 samples in 2 steps"
    line = next(line for line in lines if line.startswith("best"))
    assert line.endswith("(configured)")
    figures = [float(word.rstrip("%")) for word in line.split() if word[0].isdigit()]
    shares = [100 * best["efficiency"][module] for module in ("llm", "vision")]
    np.testing.assert_allclose(
        figures, [best["makespan"], 100 * best["bubble"], best["imbalance"], *shares], atol=0.051
    )
    for name in ("data.png", "samples.png", "mask.png"):
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_the_picture_of_a_mask_has_the_shares_of_its_pairs(tmp_path: Path) -> None:
    """Block by block those of all pairs, also where a block is several tokens."""
    own = ("llm/Decoder.mask='cornstarch'", "llm/Decoder.chunk=20", "llm/Decoder.full_every=2")
    row = first_row(load_config([write_tiny(tmp_path)], own))
    assert list(row.masks.values()) == [1, 1] and {"vision", "prompt", "learned text"} <= {*row.kinds}
    at, items = np.arange(len(row.kinds)), row.inputs["items"]
    assert ((items > 0) == (row.kinds == "vision")).all() and items.max() > 1
    causal = np.subtract.outer(at, at) >= 0
    real, text = row.inputs["segments"] > 0, (items == 0)[:, None]
    for mask in row.masks:
        chunk = mask.grid_window or len(at)
        same = np.equal.outer(at // chunk, at // chunk)
        seen = np.outer(real, real) & np.where(text, causal & same, np.equal.outer(items, items))
        for block in (1, 7):
            padded = np.pad(seen, (0, -len(at) % block)).reshape(-(-len(at) // block), block, -1, block)
            sizes = np.bincount(at // block)
            shares = padded.sum(axis=(1, 3)) / np.outer(sizes, sizes)
            np.testing.assert_allclose(seen_shares(mask, row.inputs, block), shares)
    figure = draw_mask(row)
    assert figure.get_suptitle().startswith("llm/Decoder.mask = 'cornstarch': text sees all before")


def test_what_is_learned_is_set_apart(tmp_path: Path) -> None:
    """On a terminal by colour and elsewhere by brackets: the answers, and what ends them; images are counted."""
    config = load_config([write_tiny(tmp_path)])
    found = [*first_samples(config, 2)]
    for sample, spans in found:
        assert "".join(span.text for span in spans if span.learned) == f"{sample.answer}<eos>"
        media = [span.text for span in spans if span.medium]
        counts = [math.prod(side // 8 for side in image.shape[:2]) for image in drawn(config, sample)]
        assert media == [f"<image \u00d7{count}>" for count in counts] and not any(s.learned for s in spans if s.medium)
        assert spans[0].text.startswith("<bos>") and sample.question in "".join(span.text for span in spans)
    for terminal in (False, True):
        file = io.StringIO()
        with mock.patch.dict(os.environ, {"FORCE_COLOR": "1"} if terminal else {}):
            write_samples(config, 2, file)
        (sample, _), text = found[0], file.getvalue()
        wanted = f"\x1b[1;32m{sample.answer}<eos>\x1b[0m" if terminal else f"[[{sample.answer}<eos>]]"
        assert wanted in text and f"sample 1: {len(found[1][0].answer) + 1} of " in text
    # Blanks stay where a tokenizer keeps them in a word's first token, and special tokens without a text have names.
    tokenizer = FileTokenizer(write_words(tmp_path), ("vision",))
    about = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": tokenizer.media_token("vision")}}
    ids = [tokenizer.bos, 0, *[tokenizer.media_token("vision")] * 3, 1, 2, tokenizer.eos]
    weights = np.asarray([0, 0, 0, 0, 0, 0, 1, 1], np.float32)
    sample = Sample(tokens=np.asarray(ids, np.int32), loss_weights=weights, media={}, **about)
    texts = [span.text for span in spans_of(sample, tokenizer, encoder_specs(config))]
    assert texts == ["<bos>one", "<image \u00d73>", " two", " three<eos>"]


def drawn(recipe: Recipe, sample: Sample) -> list[np.ndarray]:
    """The images of the sample of this question among the first ones."""
    source = open_source(recipe, split="train")
    return next(
        [*own.media.get("vision", ())]
        for own in (source.sample(index) for index in range(2))
        if own.tokens.tolist() == sample.tokens.tolist()
    )


def write_words(folder: Path) -> Path:
    """A tokenizer.json of three words, with blanks as sentencepiece has them."""
    words = {f"\u2581{word}": number for number, word in enumerate(("one", "two", "three"))}
    decoder = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "\u2581one"}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}))
    return path


def test_wrong_flags(tmp_path, capsys):
    gin = f"--gin_file={write_tiny(tmp_path)}"
    (tmp_path / "file").write_text("")
    for flags, said in (
        ([gin, "--text=-1"], "--text=-1: must be 0 or more, such as 3"),
        ([gin, "--steps=0"], "--steps=0: must be 1 or more"),
        ([], "--gin_file is missing"),
        ([gin, f"--out={tmp_path / 'file'}"], "is a file; name a folder"),
    ):
        with pytest.raises(SystemExit) as end:
            main(flags)
        captured = capsys.readouterr()
        assert end.value.code == 2 and captured.out == ""
        assert captured.err.startswith("error: ") and said in captured.err and captured.err.count("\n") == 1
