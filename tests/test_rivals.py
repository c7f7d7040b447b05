"""The recorded run of the rivals, and what docs/performance.md and its plots make of it.

Needs no rival: the figures were taken by asv_benchmarks/rivals.py.
"""

import importlib.util
import itertools
import math
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
IMAGES = ("stages", "turns", "recall", "reuse", "callers")


def load_tables():
    path = ROOT / "asv_benchmarks" / "rivals" / "tables.py"
    spec = importlib.util.spec_from_file_location("rivals_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables()
DATA = tables.load()


def section():
    """Return the page's section on the rivals."""
    text = PAGE.read_text(encoding="utf-8")
    return re.search(r"^## Rivals, .*?(?=^## )", text, re.DOTALL | re.MULTILINE)[0]


def measured():
    """Yield every measured row of the parts that have a p50 and a p99."""
    for part in ("turns", "callers", "writes", "search"):
        for row in DATA[part]:
            if "not_run" not in row:
                yield row
                yield from row.get("stages", {}).values()


def test_rivals_record_names_machine_versions_sizes_and_command():
    assert DATA["version"] == 1
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", DATA["date"])
    assert DATA["command"].startswith("python asv_benchmarks/rivals.py")
    assert "--quick" not in DATA["command"]
    assert DATA["machine"]["name"] == tables.SHOWN
    assert {"cpu", "cores", "memory_gib", "kernel"} <= DATA["machine"].keys()
    assert all(DATA["versions"][name] for name in ("python", "numpy", "tokenizers", "redis"))
    assert DATA["load_before"] >= 0 <= DATA["load_after"]


def test_rivals_record_has_p99_not_below_p50():
    rows = list(measured())
    assert len(rows) > 150
    for row in rows:
        assert math.isfinite(row["p99"])
        assert 0 <= row["p50"] <= row["p99"]
        assert row["calls"] >= 2


def test_rivals_record_has_every_road_at_every_size():
    """A road that is slow at a size is there and says so; none is left out silently."""
    roads = [row["road"] for row in DATA["roads"]]
    assert len(roads) == len(set(roads)) >= 20
    sizes = DATA["sizes"]["turns"]
    there = [(row["road"], row["turns"]) for row in DATA["turns"]]
    assert sorted(there) == sorted(itertools.product(roads, sizes))
    for row in DATA["turns"]:
        if "not_run" in row:
            assert row["expected_s"] > DATA["sizes"]["limit_s"]
    for part, key, values in (("callers", "callers", DATA["sizes"]["callers"]),):
        names = {row["road"] for row in DATA[part]}
        assert len(DATA[part]) == len(names) * len(values)
        assert {row[key] for row in DATA[part]} == set(values)


def test_rivals_record_has_every_road_answer_the_same_window():
    for turns in DATA["sizes"]["turns"]:
        tokens = {
            row["road"]: row["tokens"]
            for row in DATA["turns"]
            if row["turns"] == turns and "tokens" in row
        }
        stable = tokens.pop("Kalos, stable prefix")
        assert len(set(tokens.values())) == 1
        assert stable <= tokens["Kalos, in process"] <= DATA["sizes"]["budget"]


@pytest.mark.parametrize("make", tables.TABLES, ids=lambda make: make.__name__)
def test_rivals_tables_of_the_page_are_those_of_the_record(make):
    assert make(DATA) in section()


def test_rivals_tables_rewrite_replaces_the_tables_of_a_page(tmp_path):
    page, right = tmp_path / "page.md", PAGE.read_text(encoding="utf-8")
    page.write_text(right.replace(" ms |", " s |"), encoding="utf-8")
    tables.rewrite(page, DATA)
    assert section() in page.read_text(encoding="utf-8")


def test_rivals_ratios_in_prose_stand_in_a_table():
    text = section()
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    quoted = re.findall(r"(?<![\d.,])([\d.,]*\d) x(?= |\)|,|\.|;)", prose)
    in_tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert quoted
    assert [one for one in quoted if f" {one} x" not in in_tables.replace("(", " ")] == []


@pytest.mark.parametrize("name", IMAGES)
def test_rivals_plot_is_small_searchable_and_shown(name):
    image = ROOT / "docs" / "images" / f"rivals-{name}.svg"
    text = image.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert "Kalos" in text or name == "reuse"
    assert "<text" in text
    assert set(re.findall(r"font-family: ([^;\"]+)", text)) == {"sans-serif"}
    assert re.search(r"<title>[^<]{30,}</title>", text)
    shown = re.search(rf"!\[([^\]]*)\]\(images/{image.name}\)", section())
    assert shown
    assert len(shown[1]) > 20


def test_rivals_tables_need_nothing_but_the_standard_library():
    source = (ROOT / "asv_benchmarks" / "rivals" / "tables.py").read_text(encoding="utf-8")
    names = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    assert set(names) - {"__future__"} <= set(sys.stdlib_module_names)
