"""Folders' processors: token ids, learned tokens and pixels are those of transformers (``oracles/make_processors``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_source
from mmjax.data.processor.image_rules import image_settings
from mmjax.data.processor.template import FolderTemplate, read_template
from mmjax.data.sample import answer_text, encode_dialogue, prompt_only
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.images import Pictures
from mmjax.data.sources.record import Media, Record, parse_record
from mmjax.data.sources.sizes import plan
from mmjax.data.spec import DataSpec
from mmjax.data.tokenizer import FileTokenizer, make_tokenizer
from mmjax.data.turns import Turn, as_turns
from mmjax.data.types import EncoderSpec, Sample

pytest.importorskip("tokenizers")

FOLDERS = Path(__file__).parents[1] / "oracles" / "processors"
STRIDE = 5
SPECS = {
    "qwen2_vl": EncoderSpec(patch=14, merge=2, channels=3),
    "qwen3_vl": EncoderSpec(patch=16, merge=2, channels=3),
    "siglip2": EncoderSpec(patch=8, channels=3),
    "gemma4": EncoderSpec(patch=4, merge=3, channels=3),
}
"""Encoders whose patches matter to the rule; others have patches of one pixel, so that nothing is cut off."""
NEXT = ("llava_next", "llava_next_mistral")
RULES = (
    *("clip", "llava", "llava_square", "siglip", "siglip2_fixed", "siglip2", "dinov2", "dinov2_small", "vit", "dinov3"),
    *("qwen2_vl", "qwen3_vl", "llava_onevision", "gemma3", "gemma4", "paligemma2", *NEXT),
)
IMAGES = ("odd.png", "grey.png", "alpha.png", "palette.png", "turned.jpg", "small.webp")
SEEING, SPEAKING = (
    ("llava", "qwen2_vl", "qwen3_vl", "llava_onevision", "gemma3", "gemma4", "paligemma2", *NEXT),
    ("chatml", "llama2", "llama3", "mistral", "blanks", "old_blanks"),
)
TOKENS = {
    "llava": EncoderSpec(patch=7, channels=3),
    "gemma3": EncoderSpec(patch=4, merge=4, channels=3),
    "paligemma2": EncoderSpec(patch=7, channels=3),
    **{name: SPECS[name] for name in ("qwen2_vl", "qwen3_vl", "gemma4")},
}


def pictures(name: str, spec: EncoderSpec | None = None) -> Pictures:
    rules: Any = image_settings(str(FOLDERS / name))
    return Pictures("own", SourceConfig(**rules), spec or SPECS.get(name, EncoderSpec(patch=1, channels=3)))


@cache
def values() -> Mapping[str, Any]:
    with np.load(FOLDERS / "values.npz") as file:
        return dict(file)


@cache
def dialogues() -> Any:
    return json.loads((FOLDERS / "dialogues.json").read_text("utf-8"))


@cache
def folder(name: str) -> tuple[FileTokenizer, FolderTemplate]:
    tokenizer = make_tokenizer(str(FOLDERS / name), ("vision", "audio"), "vision")
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer, read_template(str(FOLDERS / name))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("file", IMAGES)
def test_pixels_are_those_of_the_processor(name: str, file: str) -> None:
    maker, data, wanted = pictures(name), (FOLDERS / file).read_bytes(), values()
    media = maker.media(data)
    count = sum(key.startswith(f"{name}/{file}/") for key in wanted) // 2
    assert len(media) == count and [array.shape[:2] for array in media] == maker.sizes(data)
    for number, medium in enumerate(media):
        assert medium.shape[:2] == tuple(wanted[f"{name}/{file}/{number}/shape"])
        assert np.abs(medium[::STRIDE, ::STRIDE] - wanted[f"{name}/{file}/{number}"]).max() <= 1e-5


def test_sizes_of_images_are_those_of_gemma_4() -> None:
    """Also of very long ones, which have one row of tokens."""
    sizes = values()["gemma4/sizes"]
    config = SourceConfig(**image_settings(str(FOLDERS / "gemma4")))
    assert (config.resize, config.max_patches, config.mean, config.std) == ("largest", 630, (0.5,) * 3, (0.5,) * 3)
    for height, width, *wanted in sizes.tolist():
        assert [*plan((height, width), config, SPECS["gemma4"])[0].canvas] == wanted, (height, width)
    assert 12 in sizes[:, 2] and 12 in sizes[:, 3] and 840 in sizes[:, 2:]


def test_beside_others_an_image_has_no_tiles() -> None:
    maker = pictures("llava_onevision")
    for file in IMAGES[:2]:
        data = (FOLDERS / file).read_bytes()
        (medium,) = maker.media(data, alone=False)
        assert maker.measure(data, alone=False).media == [medium.shape[:2]]
        assert np.abs(medium[::STRIDE, ::STRIDE] - values()[f"several/{file}"]).max() <= 1e-5


def test_the_original_size_is_that_of_the_upright_image() -> None:
    assert pictures("llava_onevision").measure((FOLDERS / "turned.jpg").read_bytes()).original == (130, 90)


def record(messages: Any) -> Record:
    def find(name: object, kind: str) -> Media:
        return Media(name=kind, path=str(FOLDERS / str(name)))

    return parse_record({"messages": messages}, find)


def counts(name: str, record: Record) -> dict[str, list[int]]:
    """LLM tokens of each image."""
    if not record.images:
        return {}
    files = [Path(image.path).read_bytes() for image in record.images]
    if name in TOKENS:
        sizes = [pictures(name).sizes(data)[0] for data in files]
        return {"vision": [TOKENS[name].tokens(*size) for size in sizes]}
    most_tiles = 0 if name in NEXT else 9
    maker = pictures(name, EncoderSpec(patch=7, channels=3, newline=True, most_tiles=most_tiles))
    return {"vision": [maker.tokens(maker.measure(data, alone=len(files) == 1)) for data in files]}


CASES = [(name, which) for name in (*SEEING, *SPEAKING) for which in dialogues().get(name, ())]


@pytest.mark.parametrize(("name", "which"), CASES)
def test_tokens_and_what_is_learned(name: str, which: str) -> None:
    wanted, (tokenizer, template) = dialogues()[name][which], folder(name)
    encoders = {"vision": EncoderSpec(patch=1, channels=3)}
    messages = [message for message in wanted["messages"] if message["role"] != "system"]
    system = next((m["content"] for m in wanted["messages"] if m["role"] == "system"), "")
    system = system if isinstance(system, str) else system[0]["text"]
    parsed = record(messages)
    settings: Any = {"template": template, "system": system}
    if "refused" in wanted:
        with pytest.raises(ValueError, match=wanted["refused"]):
            encode_dialogue(tokenizer, encoders, {}, parsed.turns, **settings)
        return
    token_counts = counts(name, parsed)
    laid = encode_dialogue(tokenizer, encoders, token_counts, parsed.turns, **settings)
    # A dialogue ends with an end token, which LLaVA's template for Vicuna does not write.
    ids = [*wanted["ids"], tokenizer.eos] if name in ("llava", "llava_next") else wanted["ids"]
    assert laid.tokens == ids
    prompt = encode_dialogue(tokenizer, encoders, token_counts, parsed.dialogue[:-1], **settings).tokens
    assert prompt == wanted["prompt"]
    if "mask" in wanted:
        mask = [*wanted["mask"], 1][: len(ids)]
        ends = [i for i in range(1, len(ids)) if ids[i] == tokenizer.eos and mask[i - 1]]
        assert ends, "an end token follows an answer"
        assert laid.weights == [1.0 if i in ends else float(bit) for i, bit in enumerate(mask)]
    answered = Sample(
        tokens=np.asarray(laid.tokens), loss_weights=np.asarray(laid.weights), media={}, question="", answer="",
        prompt=laid.prompt, prompt_tokens=np.asarray(laid.prompt_tokens), lead=laid.lead, tail=laid.tail,
    )  # fmt: skip
    # LLaVA-OneVision's dialogues have a blank after "assistant", and its prompts have none.
    assert bool(laid.prompt_tokens) == (name == "llava_onevision")
    assert prompt_only(answered).tokens.tolist() == prompt
    until = next(i for i, token in enumerate(laid.tokens) if i >= laid.prompt and token in tokenizer.stops)
    assert answer_text(tokenizer, answered, laid.tokens[laid.prompt : until]) == template.formatted(
        parsed.dialogue[-1].text
    )


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llama2", "llama3", "mistral"])
def test_every_answer_is_learned_with_its_end_and_nothing_else(name: str) -> None:
    """Of templates that do not say what is generated."""
    tokenizer, template = folder(name)
    turns = (("q one", "yes"), ("q two", "no no"))
    laid = encode_dialogue(tokenizer, {}, {}, turns, template=template)
    learned = [i for i, weight in zip(laid.tokens, laid.weights, strict=True) if weight]
    text = tokenizer.decode(learned)
    assert learned.count(tokenizer.eos) == 2 and text.replace("\n", "").split() == (
        ["yesno", "no"] if name in ("qwen2_vl", "qwen3_vl", "llama3") else ["yes", "no", "no"]
    )


@pytest.mark.parametrize("name", [*SEEING, *SPEAKING])
@pytest.mark.parametrize("answer", ["", " a\n", "<image> seen"])
def test_odd_answers(name: str, answer: str) -> None:
    """An empty one, blanks around it, and an image that the model draws on."""
    tokenizer, template = folder(name)
    encoders = {"vision": EncoderSpec(patch=1, channels=3)}
    counts = {"vision": [2, 3]} if "<image>" in answer else {"vision": [2]}
    refusals = {"paligemma2": "has no place for 1 of the media", "llava_next_mistral": "refuses the dialogue"}
    if name in refusals and "<image>" in answer:
        with pytest.raises(ValueError, match=refusals[name]):
            encode_dialogue(tokenizer, encoders, counts, (("<image>q", answer),), template=template)
        return
    laid = encode_dialogue(tokenizer, encoders, counts, (("<image>q", answer),), template=template)
    question = Turn(role="user", text="<image>q")
    prompt = encode_dialogue(tokenizer, encoders, {"vision": [2]}, [question], template=template).tokens
    prompt_tokens = list(laid.prompt_tokens) or laid.tokens[: laid.prompt]
    sees = tokenizer.media_token("vision")
    assert prompt_tokens == prompt and prompt.count(sees) == 2 and laid.tokens.count(sees) == sum(counts["vision"])
    assert {*laid.tokens[-2:]} & {*tokenizer.stops}
    assert not any(weight for token, weight in zip(laid.tokens, laid.weights, strict=True) if token == sees)
    assert not any(laid.weights[: laid.prompt])


@pytest.mark.parametrize("mark", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
def test_texts_that_hold_an_images_tokens_are_refused(mark: str) -> None:
    """Else the template's text would have more images than there are."""
    tokenizer, template = folder("gemma3")
    with pytest.raises(ValueError, match=f"the text holds {mark}, which stands for an image"):
        encode_dialogue(tokenizer, {}, {}, ((f"a {mark}", "b"),), template=template)


