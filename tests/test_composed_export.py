"""A tower and a language model from folders of their own, and a new projector, as one folder of LLaVA.

``tests/oracles/make_composed_export.py`` loaded such folders into transformers and kept the logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.numpy import load_file
from trial_runs import write_tiny

from mmjax import reference
from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.data.chat import TEMPLATES
from mmjax.data.loader import tokenizer_of
from mmjax.data.processor.template import read_template
from mmjax.data.sample import encode_dialogue
from mmjax.data.tokenizer import make_tokenizer
from mmjax.data.turns import Turn
from mmjax.data.types import EncoderSpec, Sample
from mmjax.export.folders import export_folders
from mmjax.models.composed import compose
from mmjax.recipe import Recipe, advise
from mmjax.recipe.composed_folder import image_token, small_files
from mmjax.recipe.exportable import compose_run
from mmjax.recipe.pretrained import folder_parameters
from mmjax.train.trainer import Trainer

ORACLES = Path(__file__).parent / "oracles"
MODELS = {"clip_qwen2": ("clip", "qwen2", -2, 14), "siglip_llama": ("siglip", "llama_biases", -1, 64)}
"""By name in ``composed_export.npz``: tower, language model, the tower's layer, and the words of the tokenizer."""
DIGITS = ("Train.eval_samples=0", "Data.sequence_length=256")
ALONE = ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0")
Arrays = Mapping[str, np.ndarray]


def language_model(folder: Path, name: str, words: int) -> Path:
    """A copy of a language model's folder, with a tokenizer."""
    made = Path(shutil.copytree(ORACLES / "llm" / name, folder / name))
    vocabulary = {word: number for number, word in enumerate(["<unk>", *(f"w{i}" for i in range(words - 1))])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return made


def configured(folder: Path, name: str) -> Recipe:
    tower, llm, layer, words = MODELS[name]
    path, llm_folder = write_tiny(folder), language_model(folder, llm, words)
    own = ("vision/ViT", "llm/Decoder")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(own)))
    return load_config(
        [path],
        [
            f"llm/Weights.path={str(llm_folder)!r}",
            f"Data.tokenizer={str(llm_folder / 'tokenizer.json')!r}",
            f"vision/Weights.path={str(ORACLES / 'vision' / tower)!r}",
            *(f"vision/Weights.layer={layer}", "vision/ViT.merge=1", "vision/Projector.activation='gelu_exact'"),
            *(*DIGITS, *ALONE),
        ],
    )


