"""Chat templates of language models with places for images: where a message has an image, its text has a mark."""

from __future__ import annotations

from collections.abc import Collection

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
    """A template that takes messages with images, where ``source`` takes text alone.

    Args:
      source: the template of a language model.
      image: the text that stands for an image.
      parts: the roles whose content ``source`` takes as a list of parts.
    """
    begin = _SOURCE.replace("'IMAGE'", repr(image)).replace("ROLES", repr(sorted(parts)))
    return _BEGIN + begin + source


def has_inline_images(source: str) -> bool:
    """Whether a template is one that ``with_inline_images`` has made: it writes a text around images as it is given."""
    return source.startswith(_BEGIN)
