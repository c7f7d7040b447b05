"""Chat templates as untrusted programs: Jinja with the settings of `transformers`, and bounds.

A template comes out of a downloaded folder, so its work and its output are bounded by counting, not
by a clock: the same template ends the same way on every machine. Loops, calls, operators, container
literals and filters are charged to a budget before they are carried out, and a template that spends
it raises `TemplateUnsafe`. Attribute access is Jinja's immutable sandbox.

What keeps single operations bounded:

- `for` charges the length of what it walks times the text in its body; a generator is cut off.
- `+`, `*`, `%`, `~` and `**` are checked by the sizes of their operands before they run.
- Container literals are measured in depth, so that no list of lists grows exponentially by
  reference and is then printed, compared or sorted in one step.
- A number in the arguments of a filter or a method is at most `MAX_INT_ARGUMENT` (a width, an
  indent, a count).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context, Macro, Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from kalos_ctx.errors import TemplateUnsafe

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 24
MAX_STEPS = 1 << 21
MAX_INT_ARGUMENT = 1 << 16
MAX_DEPTH = 64
FORBIDDEN_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
# Filters without use in a chat template whose cost cannot be told from their arguments.
FORBIDDEN_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr", "random")
# Filters and methods whose result is longer than their value by a factor that an argument sets.
WIDENING_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map")
GROWING = frozenset(("indent", "tojson", "format", "batch", "slice", "sum", *WIDENING_METHODS))
# Filters that take constant time whatever the size of their value.
CHEAP_FILTERS = frozenset({"length", "count", "first", "last", "default", "d"})
WIDE_FORMAT = re.compile(r"[0-9]{5,}")


class TemplateRaised(TemplateUnsafe):
    """The template called `raise_exception`: it refuses these messages, by design."""


class Budget:
    """What one rendering may still spend."""

    __slots__ = ("output", "steps")

    def __init__(self, input_chars: int) -> None:
        self.steps = MAX_STEPS + 8 * input_chars
        self.output = MAX_OUTPUT_CHARS + 8 * input_chars

    def charge(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TemplateUnsafe("the template does more work than a chat template may")

    def emit(self, chars: int) -> None:
        self.output -= chars
        if self.output < 0:
            raise TemplateUnsafe("the template writes more text than a chat template may")


def deep_size(value: Any, budget: Budget, depth: int = 0) -> int:
    """Count the characters and elements of plain data; shared parts count each time."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, int) and value.bit_length() > 256:
        raise TemplateUnsafe("the template computes with numbers of more than 256 bits")
    if isinstance(value, Namespace):
        # A namespace can be made to hold itself; as data it has no use.
        raise TemplateUnsafe("the template uses a namespace as a value")
    if not isinstance(value, (list, tuple, Mapping, set, frozenset)):
        return 1
    if depth > MAX_DEPTH:
        raise TemplateUnsafe(f"the template nests data deeper than {MAX_DEPTH}")
    # Walking is slower than the steps that the budget is made for.
    budget.charge(8 * (len(value) + 1))
    size = 1
    for item in value:
        size += deep_size(item, budget, depth + 1)
        if isinstance(value, Mapping):
            size += deep_size(value[item], budget, depth + 1)
        if size > budget.output:
            raise TemplateUnsafe("the template builds more data than a chat template may")
    return size


