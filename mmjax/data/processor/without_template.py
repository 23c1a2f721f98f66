"""Chat templates, as texts of Jinja, of models whose folders have none because their processors write the text."""

from __future__ import annotations

from collections.abc import Mapping

_PALIGEMMA = """\
{%- if messages[0]['role'] != 'user' or messages | length > 2 -%}
    {{- raise_exception('PaliGemma takes one question, and gives one answer') -}}
{%- endif -%}
{%- set text = namespace(images='', rest='') -%}
{%- for part in messages[0]['content'] -%}
    {%- if part['type'] == 'image' -%}
        {%- set text.images = text.images + text.rest + '<image>' -%}
        {%- set text.rest = '' -%}
    {%- else -%}
        {%- set text.rest = text.rest + part['text'] -%}
    {%- endif -%}
{%- endfor -%}
{{- text.images + bos_token + text.rest + '\\n' -}}
{%- for message in messages[1:] -%}
    {%- generation -%}
        {%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
        {{- eos_token -}}
    {%- endgeneration -%}
{%- endfor -%}
"""
WITHOUT_TEMPLATE: Mapping[str, str] = {"paligemma": _PALIGEMMA}
"""Templates by the folder's "model_type"."""
