"""`examples/emoji`: data are split by concept, and the judge tells right captions from exchanged ones."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image
from trial_runs import REPOSITORY

from mmjax.config import load_config

EXAMPLE = REPOSITORY / "examples" / "emoji"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"emoji_{name}", EXAMPLE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(path: Path) -> Path:
    """A package of thirty concepts, of which every third has two skin tones."""
    entries, files = [], {}
    for number in range(30):
        tones = {"1F3FB": {"image": f"{number}-light.png"}, "1F3FF": {"image": f"{number}-dark.png"}}
        variations = {"skin_variations": tones} if number % 3 == 0 else {}
        entries.append({"name": f"THING {number}", "category": "Things", "image": f"{number}.png", **variations})
        for image in (f"{number}.png", *(tone["image"] for tone in variations.get("skin_variations", {}).values())):
            buffer = io.BytesIO()
            Image.new("RGBA", (8, 8), (number, 0, 0, 128)).save(buffer, "PNG")
            files[f"package/img/google/64/{image}"] = buffer.getvalue()
    files["package/emoji.json"] = json.dumps([*entries, {"name": "X", "category": "Component"}]).encode()
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_skin_tones_of_a_concept_are_on_one_side(tmp_path: Path) -> None:
    example("from_npm").write(package(tmp_path / "emoji.tgz"), tmp_path / "data")
    sides = {side: (tmp_path / "data" / side / "captions.jsonl").read_text().splitlines() for side in ("train", "test")}
    names = {side: [json.loads(line)["file_name"] for line in lines] for side, lines in sides.items()}
    concepts = {side: {name.split("-")[0].removesuffix(".png") for name in of_side} for side, of_side in names.items()}
    assert not concepts["train"] & concepts["test"] and len(concepts["test"]) == 3
    assert sum(map(len, names.values())) == 50
    assert json.loads(sides["train"][0]).keys() == {"file_name", "text", "category"}
    prompts = (tmp_path / "data" / "prompts.jsonl").read_text().splitlines()
    assert len(prompts) == len(names["test"])
    with Image.open(tmp_path / "data" / "train" / names["train"][0]) as picture:
        assert picture.mode == "RGB" and np.asarray(picture)[0, 0, 1] in (127, 128)  # half of it is the white behind


def test_the_judge_tells_categories_apart() -> None:
    judge = example("judge")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 20)
    pictures = rng.normal(0, 0.3, (60, 12)) + 2 * np.eye(3)[labels].repeat(4, axis=1)
    judged = judge.Judge(pictures[::2], labels[::2])(pictures[1::2])
    assert (judged == labels[1::2]).mean() > 0.95
    other = judge.exchanged(labels)
    assert (other != labels).all() and sorted(set(other)) == [0, 1, 2]
    low, high = judge.interval(np.array([[True, False] * 30]))
    assert 0.3 < low < 0.5 < high < 0.7


def test_its_configuration_is_legal() -> None:
    recipe = load_config([EXAMPLE / "emoji.gin"])
    assert recipe.model["painter"].settings.queries == 8 and recipe.model["painter"].latents.autoencoder == "vae/last"
