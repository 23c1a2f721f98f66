"""Adds places for images to chat templates of language models: a mark in the text of a message for each image."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mmjax.data.chat import BOS, EOS, SYSTEM, TEXT, Template

_BEGIN = "{#- Parts of messages become text, with a mark for each image. -#}\n"
_SOURCE = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
    {%- set text = namespace(whole='') -%}
    {%- if message['content'] is string -%}
        {%- set text.whole = message['content'] -%}
    {%- else -%}
        {%- for part in message['content'] or [] -%}
            {%- if part['type'] in ['image', 'image_url'] -%}
                {%- set text.whole = text.whole + 'IMAGE' -%}
            {%- elif 'text' in part -%}
                {%- set text.whole = text.whole + part['text'] -%}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- if message['role'] in ROLES -%}
        {%- set content = [{'type': 'text', 'text': text.whole}] -%}
    {%- else -%}
        {%- set content = text.whole -%}
    {%- endif -%}
    {%- set flat.messages = flat.messages + [dict(message, content=content)] -%}
{%- endfor -%}
{%- set messages = flat.messages %}
"""


def with_inline_images(source: str, image: str, parts: Collection[str]) -> str:
    """A template that takes messages with images, made from ``source``, which takes only text. Both are texts of Jinja.

    Args:
      source: the chat template of a language model.
      image: the text that stands for an image, such as "<image>".
      parts: the roles, such as "user", whose content ``source`` takes as a list of parts; () if it takes only strings.
    """
    begin = _SOURCE.replace("'IMAGE'", repr(image)).replace("ROLES", repr(sorted(parts)))
    return _BEGIN + begin + source


_DIALOGUE = """\
{%- set dialogue = namespace(system='', text=BEGIN) -%}
{%- for message in messages -%}
    {%- set text = message['content']STRIP -%}
    {%- if message['role'] == 'system' -%}
        {%- set dialogue.system = ABOVE -%}
    {%- elif message['role'] == 'user' -%}
        {%- set dialogue.text = dialogue.text + QUESTION -%}
        {%- set dialogue.system = '' -%}
    {%- else -%}
        {%- set dialogue.text = dialogue.text + ANSWER -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- (dialogue.text + PROMPT).rstrip(' ') -}}
{%- else -%}
    {{- dialogue.text + (END if messages[-1]['role'] == 'assistant' else '') -}}
{%- endif -%}
"""
_PIECE = re.compile("|".join(f"({re.escape(mark)})" for mark in (TEXT, SYSTEM, BOS, EOS)))


def jinja_of(template: Template, bos: str, eos: str, end: str) -> str:
    """The Jinja source of one of mmjax's templates, for messages of text.

    A prompt has no blank at its end: it belongs to the first token of the answer.

    Args:
      template: the template, such as TEMPLATES["vicuna"] of ``mmjax.data.chat``.
      bos: the text of the token at the beginning of every dialogue, such as "<s>"; "" for none.
      eos: the text of the end token, such as "</s>".
      end: text after the last answer, such as an end token that ``template`` does not write; "" for none.
    """
    values = {TEXT: "text", SYSTEM: "dialogue.system", BOS: repr(bos), EOS: repr(eos)}
    first = template.question if SYSTEM in template.question else template.system
    above = _expression(template.system, values | {TEXT: "message['content']"})
    inside = SYSTEM in template.question
    pieces = {
        "BEGIN": "''" if first.startswith(BOS) else repr(bos),
        "STRIP": " | trim" if template.strip else "",
        "ABOVE": above,
        "QUESTION": _expression(template.question if inside else SYSTEM + template.question, values),
        "ANSWER": _expression(template.answer, values),
        "PROMPT": _expression(template.answer.split(TEXT)[0], values),
        "END": repr(end),
    }
    return re.sub("|".join(pieces), lambda match: pieces[match[0]], _DIALOGUE)


def _expression(piece: str, values: Mapping[str, str]) -> str:
    """A piece of a template as a Jinja sum of texts and of values, which replace its marks."""
    parts = [part for part in _PIECE.split(piece) if part]
    return " + ".join(values.get(part) or repr(part) for part in parts) or "''"


def has_inline_images(source: str) -> bool:
    """Whether ``with_inline_images`` made the template with this Jinja ``source``. It writes the text around images
    unchanged.
    """
    return source.startswith(_BEGIN)
