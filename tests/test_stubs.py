"""The stubs of the compiled modules are those modules; what a public call raises is written down.

Nothing here needs mypy: the modules are imported, the stubs and the `.pyx` files parsed.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import kalos_ctx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(kalos_ctx.__file__).resolve().parent
SOURCES = ROOT / "cython_ext" / "kalos_ctx"
MODULES = sorted(path.stem for path in SOURCES.glob("*.pyx"))
# Parameters of a `def` in a stub, in order, by kind.
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**",
}
# Calls of a public class that stand there for other modules of the package, not for users.
HOOKS = {
    "checked_name", "checked_recall", "checked_tokens", "date_key", "drop_parts", "drop_view",
    "end", "fixed_segments", "forget", "listen", "live_keys", "live_window", "make_head",
    "make_rules", "plan_parts", "read_summaries", "recall_hits", "refuse_head", "session_erased",
    "set_dated", "start", "stream_handle", "strip",
}  # fmt: skip
# They raise nothing, whatever is asked of them.
SILENT = {
    "AccessRules.own_user", "AsyncClient.close", "Client.close", "Client.counts",
    "ContextAssembler.close", "ContextAssembler.combine_recalls", "ContextAssembler.gauges",
    "SessionStore.close", "TokenCodec.recall_role_used", "TokenCodec.starts_character",
}  # fmt: skip


def stub_of(name):
    return ast.parse((PACKAGE / f"{name}.pyi").read_text(encoding="utf-8"))


def members_of(body):
    """Return what a stub defines, by name: functions, classes, variables; aliases of types not."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and not is_alias(node):
            found[node.target.id] = node
    return found


def is_alias(node):
    return isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"


def public(names):
    return {name for name in names if not name.startswith("_")}


def defined_in(name):
    """Return the public names that a compiled module makes itself, those it imports left out."""
    module = importlib.import_module(f"kalos_ctx.{name}")
    source = (SOURCES / f"{name}.pyx").read_text(encoding="utf-8")
    found = {}
    for key, value in vars(module).items():
        if key.startswith("_") or isinstance(value, ModuleType):
            continue
        owner = getattr(value, "__module__", None)
        assigned = re.search(rf"^(?:\w+, )*{key}(?:, \w+)*\b.* = ", source, re.MULTILINE)
        if owner == module.__name__ or (assigned and owner not in package_modules()):
            found[key] = value
    return found


def package_modules():
    return {f"kalos_ctx.{name}" for name in MODULES}


def stubbed_classes():
    """Yield (module, class's name, stub, class) for each class of a compiled module."""
    for name in MODULES:
        module = importlib.import_module(f"kalos_ctx.{name}")
        for key, node in members_of(stub_of(name).body).items():
            if isinstance(node, ast.ClassDef):
                yield name, key, node, getattr(module, key)


def parameters_of_stub(node):
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args]
    out = [("positional", one.arg) for one in named]
    out += [("*", arguments.vararg.arg)] if arguments.vararg else []
    out += [("keyword", one.arg) for one in arguments.kwonlyargs]
    out += [("**", arguments.kwarg.arg)] if arguments.kwarg else []
    return out, len(arguments.defaults), sum(one is not None for one in arguments.kw_defaults)


def parameters_of(function):
    """Return the same of a compiled function."""
    taken = list(inspect.signature(function).parameters.values())
    out = [(KINDS[one.kind], one.name) for one in taken]
    given = [KINDS[one.kind] for one in taken if one.default is not inspect.Parameter.empty]
    return out, given.count("positional"), given.count("keyword")


# ---- Names and signatures -----------------------------------------------------------------------


def test_stubs_every_compiled_module_that_python_imports_has_one():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        imported |= set(re.findall(r"^\s*from kalos_ctx\.(_\w+) import", text, re.MULTILINE))
        for names in re.findall(r"^\s*from kalos_ctx import ([\w, ]+)$", text, re.MULTILINE):
            imported |= {name for name in re.split(r", ?", names) if name.startswith("_")}
    compiled = imported & set(MODULES)
    assert len(compiled) > 10
    assert {name for name in compiled if not (PACKAGE / f"{name}.pyi").is_file()} == set()