def exported(folder: Path, name: str) -> tuple[Path, Trainer, Any, dict[str, np.ndarray]]:
    """The folder that a run of no steps gives; the run's model and its parameters."""
    config = configured(folder, name)
    with Trainer(config, folder / "run", style="silent") as trainer:
        trainer.state.step = 1
        trainer.save()
        held = {
            n.removeprefix("params/"): np.asarray(x) for n, x in trainer.leaves().items() if n.startswith("params/")
        }
    (folder / "run" / "config.gin").write_text(operative_config(config))
    made = export_folders(folder / "run", folder / "out")
    assert made.without == () and made.apart == ""
    assert made.tensors == {str(folder / "out"): (("vision", "vision_projector", "llm"), len(tensors(folder / "out")))}
    return folder / "out", trainer, trainer.parts.placed.model, held


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def sample(folder: Path, rng: np.random.Generator, placeholder: int) -> tuple[np.ndarray, Sample]:
    """Words around an image: with the folder's token for images, and as ours."""
    theirs = json.loads((folder / "config.json").read_text())
    vision, image = theirs["vision_config"], theirs["image_token_index"]
    side = vision["image_size"] // vision["patch_size"]
    tokens = np.concatenate([rng.integers(1, 12, 5), np.full(side**2, image), rng.integers(1, 12, 7)]).astype(np.int32)
    pixels = rng.normal(size=(side * vision["patch_size"], side * vision["patch_size"], 3)).astype(np.float32)
    about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": placeholder}}
    ours = np.where(tokens == image, placeholder, tokens).astype(np.int32)
    return tokens, Sample(
        tokens=ours, loss_weights=np.ones(len(ours), np.float32), media={"vision": (pixels,)}, **about
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["clip_qwen2", "siglip_llama"])
def test_the_folder_has_every_parameter_and_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    out, trainer, model, held = exported(tmp_path, name)
    theirs = json.loads((out / "config.json").read_text())
    assert theirs["vision_feature_select_strategy"] == ("default" if name == "clip_qwen2" else "full")
    # A run from the folder begins with the same parameters; a table has a row for the image's token.
    again = load_config(
        [tmp_path / "tiny.gin"],
        [f"Model.weights={str(out)!r}", f"Data.tokenizer={str(out / 'tokenizer.json')!r}", *DIGITS],
    )
    assert replace(again.model["vision"].settings, remat="none") == trainer.recipe.model["vision"].settings
    assert again.model.projectors == trainer.recipe.model.projectors
    rows, vocab = theirs["text_config"]["vocab_size"], held["llm/embed"].shape[0]
    shapes = {n: (rows, *x.shape[1:]) if n == "llm/embed" else x.shape for n, x in held.items()}
    shapes |= {n: (x.shape[0], rows) for n, x in held.items() if n == "llm/head"}
    found = folder_parameters(again, str(out), shapes)
    assert found.places.keys() == held.keys()
    for leaf, (key, view) in found.places.items():
        read = view.read(tensors(out)[key], shapes[leaf], tuple(slice(0, n) for n in shapes[leaf]))
        kept = tuple(slice(0, n) for n in held[leaf].shape)
        np.testing.assert_array_equal(read[kept], held[leaf], strict=True)
    image = theirs["image_token_index"]
    assert image < rows and rows == (vocab if image < vocab else 128)
    added = json.loads((out / "tokenizer.json").read_text())["added_tokens"]
    assert {"id": image, "content": "<image>"}.items() <= added[-1].items()
    # transformers' logits.
    golden = np.load(ORACLES / "composed_export.npz")
    placeholder = trainer.parts.tokenizer.media_token("vision")
    tokens, ours = sample(out, np.random.default_rng(0), placeholder)
    np.testing.assert_array_equal(tokens, golden[f"{name}_tokens"])
    logits = np.asarray(reference.sample_logits(held, model, ours))
    want = golden[f"{name}_logits"][:, : logits.shape[1]]
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_what_llava_has_not_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, "clip_qwen2")
    modules = {name: node.settings for name, node in config.model.nodes.items()}
    projectors = {name: part.settings for name, part in config.model.projectors.items()}

    def why(**changes: Any) -> str:
        given: Any = {"modules": modules, "projectors": projectors} | changes
        with pytest.raises(ConfigError) as caught:
            compose(config.model.config, given["modules"], given["projectors"], 67, 14)
        return str(caught.value)

    tower, projector = config.model["vision"].settings, config.model.projectors["vision"].settings
    for changes, said in (
        ({"modules": {**modules, "vision": replace(tower, merge=2)}}, "vision/ViT.merge=2: LLaVA makes a token"),
        ({"modules": {**modules, "vision": replace(tower, last_norm=True)}}, "name one with Weights.layer"),
        (
            {"modules": {**modules, "vision": replace(tower, patch_bias=True)}},
            "clip_vision_model, has ViT.patch_bias=False",
        ),
        (
            {"modules": {**modules, "vision": replace(tower, norm_eps=1e-3, norm="rms")}},
            "vision: it is no tower of CLIP",
        ),
        ({"projectors": {"vision": replace(projector, kind="linear")}}, "vision/Projector.kind='linear': LLaVA's"),
        ({"projectors": {"vision": replace(projector, hidden=7)}}, "vision/Projector.hidden=7: LLaVA's has the"),
    ):
        message = why(**changes)
        assert said in message and "\n" not in message


def test_a_layer_is_of_a_tower_in_a_folder_of_its_own(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    llm = f"llm/Weights.path={str(ORACLES / 'llm' / 'qwen2')!r}"
    for bindings, said in (
        (["vision/Weights.layer=-2"], "vision/Weights.layer=-2: is of a tower's own folder; name that in Weights.path"),
        ([llm, "llm/Weights.layer=-2"], "Weights.layer=-2: is of an image tower in a folder of its own; leave it out"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config([path], bindings)
        assert said in str(caught.value) and "\n" not in str(caught.value)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IN_PARTS = CHATML.replace("message.content", "message.content[0].text")
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def speaking(folder: Path, template: str, *, image: bool = False) -> Path:
    """A copy of a language model's folder with a tokenizer as published ones are: its tokens are listed twice."""
    made = Path(shutil.copytree(ORACLES / "llm" / "qwen2", folder / "speaking"))
    tokenizer = json.loads((ORACLES / "processors" / "chatml" / "tokenizer.json").read_text())
    if image:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 299, "content": "<image>"})
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    listed = {str(token.pop("id")): token for token in tokenizer["added_tokens"]}
    about = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (made / "tokenizer_config.json").write_text(
        json.dumps({**about, "added_tokens_decoder": listed, "chat_template": template})
    )
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "vocab_size": 310}))
    return made


