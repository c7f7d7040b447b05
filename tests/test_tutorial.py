"""The tutorial runs as it stands, in an empty folder, and prints what it shows."""

from helpers.doc_pages import DOCS, blocks_of, run_page

TUTORIAL = DOCS / "tutorial.md"


def test_tutorial_runs_and_prints_what_it_shows(tmp_path):
    runnable = [block for block in blocks_of(TUTORIAL) if block.runs]
    assert len(runnable) >= 8
    assert run_page(TUTORIAL, tmp_path) == len(runnable)


def test_tutorial_leaves_out_only_installing_and_starting_python():
    left_out = [block for block in blocks_of(TUTORIAL) if "norun" in block.attributes]
    assert [block.text.split("\n")[0] for block in left_out] == [
        "$ python3 -m venv ~/kalos-env",
        "$ mkdir ~/kalos-tutorial",
    ]