def test_crops_of_an_image_are_refused(tmp_path: Path) -> None:
    rules = json.loads((FOLDERS / "gemma3" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**rules, "do_pan_and_scan": True}))
    with pytest.raises(ConfigError, match=r"has do_pan_and_scan=True, not False; set Source\.resize"):
        image_settings(str(tmp_path))


def test_paligemma_takes_one_question() -> None:
    tokenizer, template = folder("paligemma2")
    turns = (("<image>q", "a"), ("and?", "b"))
    with pytest.raises(ValueError, match="PaliGemma takes one question, and gives one answer"):
        encode_dialogue(
            tokenizer, {"vision": EncoderSpec(patch=1, channels=3)}, {"vision": [2]}, turns, template=template
        )


def test_special_tokens() -> None:
    llava, qwen, llama = (folder(name)[0] for name in ("llava", "qwen2_vl", "llama3"))
    assert llava.bos == llava.token("<s>") and llava.stops == (llava.token("</s>"),)
    assert llava.media_token("vision") == llava.token("<image>") and llava.table_size == llava.token("<image>")
    assert qwen.bos is None and qwen.stops == (qwen.token("<|im_end|>"), qwen.token("<|endoftext|>"))
    assert qwen.pad == qwen.token("<|endoftext|>") and qwen.eos == qwen.token("<|im_end|>")
    assert llama.bos == llama.token("<|begin_of_text|>") and llama.eos == llama.token("<|eot_id|>")
    # Placeholders of other encoders come after the vocabulary, and need no row of a table.
    assert qwen.media_token("audio") >= qwen.table_size and qwen.vocab_size == qwen.media_token("audio") + 1


