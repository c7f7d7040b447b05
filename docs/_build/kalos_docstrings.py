"""Docstrings as the reference shows them: compiled modules included, errors linked.

Griffe reads Python and `.pyi` files. The compiled modules' docstrings stand in `.pyx` files, which
it cannot read, so they are found there by their indentation and given to the stubs. `Raises`
sections of this project name several errors a line; each becomes an item of its own, with what the
error says of itself and a link to the page of errors.
"""

import ast
import inspect
import re
from pathlib import Path

import griffe

ERRORS = "kalos_ctx.errors"
SOURCES = Path(__file__).resolve().parents[2] / "cython_ext"
DEFINITION = re.compile(
    r"(?P<indent> *)(?:(?:cdef|cpdef|async) )*(?:class (?P<class>\w+)"
    r"|(?:def|cpdef)\b[^(]*?\b(?P<function>\w+)\()"
)
DOCSTRING = re.compile(r'\s*("""(?:.*?)""")', re.DOTALL)
NAME = re.compile(r"[A-Z]\w+\Z")


def pyx_docstrings(text):
    """Return docstrings by dotted name of the class or function that they are of."""
    found, owner = {}, ("", -1)
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    for number, line in enumerate(lines):
        match = DEFINITION.match(line)
        if match is None:
            continue
        indent, name = len(match["indent"]), match["class"] or match["function"]
        if match["class"]:
            owner = (name, indent)
        elif indent <= owner[1]:
            owner = ("", -1)
        end = number
        while end < len(lines) and not lines[end].split("#")[0].rstrip().endswith(":"):
            end += 1
        docstring = DOCSTRING.match(text, offsets[min(end + 1, len(lines))])
        if docstring is not None:
            full = name if match["class"] or not owner[0] else f"{owner[0]}.{name}"
            found.setdefault(full, ast.literal_eval(docstring[1]))
    return found


class KalosDocstrings(griffe.Extension):
    """Fills in and refines docstrings once the package is loaded."""

    def on_package(self, *, pkg, loader, **_):
        """Do both for a whole package."""
        self.errors = pkg["errors"]
        for module in pkg.modules.values():
            source = SOURCES.joinpath(*module.path.split(".")).with_suffix(".pyx")
            if not module.is_alias and source.is_file():
                self._fill(module, pyx_docstrings(source.read_text(encoding="utf-8")))
        self._walk(pkg)

    def _fill(self, module, docstrings):
        for name, text in docstrings.items():
            try:
                found = module[name]
            except KeyError:
                continue
            if not found.is_alias and found.docstring is None:
                found.docstring = griffe.Docstring(inspect.cleandoc(text), parent=found)

    def _walk(self, owner):
        for member in owner.members.values():
            if member.is_alias:
                continue
            if member.docstring is not None and "Raises\n---" in member.docstring.value:
                self._link_errors(member.docstring)
            self._walk(member)

    def _link_errors(self, docstring):
        """Parse now, with `Raises` taken apart; the handler takes what was parsed."""
        sections = []
        # Dataclasses have no parameters yet: what does not fit a signature is for the tests to say.
        for section in docstring.parse("numpy", warnings=False):
            if section.kind is not griffe.DocstringSectionKind.raises:
                sections.append(section)
                continue
            items, prose = [], []
            for item in section.value:
                # "A, B" was taken for a tuple.
                for part in str(item.annotation).strip("()").split(","):
                    name = part.strip()
                    if NAME.match(name) and name in self.errors.members:
                        items.append(self._item(name, item.description))
                    elif name:
                        prose.append(name)
            if items:
                sections.append(griffe.DocstringSectionRaises(items, title=section.title))
            if prose:
                text = ", ".join(prose)
                before = "And " if items else "**Raises:** "
                text = text if not items else text.removeprefix("and ")
                sections.append(griffe.DocstringSectionText(before + text.rstrip(".") + "."))
        docstring.__dict__["parsed"] = sections

    def _item(self, name, description):
        error = self.errors.members[name]
        return griffe.DocstringRaise(
            annotation=griffe.ExprName(name, parent=self.errors),
            description=description or error.docstring.value.split("\n")[0],
        )