def test_stubs_there_is_none_without_a_module():
    assert {path.stem for path in PACKAGE.glob("*.pyi")} - set(MODULES) == set()


@pytest.mark.parametrize("name", MODULES)
def test_stubs_names_are_those_of_the_module(name):
    module = importlib.import_module(f"kalos_ctx.{name}")
    stubbed = members_of(stub_of(name).body)
    assert {key for key in stubbed if not hasattr(module, key)} == set()
    assert public(defined_in(name)) - stubbed.keys() == set()
    for key, node in stubbed.items():
        assert isinstance(node, ast.ClassDef) == inspect.isclass(getattr(module, key)), key


@pytest.mark.parametrize("name", MODULES)
def test_stubs_functions_take_what_those_of_the_module_take(name):
    module = importlib.import_module(f"kalos_ctx.{name}")
    for key, node in members_of(stub_of(name).body).items():
        if isinstance(node, ast.FunctionDef):
            assert parameters_of_stub(node) == parameters_of(getattr(module, key)), key


def test_stubs_classes_have_the_members_of_the_compiled_ones():
    wrong = []
    for name, key, node, found in stubbed_classes():
        stubbed = members_of(node.body)
        own = {member for member, value in vars(found).items() if is_member(value)}
        # A variable of an instance is no attribute of a class that is compiled Python.
        methods = {m for m, one in stubbed.items() if isinstance(one, ast.FunctionDef)}
        wrong += [f"{name}.{key}.{m}: not there" for m in methods if not hasattr(found, m)]
        wrong += [f"{name}.{key}.{m}: no stub" for m in public(own) - stubbed.keys()]
    assert wrong == []


def is_member(value):
    return callable(value) or inspect.isdatadescriptor(value) or isinstance(value, staticmethod)


def test_stubs_methods_take_what_the_compiled_ones_take():
    wrong = []
    for name, key, node, found in stubbed_classes():
        for member, one in members_of(node.body).items():
            value = inspect.getattr_static(found, member, None)
            value = getattr(value, "__func__", value)
            # Slots such as `__init__` have no signature in a compiled class.
            if not isinstance(one, ast.FunctionDef) or type(value).__name__ not in (
                "cython_function_or_method",
                "function",
            ):
                continue
            stub, there = parameters_of_stub(one), parameters_of(value)
            if stub != there:
                wrong.append(f"{name}.{key}.{member}: {stub} and {there}")
    assert wrong == []


def test_stubs_properties_are_properties():
    wrong = []
    for name, key, node, found in stubbed_classes():
        for member, one in members_of(node.body).items():
            if not isinstance(one, ast.FunctionDef):
                continue
            marks = {mark.id for mark in one.decorator_list if isinstance(mark, ast.Name)}
            value = inspect.getattr_static(found, member)
            if ("property" in marks) != inspect.isdatadescriptor(value):
                wrong.append(f"{name}.{key}.{member}")
            if ("staticmethod" in marks) != isinstance(value, staticmethod):
                wrong.append(f"{name}.{key}.{member}")
    assert wrong == []


def test_stubs_classes_that_cannot_be_derived_from_are_final():
    wrong = []
    for name, key, node, found in stubbed_classes():
        marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
        open_to_all = bool(found.__flags__ & 1 << 10)  # Py_TPFLAGS_BASETYPE
        if ("final" in marks) == open_to_all:
            wrong.append(f"{name}.{key}")
    assert wrong == []


# ---- What public calls raise --------------------------------------------------------------------


def public_calls():
    """Yield the public functions and methods that users call, with their own names."""
    for name in kalos_ctx.__all__:
        value = getattr(kalos_ctx, name)
        if not inspect.isclass(value):
            if callable(value):
                yield name, value
        elif not issubclass(value, BaseException):
            for member, function in inspect.getmembers(value, callable):
                if not member.startswith("_") and member not in HOOKS:
                    yield f"{name}.{member}", function


def test_docstrings_of_public_calls_say_what_they_raise():
    without = set()
    for name, function in public_calls():
        text = inspect.getdoc(function) or ""
        # "as `X`" says that all is as there, what is raised included.
        if "Raises\n------" not in text and not re.search(r"\b[Aa]s `\w", text):
            without.add(name)
    assert without == SILENT