def test_a_named_template_under_a_tokenizer_without_bos() -> None:
    tokenizer, _ = folder("qwen2_vl")
    laid = encode_dialogue(tokenizer, {}, {}, (("q", "a"),))
    assert laid.tokens == [*tokenizer.encode("q a"), tokenizer.eos] and laid.weights[0] == 0


def test_media_of_other_encoders_and_images_without_a_mark() -> None:
    """A folder's template writes its own token for an image; a recording is where its mark is."""
    encoders = {
        "vision": EncoderSpec(patch=1, channels=3),
        "audio": EncoderSpec(patch=1, axes=1, channels=8),
    }
    tokenizer, template = folder("qwen2_vl")
    sees, hears = tokenizer.media_token("vision"), tokenizer.media_token("audio")
    token_counts = {"vision": [2], "audio": [3]}
    laid = encode_dialogue(tokenizer, encoders, token_counts, (("say <recording> now", "a"),), template=template)
    start, end = tokenizer.token("<|vision_start|>"), tokenizer.token("<|vision_end|>")
    at = laid.tokens.index(sees)
    assert laid.tokens[at - 1 : at + 3] == [start, sees, sees, end]
    at = laid.tokens.index(hears)
    assert laid.tokens[at : at + 3] == [hears] * 3 and not any(laid.weights[at : at + 3])
    # LLaVA's data have an image on a line of its own.
    first, second = (
        encode_dialogue(tokenizer, encoders, {"vision": [2]}, ((f"<image>{line}what", "a"),), template=template)
        for line in ("", "\n")
    )
    assert first == second


