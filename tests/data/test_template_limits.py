"""Templates that loop for ever or write without end: one line, in bounded time and memory; others as they were."""

from __future__ import annotations

import pytest

from mmjax.configurable import ConfigError
from mmjax.data.processor import template_limits
from mmjax.data.processor.sandbox import compiled

pytest.importorskip("jinja2")

PLACE = "folder/chat_template.jinja"
BIG, LONG = "10000000000", "('x'*100000)"
DOUBLED = (
    "{{% set ns = namespace(a={0}) %}}{{% for i in range(60) %}}{{% set ns.a = {1} %}}{{% endfor %}}{{{{ ns.a }}}}"
)
TEXTS = [
    f"{{{{ 'x'*{BIG} }}}}",
    f"{{{{ {BIG}*['x'] }}}}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '%.2000000000f' % 1 }}",
    "{{ '%2000000000d'|format(1) }}",
    f"{{{{ '{{:>{BIG}}}'.format(1) }}}}",
    f"{{{{ '{{:{{}}}}'.format(1, {BIG}) }}}}",
    f"{{{{ 'x'|center({BIG}) }}}}",
    f"{{{{ 'x'.ljust({BIG}) }}}}",
    f"{{{{ 'x'|attr('zfill')({BIG}) }}}}",
    f"{{{{ 'x'.encode().center({BIG}) }}}}",
    f"{{{{ ['a']|map('center', {BIG})|list }}}}",
    f"{{% filter center({BIG}) %}}x{{% endfilter %}}",
    f"{{{{ '\t'.expandtabs({BIG}) }}}}",
    f"{{{{ {LONG}.replace('x', {LONG}) }}}}",
    f"{{{{ {LONG}|replace('x', {LONG}) }}}}",
    f"{{{{ {LONG}.join(['y']*9999) }}}}",
    f"{{{{ (['y']*9999)|join({LONG}) }}}}",
    f"{{{{ {LONG}.translate({{120: {LONG}}}) }}}}",
    f"{{{{ ('x\n'*9999)|indent({LONG}) }}}}",
    f"{{{{ 'x'|indent({BIG}) }}}}",
    f"{{{{ ('x '*9999)|wordwrap(1, wrapstring={LONG}) }}}}",
    f"{{{{ [1]|batch({BIG}, 'x')|list }}}}",
    f"{{{{ [1]|slice({BIG})|list }}}}",
    f"{{{{ messages|tojson(indent={BIG}) }}}}",
    "{{ strftime_now('%2000000000d') }}",
    "{{ 10**1000000000 }}",
    DOUBLED.format("'x'", "ns.a ~ ns.a"),
    DOUBLED.format("'x'", "ns.a + ns.a"),
    DOUBLED.format("[1]", "ns.a + ns.a"),
]


@pytest.mark.parametrize("source", TEXTS)
def test_texts_without_end_are_named_before_they_are_made(source):
    with pytest.raises(ConfigError, match=rf"^{PLACE} makes a text of more than 16777216 characters .*'chatml'$"):
        compiled(source, PLACE)


NESTED = ("[ns.a, ns.a]", "(ns.a, ns.a)", "{'a': ns.a, 'b': ns.a}", "dict(a=ns.a, b=ns.a)")
ENDLESS = [
    "{% for i in range(9999) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set a = [1]|first %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% set a %}{% for j in range(99999) %}x{% endfor %}{% endset %}{% endfor %}",
    *(DOUBLED.format("[]", values) for values in NESTED),
]


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_end(source, monkeypatch):
    monkeypatch.setattr(template_limits, "MOST_STEPS", 5000)
    monkeypatch.setattr(template_limits, "MOST_ELEMENTS", 5000)
    monkeypatch.setattr(template_limits, "MOST_IN_ALL", 1 << 23)
    with pytest.raises(
        ConfigError, match=rf"^{PLACE} (takes|makes a value of|makes a text of) more than .* for one dialogue; get it"
    ):
        compiled.__wrapped__(source, PLACE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "nested too deeply"),
        ("{{ x" + ".a" * 20000 + " }}", "nested too deeply"),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "9" * 6000 + " }}", "Exceeds the limit"),
    ],
)
def test_templates_that_cannot_be_read(source, said):
    with pytest.raises(ConfigError, match=f"^{PLACE} is no template that can be read .*{said}.*; get it again$"):
        compiled(source, PLACE)


def test_a_dialogue_that_is_too_long_for_a_template_is_refused_alone(monkeypatch):
    """It is left out; the template is good for others."""
    import jinja2

    monkeypatch.setattr(template_limits, "MOST_STEPS", 100_000)
    template = compiled.__wrapped__(
        "{% for m in messages %}{% for n in messages %}{{ m.content }}{% endfor %}{% endfor %}", PLACE
    )
    messages = [{"role": "user", "content": "ab"}] * 20_000
    with pytest.raises(jinja2.TemplateError, match="it takes more than 100000 steps"):
        template.render(messages=messages)
    assert template.render(messages=messages[:3]) == "ab" * 9


def test_values_are_those_of_jinja():
    source = (
        "{{ 'a' ~ 1 ~ none }}|{{ 'x' * 3 }}|{{ [1] + [2] }}|{{ '%03d' % 7 }}|{{ 2 ** 5 }}|{{ (1, 'b') }}"
        "|{{ {'k': [m]} }}"
        "|{{ 'abc'.replace('b', 'xx') }}|{{ ['a', 'b']|join('-') }}|{{ '{:>4}{}'.format(1, 'z') }}|{{ ' q '|trim }}"
        "|{{ messages|map(attribute='role')|list }}|{{ messages|tojson }}|{{ [3, 1]|sort }}|{{ 'a b'.split() }}"
        "|{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(2) }}|{% set s %}in{% endset %}{{ s }}|{{ 7 // 2 }}"
        "|{{ 'é'|length }}"
        "|{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{{ ',' if not loop.last }}{% endfor %}|{{ 'A'|lower|upper }}"
        "|{% set ns = namespace(n=0) %}{% for i in range(9) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
    )
    messages = [{"role": "user", "content": "q"}]
    assert compiled(source, PLACE).render(messages=messages, m=1.5) == (
        "a1None|xxx|[1, 2]|007|32|(1, 'b')|{'k': [1.5]}|axxc|a-b|   1z|q|['user']|"
        '[{"role": "user", "content": "q"}]|[1, 3]|[\'a\', \'b\']|<2>|in|3|1|3,7|A|36'
    )
