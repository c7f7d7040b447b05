"""Show pages as the site needs them: links, and what code says of itself.

Names of pages in running text, such as docs/windows.md or FORMAT.md, become links. The sources are
read in a checkout too, where a page's name is its path; so the text stays as it is and only what is
shown becomes a link. Code blocks and what is a link already are left alone.

A fence that says why its code is not run (`norun="..."`, see tests/helpers/doc_pages.py) shows that
as the title of the block.
"""

import logging
import re

log = logging.getLogger("mkdocs.hooks.pages")

# Where the pages at the root stand in the site.
ROOT_PAGES = {
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRACT.md": "reference/contract.md",
    "CONTRIBUTING.md": "reference/contributing.md",
    "DESIGN.md": "reference/design.md",
    "FORMAT.md": "reference/format.md",
    "SECURITY.md": "reference/security.md",
    "deploy/README.md": "reference/deployment.md",
}
# Blocks and tags are matched first and kept, so that a name is looked for in text alone.
PIECE = re.compile(
    r"(?P<kept><(?P<block>pre|a|h1|title|script|style)\b.*?</(?P=block)>|<[^>]*>)"
    r"|(?<![\w/.-])(?P<name>docs/[a-z0-9/_-]+\.md|" + "|".join(ROOT_PAGES) + r")(?![\w/-])",
    re.DOTALL,
)

FENCE = re.compile(r'^(`{3,}\w+)(?: needs="[^"\n]*"| norun="(?P<why>[^"\n]*)")', re.MULTILINE)


def on_page_markdown(markdown, **_):
    """Show why a block of code is not run by the tests; what it needs is for them alone."""

    def shown(match):
        why = match["why"]
        return match[1] if why is None else f'{match[1]} title="Not run by the tests: {why}"'

    return FENCE.sub(shown, markdown)


def on_page_content(html, page, files, **_):
    """Link names of pages in one page's text."""
    if "```" in html:
        log.warning("%s: a fence was not taken for one", page.file.src_path)

    def link(match):
        name = match["name"]
        if name is None:
            return match[0]
        target = files.get_file_from_path(ROOT_PAGES.get(name, name.removeprefix("docs/")))
        if target is None or target.url == page.file.url or target.inclusion.is_excluded():
            return name
        return f'<a href="{target.url_relative_to(page.file)}">{name}</a>'

    return PIECE.sub(link, html)