def test_a_language_models_template_has_images_where_their_marks_are() -> None:
    encoders = {"vision": EncoderSpec(patch=1, channels=3)}
    tokenizer, template = folder("llama3")
    laid = encode_dialogue(tokenizer, encoders, {"vision": [2]}, (("a <image>\nb", "c"),), template=template)
    sees = tokenizer.media_token("vision")
    wanted = encode_dialogue(tokenizer, {}, {}, (("a \nb", "c"),), template=template).tokens
    at = laid.tokens.index(sees)
    assert laid.tokens[at : at + 2] == [sees] * 2
    assert tokenizer.decode(laid.tokens) == tokenizer.decode(wanted)


def test_text_that_holds_an_image_token_is_refused() -> None:
    tokenizer, template = folder("qwen2_vl")
    with pytest.raises(ValueError, match=r"<\|image_pad\|>, which stands for an image"):
        encode_dialogue(tokenizer, {}, {}, (("<|image_pad|>", "a"),), template=template)


TURNS_APART = "{% for m in messages %}{{ (m['content'] if loop.last else m['content'][:1]) + '/' }}{% endfor %}"


def written(folder: Path, template: str) -> FolderTemplate:
    (folder / "tokenizer.json").write_text((FOLDERS / "llama3" / "tokenizer.json").read_text("utf-8"))
    (folder / "chat_template.jinja").write_text(template)
    return read_template(str(folder))


def test_a_template_whose_answers_cannot_be_told_apart_is_named(tmp_path: Path) -> None:
    template = written(tmp_path, TURNS_APART)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja writes earlier turns in another way .*generation"):
        template.render(as_turns((("one", "two"), ("three", "four"))))


THINKING = """\
{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>' }}
{{- '<think></think>' if m['role'] == 'assistant' and loop.last }}
{{- m['content'] + '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>' if add_generation_prompt }}
"""


def test_a_template_that_drops_thoughts_of_earlier_turns(tmp_path: Path) -> None:
    """An earlier answer is then its text and the end token, the last one all that the model says."""
    shutil.copy(FOLDERS / "llama3" / "tokenizer_config.json", tmp_path)
    for content, answer in (("m['content']", " two "), ("m['content'] | trim", "two")):
        template = written(tmp_path, THINKING.replace("m['content']", f"({content})"))
        rendered = template.render(as_turns((("one", " two "), ("three", "four"))))
        learned = [rendered.text[start:end] for start, end, _ in rendered.learned]
        assert learned == [f"{answer}<|eot_id|>", "<think></think>four<|eot_id|>"]
        assert rendered.lead == "<think></think>"