class _Bounds(NodeTransformer):
    """Rewrite a parsed template so that loops, `~` and container literals are charged."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        weight = 1 + sum(len(d.data) for part in node.body for d in _text_of(part))
        charged = nodes.Filter(
            node.iter, "_charge_loop", [nodes.Const(weight)], [], None, None, lineno=node.lineno
        )
        node.iter = charged
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        joined = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(joined, "_concat", [], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        return nodes.Filter(node, "_measure", [], [], None, None, lineno=node.lineno)

    visit_Tuple = visit_List
    visit_Dict = visit_List


def _text_of(node: nodes.Node) -> Iterable[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in transformers, where the tag is a call block.
        return nodes.Scope(body, lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRaised("the template refuses these messages (raise_exception)")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, template: GuardedTemplate) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=self._finalize,
            autoescape=False,
        )
        self._owner = template
        self._state = template.state
        for name in FORBIDDEN_FILTERS:
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guard_filter(name, function)
        self.filters["_charge_loop"] = self._charge_loop
        self.filters["_concat"] = self._concat
        self.filters["_measure"] = self._measure
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = template.strftime_now

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        for kind in FORBIDDEN_NODES:
            if source.find(kind) is not None:
                raise TemplateUnsafe(f"the template uses {kind.__name__.lower()}, which is refused")
        _Bounds().visit(source)
        return super()._generate(source, name, filename, defer_init)

    @property
    def budget(self) -> Budget:
        # Constant folding at compile time runs operators too, before any rendering.
        budget: Budget | None = getattr(self._state, "budget", None)
        if budget is None:
            raise TemplateUnsafe("the template is used outside a rendering")
        return budget

    def _finalize(self, value: Any) -> Any:
        if isinstance(value, str):
            self.budget.emit(len(value))
        else:
            self.budget.emit(deep_size(value, self.budget))
        return value

    def _charge_loop(self, value: Any, weight: int) -> Any:
        budget = self.budget
        if isinstance(value, Undefined):
            return value
        if not hasattr(value, "__len__"):
            limit = budget.steps // weight + 1
            value = list(islice(iter(value), limit))
        budget.charge(len(value) * weight)
        return value

    def _concat(self, parts: list[Any]) -> str:
        self.budget.charge(sum(deep_size(part, self.budget) for part in parts) // 64 + 1)
        return "".join(str(part) for part in parts)

    def _measure(self, value: Any) -> Any:
        deep_size(value, self.budget)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.charge(1)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            # The frequent case: one copy of two strings.
            self._check_size(len(left) + len(right))
            return left + right
        sizes = deep_size(left, budget), deep_size(right, budget)
        if operator == "*":
            times = [n for n in (left, right) if isinstance(n, int)]
            largest = max((abs(n) for n in times), default=1)
            if len(times) < 2 and not isinstance(left, float) and not isinstance(right, float):
                self._check_size(largest * max(sizes))
        elif operator == "%" and isinstance(left, str):
            self._check_arguments((left, right))
            if WIDE_FORMAT.search(left):
                raise TemplateUnsafe("the template formats with a width of more than 4 digits")
            self._check_size((left.count("%") + 1) * sum(sizes) + MAX_INT_ARGUMENT)
        elif operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= 64):
            raise TemplateUnsafe("the template raises to a power above 64")
        elif operator == "+":
            self._check_size(sum(sizes))
        return super().call_binop(context, operator, left, right)

    def _check_size(self, chars: int) -> None:
        budget = self.budget
        if chars > budget.output:
            raise TemplateUnsafe("the template builds a longer text than a chat template may")
        budget.charge(chars // 64)

    def _check_arguments(self, arguments: Iterable[Any]) -> None:
        for value in arguments:
            if (
                isinstance(value, (int, float))
                and not -MAX_INT_ARGUMENT <= value <= MAX_INT_ARGUMENT
            ):
                raise TemplateUnsafe(
                    f"the template passes a number beyond {MAX_INT_ARGUMENT} to a filter or method"
                )
            if isinstance(value, (list, tuple)):
                self._check_arguments(value)

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name in CHEAP_FILTERS:
            return function
        passes = getattr(function, "jinja_pass_arg", None)

        def guarded(*arguments: Any, **options: Any) -> Any:
            given = arguments[1:] if passes is not None else arguments
            self._guard_call(name, given, options)
            result = function(*arguments, **options)
            if name == "map" and not hasattr(result, "__len__"):
                # Lazily mapped calls would escape their charge.
                result = list(islice(result, self.budget.steps + 1))
            return result

        if passes is not None:
            guarded.jinja_pass_arg = passes  # type: ignore[attr-defined]
        return guarded

    def _guard_call(self, name: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        budget = self.budget
        if len(given) == 1 and isinstance(given[0], str) and not options and name not in GROWING:
            budget.charge(1 + len(given[0]) // 64)
            return
        size = sum(deep_size(value, budget) for value in given)
        self._check_arguments(given[1:])
        self._check_arguments(options.values())
        budget.charge(1 + size // 16)
        if name == "replace" and len(given) >= 3:
            text, old, new = str(given[0]), str(given[1]), str(given[2])
            self._check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
        elif name == "join":
            separator = max(
                (len(v) for v in (*given, *options.values()) if isinstance(v, str)), default=0
            )
            elements = len(given[0]) if hasattr(given[0], "__len__") else 1
            self._check_size(size + elements * (separator + 1))
        elif name in GROWING:
            widths = [abs(v) for v in (*given[1:], *options.values()) if isinstance(v, int)]
            texts = [len(v) for v in (*given[1:], *options.values()) if isinstance(v, str)]
            self._check_size(size * (2 + max(widths + texts, default=0)))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        if isinstance(__obj, Macro):
            budget.charge(__self._owner.text_chars // 16 + 1)
        else:
            # Jinja's stand-in for str.format keeps the bound method it replaces.
            method = getattr(__obj, "__wrapped__", __obj)
            owner = getattr(method, "__self__", None)
            name = getattr(method, "__name__", "")
            if name in ("format", "format_map") and WIDE_FORMAT.search(str(owner)):
                raise TemplateUnsafe("the template formats with a width of more than 4 digits")
            if isinstance(owner, (str, list, tuple, dict)):
                __self._guard_call(name, (owner, *args), kwargs)
            else:
                budget.charge(1)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (dict, list, tuple)):
            deep_size(result, budget)
        return result


class GuardedTemplate:
    """A compiled chat template whose renderings are bounded.

    Parameters
    ----------
    source : str
        The Jinja text.

    Raises
    ------
    TemplateUnsafe
        The text does not compile, is longer than 1 MiB, or uses a construct that is refused.

    Notes
    -----
    Thread-safe: what a rendering may spend lives in thread-local state.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateUnsafe(f"the template is longer than {MAX_SOURCE_CHARS} characters")
        self.source = source
        self.text_chars = len(source)
        self.state = threading.local()
        self.clock_formats: set[str] = set()
        self._environment = _Sandbox(self)
        # Operators on constants are folded while the template compiles and need a budget then.
        self.state.budget = Budget(len(source))
        try:
            self._template = self._environment.from_string(source)
        except TemplateUnsafe:
            raise
        except (
            jinja2.TemplateError,
            RecursionError,
            MemoryError,
            SyntaxError,
            ValueError,
        ) as error:
            line = getattr(error, "lineno", None)
            where = f" at line {line}" if line else ""
            raise TemplateUnsafe(
                f"the template does not compile{where}: {type(error).__name__}"
            ) from error
        finally:
            self.state.budget = None

    def strftime_now(self, layout: str) -> str:
        """Format the injected clock in local time, as transformers formats the real one."""
        if len(layout) > 256:
            raise TemplateUnsafe("the template asks for a date in a layout of over 256 characters")
        self.clock_formats.add(layout)
        return datetime.fromtimestamp(self.state.now).strftime(layout)

    def render(self, variables: Mapping[str, Any], now: float, input_chars: int = 0) -> str:
        """Render with `variables`.

        Parameters
        ----------
        variables : mapping
            Names of the template, such as `messages` and `add_generation_prompt`.
        now : float
            Seconds as `time.time()` for `strftime_now`.
        input_chars : int
            Size of the conversation's text; long input may cost more.

        Raises
        ------
        TemplateRaised
            The template called `raise_exception`.
        TemplateUnsafe
            It failed, or did more than a chat template may.
        """
        state = self.state
        state.budget = Budget(input_chars)
        state.now = now
        try:
            return self._template.render(variables)
        except TemplateUnsafe:
            raise
        except RecursionError:
            raise TemplateUnsafe("the template recurses without end") from None
        except MemoryError:
            raise TemplateUnsafe("the template asks for more memory than there is") from None
        except Exception as error:
            # Jinja passes on whatever an expression raises; its text may quote the messages.
            raise TemplateUnsafe(
                f"the template fails with {type(error).__name__} on these messages"
            ) from None
        finally:
            state.budget = None
