"""Jinja for chat templates: a sandbox like transformers' one, with bounds on time and text.

Nothing is computed while a template is compiled, since a product of constants may be arbitrarily large.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

from mmjax.configurable import ConfigError
from mmjax.data.processor.template_limits import LimitError, Meter, limited

LEARN, STOP = "\ufdd2", "\ufdd3"
"""Marks around the text that a template marks as generated."""
_TODAY = datetime(2024, 7, 26)
"""The day on which all dialogues take place: a batch must not depend on its time. It is Llama 3's default."""
_SHORT = 1 << 16
"""If a dialogue has no more characters and parts than this, it is the template's fault if limits are exceeded."""
_LIKE_CHARACTERS = 16
"""A number of a range counts as so many characters: a filter may iterate over all of them."""
_PROBES = ([{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}])
_NAMES = ("bos_token", "eos_token")


class Compiled:
    """A template that can be rendered; `compiled` makes it."""

    def __init__(self, template: Any, meter: Meter, place: str):
        self._template, self._meter, self._place = template, meter, place
        self._probe()

    def render(self, *, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The text of messages.

        Args:
          messages: the messages, with "role", "content" and perhaps other keys.
          values: other variables of the template, such as `add_generation_prompt` and `bos_token`.

        Raises:
          ConfigError: the template exceeds its limits for a short dialogue.
          jinja2.TemplateError: the template refuses the dialogue, or exceeds its limits for a long one.
        """
        import jinja2

        self._meter.start()
        try:
            return self._template.render(messages=messages, **values)
        except LimitError as error:
            if _size(messages) > _SHORT:
                raise jinja2.TemplateError(f"it {error}") from None
            fix = "get it again, or name another Source.template, such as 'chatml'"
            raise ConfigError(f"{self._place} {error} for one dialogue; {fix}") from None
        except MemoryError:
            raise jinja2.TemplateError("it takes too much memory") from None

    def _probe(self) -> None:
        """Raises ConfigError for a template that exceeds its limits for the shortest dialogues."""
        for messages in _PROBES:
            try:
                self.render(messages=messages, add_generation_prompt=True, **dict.fromkeys(_NAMES, ""))
            except ConfigError:
                raise
            except Exception:  # it may take other dialogues
                continue


@lru_cache(maxsize=16)
def compiled(source: str, place: str) -> Compiled:
    """The template with this Jinja `source`, compiled as transformers compiles it.

    Render it with `.render(messages=[{"role": "user", "content": "hello"}], add_generation_prompt=True,
    bos_token="<s>")`, which returns the text.

    place: the name of its file, for errors. Raises ConfigError if it is not Jinja, or does not end.
    """
    try:
        import jinja2
    except ImportError:
        fix = "pip install jinja2, or name another template, such as 'chatml'"
        raise ConfigError(f"Source.template='folder': {place} needs the jinja2 package: {fix}") from None
    meter = Meter()
    try:
        return Compiled(_environment(meter).from_string(source), meter, place)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{place}:{error.lineno} is no Jinja template ({error.message}); get it again") from None
    except ConfigError:
        raise
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError, LimitError) as error:
        shown = "nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error).splitlines()[0]
        raise ConfigError(f"{place} is no template that can be read ({shown}); get it again") from None


def _environment(meter: Meter) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Puts marks around the text between {% generation %} and {% endgeneration %}."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{LEARN}{caller()}{STOP}"

    class Sandbox(ImmutableSandboxedEnvironment):
        """Counts the work of a template, and stops it at the limits."""

        intercepted_binops = frozenset(("+", "*", "%", "**"))
        concat = staticmethod(meter.joined)
        step, joined, weighed = staticmethod(meter.step), staticmethod(_join_of(meter)), staticmethod(meter.weighed)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            meter.operate(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, called: Any, /, *args: Any, **keys: Any) -> Any:
            if called is self.step:
                return called()
            meter.call(called, args, keys)
            value = super().call(context, called, *args, **keys)
            if isinstance(value, range):
                meter.make(_LIKE_CHARACTERS * len(value))
            return value

        def _generate(self, source: Any, *args: Any, **keys: Any) -> str:
            return super()._generate(_counted(source), *args, **keys)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        meter.operate("%", form, ())  # it pads to widths too
        return _TODAY.strftime(form)

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
        finalize=meter.weighed,
    )
    environment.filters |= {"tojson": tojson}
    environment.filters = limited(environment.filters, meter)
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _join_of(meter: Meter) -> Any:
    def joined(*values: Any) -> str:
        return meter.joined(str(meter.weighed(value)) for value in values)

    return joined


def _counted(source: Any) -> Any:
    """Makes a parsed template count iterations of loops, calls of macros, and sizes of lists."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def call(name: str, *args: Any) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), [*args], [], None, None)

    class Counter(NodeTransformer):
        def _with_step(self, node: Any) -> Any:
            self.generic_visit(node)
            node.body.insert(0, nodes.ExprStmt(call("step")))
            return node

        visit_For = visit_Macro = visit_CallBlock = _with_step

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return call("joined", *node.nodes)

        def _weighed(self, node: Any) -> Any:
            self.generic_visit(node)
            plain = all(isinstance(part, nodes.Const) for part in node.iter_child_nodes())
            stored = getattr(node, "ctx", "load") != "load"
            return node if plain or stored else call("weighed", node)

        visit_List = visit_Dict = visit_Tuple = _weighed

    counted = Counter().visit(source)
    for node in counted.find_all(nodes.Node):
        node.environment = source.environment
    return counted


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters and parts of messages."""
    left, size = list[Any](messages), 0
    while left:
        inner = left.pop()
        size += len(inner) if isinstance(inner, str) else 1
        left += [*inner.values()] if isinstance(inner, Mapping) else inner if isinstance(inner, list | tuple) else []
    return size