def test_what_a_template_writes_in_front_of_every_answer_is_learned(tmp_path: Path) -> None:
    """Also where it writes a question in another way when it is the last, so that no text begins with a shorter one."""
    shutil.copy(FOLDERS / "llama3" / "tokenizer_config.json", tmp_path)
    mark = "{{ '!' if loop.last and m.role == 'user' }}"
    turn = "[{{ m.role }}" + mark + "]{{ '<t>' if m.role == 'assistant' }}{{ m.content }}<|eot_id|>"
    source = "{% for m in messages %}" + turn + "{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
    rendered = written(tmp_path, source).render(as_turns((("one", "two"), ("three", "four"))))
    learned = [rendered.text[start:end] for start, end, _ in rendered.learned]
    assert learned == ["<t>two<|eot_id|>", "<t>four<|eot_id|>"] and rendered.apart


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", r"chat_template\.jinja:1 is no Jinja template .*get it again"),
        ("{{ messages.append(1) }}", "refuses the dialogue"),
        ("{{ ''.__class__.__mro__ }}", "refuses the dialogue"),
        ("{{ raise_exception('no') }}", "refuses the dialogue: no"),
        ("{{ 1 / 0 }}", "fails on the dialogue .ZeroDivisionError"),
    ],
)
def test_templates_that_fail_or_reach_out(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        written(tmp_path, template).render(as_turns((("q", "a"),)))


def test_every_dialogue_is_of_the_same_day(tmp_path: Path) -> None:
    template = written(tmp_path, "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template.render(as_turns((("q", "a"),))).text == "2024-07-26qa"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"image_processor_type": "OddImageProcessor"}, "image_processor_type='OddImageProcessor' is none of CLIP"),
        ({"image_processor_type": "CLIPImageProcessor", "rescale_factor": 1.0}, "rescale_factor=1.0"),
        ({"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}, "crops nothing"),
        *(
            ({"image_processor_type": kind, **wrong}, "has values that no processor writes .*; get it again")
            for kind, wrong in (
                ("CLIPImageProcessor", {"image_mean": "bright"}),
                ("CLIPImageProcessor", {"size": [1, 2]}),
                ("CLIPImageProcessor", {"crop_size": {}}),
                ("CLIPImageProcessor", {"resample": 9}),
                ("CLIPImageProcessor", {"rescale_factor": "x"}),
                ("Qwen2VLImageProcessor", {"size": {}}),
                ("Siglip2ImageProcessor", {"max_num_patches": {}}),
                ("LlavaOnevisionImageProcessor", {"image_grid_pinpoints": [3], "size": {"height": 0, "width": 0}}),
            )
        ),
    ],
)
def test_rules_that_no_setting_has(tmp_path: Path, rules: Any, said: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    with pytest.raises(ConfigError, match=said):
        image_settings(str(tmp_path))


def test_older_files_name_extractors_and_have_one_number_for_a_size(tmp_path: Path) -> None:
    rules = {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "image_mean": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    assert image_settings(str(tmp_path)) == image_settings(str(FOLDERS / "vit"))


def test_a_sentencepiece_file_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"tokenizer\.model .*; save_pretrained its AutoTokenizer"):
        make_tokenizer(str(tmp_path), ())


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_a_source_gives_the_processors_tokens_and_pixels(tmp_path: Path, name: str) -> None:
    """From messages in a file to samples, through the index."""
    dialogues_of = [dialogues()[name][which]["messages"] for which in ("image", "one")]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in dialogues_of))
    rules: Any = image_settings(str(FOLDERS / name))
    config = SourceConfig(path=str(tmp_path / "data.jsonl"), media=str(FOLDERS), template="folder", **rules)
    data = DataConfig(
        sources={"own": 1.0}, tokenizer=str(FOLDERS / name), cache=str(tmp_path / "cache"), sequence_length=512
    )
    source = make_source(DataSpec(data, sources={"own": config}), {"vision": TOKENS[name]}, seed=0, split="test")
    for number, which in enumerate(("image", "one")):
        sample = source.sample(number)
        assert source.meta(number).tokens == len(sample.tokens)
        end = [folder(name)[0].eos] if name == "llava" else []
        assert sample.tokens.tolist() == [*dialogues()[name][which]["ids"], *end]
    (medium,) = source.sample(0).media["vision"]
    assert np.abs(medium[::STRIDE, ::STRIDE] - values()[f"{name}/odd.png/0"]).max() <= 1e-5