def composed(folder: Path, llm: Path, *bindings: str) -> tuple[Recipe, Path]:
    """The small files of the folder of a model of CLIP and a language model."""
    path = write_tiny(folder)
    own = ("vision/ViT", "llm/Decoder")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(own)))
    tower = (
        f"vision/Weights.path={str(ORACLES / 'vision' / 'clip')!r}",
        "vision/Weights.layer=-2",
        "vision/ViT.merge=1",
    )
    config = load_config([path], [f"llm/Weights.path={str(llm)!r}", *tower, *DIGITS, *ALONE, *bindings])
    whole, why = compose_run(config, 310, image_token(config))
    assert whole, why
    out = folder / "out"
    out.mkdir()
    for name, content in small_files(config, whole).items():
        (out / name).write_bytes(content)
    (out / "config.json").write_text(json.dumps(whole.config))
    return config, out


@pytest.mark.parametrize("image", [False, True], ids=["added", "there"])
@pytest.mark.parametrize("template", [CHATML, IN_PARTS], ids=["text", "parts"])
def test_the_template_has_images_where_the_run_had_them(template: str, image: bool, tmp_path: Path) -> None:
    """Of a dialogue with images between texts and in lines of their own; ``<image>`` may be a token already."""
    config, out = composed(tmp_path, speaking(tmp_path, template, image=image))
    turns = (("a <image>and <image>\nb", "yes"), ("<image>", "no <image>"))
    counts, encoders = {"vision": [2, 1, 3, 2]}, {"vision": EncoderSpec(patch=1, channels=3)}
    laid, question = {}, Turn(role="user", text="<image>\nq")
    for path in (config.data.settings.tokenizer, str(out)):
        tokenizer = make_tokenizer(path, ("vision",), "vision")
        about = encode_dialogue(tokenizer, encoders, counts, turns, template=read_template(path), system="s")
        asked = encode_dialogue(tokenizer, encoders, {"vision": [2]}, [question], template=read_template(path)).tokens
        medium = tokenizer.media_token("vision")
        laid[path] = [[-1 if token == medium else token for token in own] for own in (about.tokens, asked)]
        weights = about.weights
    assert laid[str(out)] == laid[config.data.settings.tokenizer] and sum(weights) > 0
    assert json.loads((out / "config.json").read_text())["image_token_index"] == (299 if image else medium) == 299


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_is_written_too(name: str, tmp_path: Path) -> None:
    """A run that names a template leaves the folder's aside, and so does its export."""
    source = ("Data.sources={'mine': 1.0}", "mine/Source.path='x.json'", f"mine/Source.template={name!r}")
    config, out = composed(tmp_path, speaking(tmp_path, CHATML), *source)
    tokenizer, theirs = tokenizer_of(config.data.settings, ("vision",)), make_tokenizer(str(out), ("vision",), "vision")
    named, read = TEMPLATES[name], read_template(str(out))
    counts, encoders = {"vision": [2, 1]}, {"vision": EncoderSpec(patch=1, channels=3)}
    first = (("a <image>and\n<image>\nb ", " yes"), ("again?", "no"))
    for turns, system in ((first, ""), (first, "Be short."), (first[:1], "")):
        asked = [*turns, Turn(role="user", text="and?")]
        found = [
            (
                encode_dialogue(own, encoders, counts, turns, template=template, system=system).tokens,
                encode_dialogue(own, encoders, counts, asked, template=template, system=system).tokens,
            )
            for own, template in ((tokenizer, named), (theirs, read))
        ]
        assert tokenizer.media_token("vision") == theirs.media_token("vision") and found[0] == found[1]


def test_the_template_takes_messages_as_transformers_gives_them(tmp_path: Path) -> None:
    """Parts, which name a picture, and plain text."""
    _, out = composed(tmp_path, speaking(tmp_path, CHATML))
    template = read_template(str(out))
    picture = {"type": "image", "url": "a.png"}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [picture, {"type": "text", "text": "What?"}, {"type": "image_url"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A."}]},
    ]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template.source)
    said = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<image>What?<image><|im_end|>\n"
    assert made.render(messages=messages[:2]) == said
    assert made.render(messages=messages) == said + "<|im_start|>assistant\nA.<|im_end|>\n"


def test_a_composition_that_no_folder_holds_is_said_before_it_trains(tmp_path: Path) -> None:
    """Of modules that come from folders; a model of new values has no line."""
    path, tower = write_tiny(tmp_path), f"vision/Weights.path={str(ORACLES / 'vision' / 'siglip')!r}"
    assert not [line for line in advise(load_config([path])) if "export" in line]
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("vision/ViT")))
    (line,) = (line for line in advise(load_config([path], [tower, *DIGITS, *ALONE])) if "export" in line)
    assert line.startswith("an export is not one folder of a whole model, and --format=safetensors leaves llm, vision_")
    assert line.endswith("; name one with Weights.layer, such as -2")
    layer = ("vision/Weights.layer=-1", "vision/ViT.merge=1", "vision/Projector.activation='gelu_exact'")
    found = advise(load_config([path], [tower, *layer, *DIGITS, *ALONE]))
    assert not [line for line in found if "export" in line], found
