"""What users get: the files of the distribution, its names, and what an import costs."""

import gzip
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kalos_ctx
from kalos_ctx import demo_data, errors
from kalos_ctx._kernel_source import kernel_dir

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest needs tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(kalos_ctx.__file__).resolve().parent
KERNEL_SUFFIXES = {".h", ".cuh", ".cu"}
# Costly or optional at import: each is loaded by the call that needs it.
LATE = ("cuda", "torch", "jinja2", "typer", "rich", "tokenizers")


def run_python(code, tmp_path, *options):
    """Run `code` in a fresh interpreter that finds the same package as this one."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def documented_requirements():
    """Return the requirements in each table of docs/dependencies.md, by the table's heading."""
    found = {}
    heading = ""
    for line in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:].strip()
        elif match := re.match(r"\| `([^`]+)` \|", line):
            found.setdefault(heading, []).append(match[1])
    return found


def compiled_modules():
    return sorted(path.stem for path in (ROOT / "cython_ext" / "kalos_ctx").glob("*.pyx"))


def test_cuda_folder_holds_no_python():
    assert [str(path) for path in (ROOT / "cuda").rglob("*.py*")] == []


def test_tests_folder_is_no_package():
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_kernels_of_the_package_are_those_of_the_sources():
    def kernels(folder):
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in KERNEL_SUFFIXES}

    sources = kernels(ROOT / "cuda")
    assert {"kalos_layout.h", "kalos_plan.h", "plan.cu"} <= sources.keys()
    assert kernels(Path(kernel_dir())) == sources


def test_kernels_are_found_where_the_package_is():
    assert Path(kernel_dir()).resolve() in {PACKAGE / "_kernels", PACKAGE.parent / "cuda"}


def test_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", compiled_modules())
def test_compiled_module_is_importable_and_has_a_stub(name):
    module = importlib.import_module(f"kalos_ctx.{name}")
    assert Path(module.__file__).suffix == ".so"
    assert (PACKAGE / f"{name}.pyi").is_file()


def test_import_loads_nothing_that_a_later_call_needs(tmp_path):
    code = "import sys, kalos_ctx; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in run_python(code, tmp_path, "-W", "error").split()}
    assert "kalos_ctx" in loaded
    assert loaded & set(LATE) == set()


def test_public_names_are_those_of_all():
    names = kalos_ctx.__all__
    assert len(names) == len(set(names))
    listed = {name for name in names if hasattr(kalos_ctx, name)}
    assert listed == set(names)
    public = {
        name
        for name, value in vars(kalos_ctx).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - set(names) - {"annotations", "TYPE_CHECKING"} == set()


def test_every_error_is_a_public_name():
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KalosError)
    }
    assert classes <= set(kalos_ctx.__all__)


def test_star_import_in_a_fresh_interpreter_gives_all(tmp_path):
    code = "from kalos_ctx import *; print(*[n for n in dir() if n[0] != '_'])"
    names = run_python(code, tmp_path).split()
    assert set(names) == {name for name in kalos_ctx.__all__ if not name.startswith("_")}


def test_documented_dependencies_are_those_of_pyproject():
    documented = documented_requirements()
    assert documented.pop("At run time") == project()["dependencies"]
    assert (
        documented.pop("To build")
        == tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
            "requires"
        ]
    )
    extras = {name.removeprefix("Extra "): found for name, found in documented.items()}
    assert extras == {
        f"`{name}`": found for name, found in project()["optional-dependencies"].items()
    }


def test_tests_of_the_wheels_are_there():
    """The builds of the wheels run files by name, which a renamed one would fail at a release."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(
        r"\{project\}/(\S+)", tomllib.loads(text)["tool"]["cibuildwheel"]["test-command"]
    )
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("folder", [PACKAGE / "demo_data", ROOT / "tests" / "data"], ids=str)
def test_every_shipped_data_file_is_credited(folder):
    credits = (folder / "LICENCES.md").read_text(encoding="utf-8")
    files = [
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"} and path.name != "LICENCES.md"
    ]
    data = [path for path in files if path.parts[0] != "licences"]
    assert len(data) >= 7
    # A row may name several files: `templates/qwen3`, `gptoss` `.jinja`.
    assert [str(path) for path in data if path.stem.split(".")[0] not in credits] == []
    assert {path.name for path in files if path.parts[0] == "licences"} == {
        "Apache-2.0.txt",
        "chitchat-dataset-MIT.txt",
    }
    assert "Creative Commons Attribution 4.0 License" in credits
    assert "for tests and measurements only" in credits


def test_compressed_data_holds_no_name_and_no_time():
    paths = sorted((ROOT / "tests" / "data").rglob("*.gz"))
    assert paths
    for path in paths:
        header = path.read_bytes()[:10]
        assert header[:8] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00", path.name
        assert gzip.decompress(path.read_bytes())


def test_demo_conversations_are_of_both_kinds():
    sources = [conversation["source"] for conversation in demo_data.conversations()]
    assert sources == ["chitchat-dataset"] * 25 + ["Taskmaster-4"] * 10


def test_demo_queries_find_their_best_passages():
    """The ten best of the bundled passages are the ten that the data names."""
    ids = np.array([passage["id"] for passage in demo_data.passages()])
    assert (np.diff(ids) > 0).all()
    rows = demo_data.passage_vectors().astype(np.float32)
    scores = demo_data.query_vectors().astype(np.float32) @ rows.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    expected = [query["top10"] for query in demo_data.queries()]
    assert ids[order].tolist() == expected


def test_demo_data_missing_file_raises():
    with pytest.raises(FileNotFoundError, match="no bundled file"):
        demo_data.data_path("nothing.json")
