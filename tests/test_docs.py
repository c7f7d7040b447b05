"""The documentation: its code runs, its links lead somewhere, and no public name is missing.

`mkdocs build --strict` is a step of its own (`.ci/run`), since the suite does not need mkdocs; so
is what needs a framework (tests/adapters).
"""

import builtins
import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
from helpers.doc_pages import DOCS, blocks_of, commands_of, run_page
from typer.main import get_command

import kalos_ctx
from kalos_ctx import adapters, cli

ROOT = DOCS.parent
HIDDEN = ("_build", "notes")
PAGES = sorted(
    path.relative_to(DOCS)
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in HIDDEN
)
# The tutorial has a test of its own; the other pages show forms and output, no programs.
RUN = [
    page
    for page in PAGES
    if page.parts[0] in ("how-to", "coming-from")
    or str(page) in ("index.md", "reference/errors.md")
]
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
IDENTIFIER = re.compile(r"^::: ([\w.]+)", re.MULTILINE)


@pytest.mark.parametrize("page", RUN, ids=str)
def test_docs_page_code_runs_and_prints_what_it_shows(page, tmp_path):
    blocks = [block for block in blocks_of(DOCS / page) if block.runs and not block.needs]
    assert run_page(DOCS / page, tmp_path) == len(blocks) > 0


def commands_shown():
    """Yield (page, command line) for each `kalos ...` that a page shows, run or not."""
    for page in [*RUN, Path("tutorial.md")]:
        for block in blocks_of(DOCS / page):
            if block.language == "console":
                for command, _ in commands_of(block.text):
                    if command.startswith("kalos "):
                        yield str(page), shlex.split(re.sub(r"\$\(.*\)", "X", command))


def test_docs_commands_that_are_shown_take_their_options():
    commands = get_command(cli.app).commands
    shown = list(commands_shown())
    assert {words[1] for _, words in shown} >= {"import", "export", "serve", "ping", "verify"}
    for page, words in shown:
        known = {option for one in commands[words[1]].params for option in one.opts}
        strange = [word for word in words if word.startswith("--") and word not in known]
        assert strange == [], f"{page}: {' '.join(words)}"


def test_docs_code_that_is_not_run_says_why():
    reasons = [
        block.attributes.get("norun", "because")
        for page in RUN
        for block in blocks_of(DOCS / page)
        if block.language in ("python", "console")
    ]
    assert [reason for reason in reasons if len(reason.split()) < 1] == []


# ---- Links --------------------------------------------------------------------------------------


def text_of(page: Path) -> str:
    """Return a page's text with what it includes, code blocks left out."""
    text = page.read_text(encoding="utf-8")
    text = SNIPPET.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), text)
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        count = found[slug] = found.get(slug, -1) + 1
        names.add(f"{slug}_{count}" if count else slug)
    return names


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_docs_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(text_of(DOCS / page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (DOCS / page).parent / path if path else DOCS / page
        if not found.is_file() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_docs_pages_named_in_text_are_there(page):
    text = text_of(DOCS / page)
    named = set(re.findall(r"(?<![\w/.-])(docs/[\w/-]+\.md|[A-Z]{4,}\.md)\b", text))
    named.discard("LICENCES.md")  # there are several, each beside its data
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_docs_every_page_stands_in_the_navigation():
    # Read as text: a YAML parser is no dependency of this suite.
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = configuration.partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == [str(page) for page in PAGES]
    assert len(named) == len(set(named))


def test_docs_sources_at_the_root_are_included_not_copied():
    included = [match for page in PAGES for match in SNIPPET.findall((DOCS / page).read_text())]
    assert {"FORMAT.md", "DESIGN.md", "CONTRACT.md", "CHANGELOG.md", "SECURITY.md"} <= set(included)
    assert [name for name in included if not (ROOT / name).is_file()] == []


# ---- The reference ------------------------------------------------------------------------------


def documented(page: str) -> set[str]:
    return set(IDENTIFIER.findall((DOCS / "reference" / page).read_text(encoding="utf-8")))


def errors() -> set[type]:
    """Return every error of the package, those of adapters that need no framework included."""
    for module in pkgutil.iter_modules(adapters.__path__):
        try:
            importlib.import_module(f"{adapters.__name__}.{module.name}")
        except ImportError:
            continue
    found, new = set(), {kalos_ctx.KalosError}
    while new:
        found |= new
        new = {child for one in new for child in one.__subclasses__()} - found
    return {one for one in found if one.__module__.startswith("kalos_ctx.")}


def test_docs_every_public_name_is_in_the_reference():
    pages = (DOCS / "reference").glob("*.md")
    names = {name for page in pages for name in documented(page.name)}
    assert [name for name in kalos_ctx.__all__ if f"kalos_ctx.{name}" not in names] == []


def test_docs_every_error_is_on_its_page_and_says_what_to_do():
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    there = {name.rpartition(".")[2] for name in documented("errors.md")}
    internal = {one.__name__ for one in errors() if is_internal(one)}
    assert {one.__name__ for one in errors()} - internal == there
    for section in text.split("\n::: ")[1:]:
        assert re.search(r"\*\*What to do\.\*\* [^\n]{30}", section), section.split("\n")[0]


def is_internal(error: type) -> bool:
    """Whether an error never reaches a caller of a public name."""
    module = error.__module__.rpartition(".")[2]
    return error.__name__ not in kalos_ctx.__all__ and (
        module.startswith("_") or error.__module__.rpartition(".")[0] != adapters.__name__
    )


@pytest.mark.parametrize("page", ["store", "windows", "records", "sidecar", "tokens"])
def test_docs_identifiers_of_the_reference_exist(page):
    for identifier in documented(f"{page}.md"):
        module, _, name = identifier.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__, identifier


def parameters_in_docstring(docstring: str) -> list[str]:
    section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", docstring, re.DOTALL | re.M)
    names = re.findall(r"^(\*{0,2}\w+(?:, \w+)*)(?: :.*)?$", section[1], re.M) if section else []
    return [name.strip("* ") for line in names for name in line.split(",")]


def public_functions():
    """Yield the public names that can be called, with their own names."""
    for name in kalos_ctx.__all__:
        public = getattr(kalos_ctx, name)
        yield name, public
        if inspect.isclass(public):
            for member, function in inspect.getmembers(public, callable):
                if not member.startswith("_"):
                    yield f"{name}.{member}", function


def test_docs_parameters_of_docstrings_are_those_of_the_call():
    strange = []
    for name, function in public_functions():
        named = parameters_in_docstring(inspect.getdoc(function) or "")
        if named:
            taken = inspect.signature(function).parameters
            strange += [f"{name}: {one}" for one in named if one not in taken]
    assert strange == []


def errors_in_docstring(docstring: str) -> set[str]:
    """Return what a `Raises` section names, prose left out."""
    section = re.search(r"^Raises\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", docstring, re.DOTALL | re.M)
    lines = [line for line in section[1].splitlines() if line[:1].strip()] if section else []
    words = {word for line in lines for word in re.split(r"[\s,]+", line)}
    return {word for word in words if re.fullmatch(r"(?:[A-Z][a-z]+){2,}\w*", word)}


def test_docs_errors_that_docstrings_name_exist():
    known = {error.__name__ for error in errors()} | set(dir(builtins))
    strange = []
    for name, function in public_functions():
        named = errors_in_docstring(inspect.getdoc(function) or "")
        strange += [f"{name}: {one}" for one in sorted(named - known)]
    assert strange == []
