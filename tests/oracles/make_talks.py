"""Makes ``talks/``: a tiny tokenizer, chat templates, and the token ids that transformers gives to odd dialogues.

    python tests/oracles/make_talks.py

It needs transformers. ``dialogues.json`` has every template, every record (messages and tools), and by template and
record the ids of the whole dialogue, those of the prompt of its last answer and, where the template marks what is
generated, the mask of the answers; or why the template refuses the dialogue.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent / "talks"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

HEAD = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{- (call.function or call) | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
"""
TOOL = """\
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
"""
# Thoughts are written behind the last question alone, as Qwen 3 has them; nothing says what is generated.
THINKING = (
    HEAD
    + """\
{%- set last = namespace(at=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.at = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.at and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
"""
    + CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + TOOL
    + """\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
MARKED = (
    HEAD
    + """\
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content or '' }}
"""
    + CALLS
    + """\
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
"""
    + TOOL
    + """\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
PLAIN = """\
{%- for message in messages %}
{{- message.role + BEFORE + message.content + AFTER }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant' + BEFORE }}{%- endif %}
"""
TURNS = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('take turns') }}{%- endif %}
{{- message.role + ': ' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""
TEMPLATES = {
    "thinking": THINKING,
    "marked": MARKED,
    "lines": PLAIN.replace("BEFORE", "':\\n\\n'").replace("AFTER", "'<|im_end|>'"),
    "blank": PLAIN.replace("BEFORE", "': '").replace("AFTER", "'<|im_end|>\\n'"),
    "turns": TURNS,
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_LIST = [{"type": "function", "function": {"name": "zoom", "parameters": {"x": {"type": "integer"}}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
USED = [
    user("zoom in"),
    answer("", tool_calls=[call("zoom", x=1), call("zoom", x="é")]),
    {"role": "tool", "content": "done"},
    answer("It is a cat."),
]
RECORDS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [SYSTEM, user("what?"), answer("a cat"), user("and?"), answer("a dog")]},
    "call": {"tools": TOOL_LIST, "messages": USED[:2]},
    "call_without_content": {"tools": TOOL_LIST, "messages": [user("zoom"), answer(None, tool_calls=[call("zoom")])]},
    "used": {"tools": TOOL_LIST, "messages": USED},
    "used_twice": {"tools": TOOL_LIST, "messages": [SYSTEM, *USED, user("again"), *USED[1:]]},
    "thoughts": {"messages": [user("what?"), answer("a cat", reasoning_content="It has whiskers.")]},
    "old_thoughts": {
        "messages": [user("what?"), answer("a cat", thinking="whiskers"), user("and?"), answer("no", reasoning="none")]
    },
    "two_users": {"messages": [user("look"), user("what?"), answer("a cat")]},
    "two_answers": {"messages": [user("what?"), answer("a cat"), answer("or a dog")]},
    "answer_first": {"messages": [answer("Hello!"), user("what?"), answer("a cat")]},
    "late_system": {"messages": [user("what?"), {"role": "system", "content": "Be brief."}, answer("a cat")]},
    "blanks": {"messages": [user("what? "), answer(" a cat"), user("\n\nand?"), answer("\na")]},
}


def tokenizer() -> Any:
    """Bytes, and a token of two new lines: it stands at the end of a prompt, and not before a word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "a"), ("c", "a"), ("ca", "t")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def ids_of(made: Any, template: str, record: dict[str, Any]) -> dict[str, Any]:
    marks = "generation %}" in template
    about: dict[str, Any] = {"chat_template": template, "tokenize": True, "return_dict": True}
    about["tools"] = record.get("tools")
    messages = record["messages"]
    try:
        whole = made.apply_chat_template(messages, return_assistant_tokens_mask=marks, **about)
        prompt = made.apply_chat_template(messages[:-1], add_generation_prompt=True, **about)
    except Exception as error:  # a template may refuse the dialogue
        return {"refused": str(error)}
    found = {"ids": whole["input_ids"], "prompt": prompt["input_ids"]}
    return found | ({"mask": whole["assistant_masks"]} if marks else {})


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    made = tokenizer()
    made.save_pretrained(HERE)
    (HERE / "config.json").write_text(json.dumps({"model_type": "qwen2"}) + "\n")
    ids = {
        name: {which: ids_of(made, text, record) for which, record in RECORDS.items()}
        for name, text in TEMPLATES.items()
    }
    found = {"version": transformers.__version__, "templates": TEMPLATES, "records": RECORDS, "ids": ids}
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (HERE / "dialogues.json").write_text(text.replace('"used', '\n"used') + "\n")


if __name__ == "__main__":
    main()
