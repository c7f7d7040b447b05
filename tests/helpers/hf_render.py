"""A second, independent rendering of chat templates: jinja2 set up as transformers sets it up."""

import json
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(lineno)

    def _same(self, caller):
        return caller()


def _raise(message):
    raise jinja2.TemplateError(message)


def compile_template(text: str, now: float):
    """Return a function of messages and options that renders as `apply_chat_template` does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda f: datetime.fromtimestamp(now).strftime(f)
    template = environment.from_string(text)

    def render(messages, ask=True, tools=None, **special):
        return template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=ask, **special
        )

    return render
