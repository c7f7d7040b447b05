"""The documentation's code that needs a framework runs."""

import pytest
from helpers.doc_pages import DOCS, needed_modules, run_page

PAGES = sorted(
    page.relative_to(DOCS)
    for page in DOCS.rglob("*.md")
    if page.relative_to(DOCS).parts[0] in ("how-to", "coming-from") and needed_modules(page)
)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_docs_page_code_of_frameworks_runs(page, tmp_path):
    run_page(DOCS / page, tmp_path, with_modules=True)
