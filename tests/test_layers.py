"""A module imports only from its own layer or a lower one; cimport and #include count."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
from helpers.import_edges import CYTHON_SUFFIXES, Edge, Tree

ROOT = Path(__file__).resolve().parents[1]

# A new module is entered here in the commit that adds it. A compiled module stands under its bare
# name, whatever files it has.
LAYERS = {
    0: (
        "kalos_layout.h",
        "kalos_channel.h",
        "_channel_layout",
        "_checks.h",
        "_layout",
        "_posix",
        "errors.py",
        "types.py",
        "blockkeys.py",
    ),
    1: (
        "_records.h",
        "_rowmath.h",
        "_sigbus.h",
        "kalos_turns.h",
        "_batch",
        "_compaction",
        "_control",
        "_durability",
        "_erasing",
        "_index",
        "_intake",
        "_locking",
        "_log",
        "_lookup",
        "_opening",
        "_reader",
        "_recovery",
        "_scrubbing",
        "_segment",
        "_staging",
        "_turns",
        "_vectors",
        "_verification",
        "_writer",
    ),
    2: (
        "tokens.py",
        "template.py",
        "proof.py",
        "sandbox.py",
        "firewall.py",
        "heads.py",
        "vocabulary.py",
        "arguments.py",
        "drafts.py",
        "items.py",
        "store.py",
        "store_base.py",
        "store_passages.py",
        "store_path.py",
        "store_tables.py",
        "store_turns.py",
        "vector_rows.py",
        "filters.py",
    ),
    3: ("kalos_plan.h", "_planner", "planner.py"),
    4: (
        "kalos_launch.h",
        "*.cuh",
        "*.cu",
        "_crc_powers.h",
        "_driver.h",
        "_gpu.h",
        "_keys.h",
        "_recall.h",
        "_scan.h",
        "_score.h",
        "_score_x86.h",
        "_workers.h",
        "_cpu_ops",
        "_store_scan",
        "_driver",
        "_device",
        "_device_memory",
        "_device_rows",
        "_row_source",
        "_row_follower",
        "_device_scopes",
        "_device_batch",
        "_device_recall",
        "_lanes",
        "_registered",
        "_nvrtc.py",
        "_kernel_source.py",
        "backends/__init__.py",
        "backends/combining.py",
        "backends/cpu.py",
        "backends/cuda_device.py",
        "backends/cuda_system.py",
        "backends/kernel_cache.py",
    ),
    5: (
        "backends/cuda.py",
        "_dlpack.h",
        "_window_buffer.h",
        "_window_buffer",
        "_turn_table.h",
        "_windows",
        "_exports",
        "_device_array",
        "_arranger",
        "_gathering",
        "_device_gathering",
        "_session_view",
        "_window_parts",
        "_session_table",
        "_context_window",
        "_assembler",
        "assembler.py",
        "batches.py",
        "reports.py",
    ),
    6: (
        "_channel.h",
        "_channel",
        "_window_wire",
        "_serving",
        "_asking",
        "metrics.py",
        "sidecar/*",
    ),
    7: (
        "__init__.py",
        "agent_items.py",
        "agent_sessions.py",
        "bench.py",
        "chat_files.py",
        "cli.py",
        "conversations.py",
        "demo.py",
        "doctor.py",
        "exporting.py",
        "found_chats.py",
        "import_sources.py",
        "importing.py",
        "inspecting/*",
        "conformance/*",
        "langchain_messages.py",
        "langgraph_threads.py",
        "msgpack_values.py",
        "redis_chats.py",
        "rehearsal.py",
        "sidecar_commands.py",
        "sqlite_files.py",
        "terminal.py",
        "window_view.py",
        "adapters/*",
        "demo_data/__init__.py",
    ),
}
KNOWS_CUDA = {"_driver", "_nvrtc.py", "backends/cuda_device.py"}
PYTHON_FOR_CYTHON = {"errors.py", "types.py"}
NAMES_WITHOUT_A_JOB = {"utils", "helpers", "common", "manager"}


def layer_of(unit: str) -> int | None:
    for layer, patterns in LAYERS.items():
        if any(fnmatch(unit, pattern) for pattern in patterns):
            return layer
    return None


def unknown_units(tree: Tree) -> list[str]:
    return sorted(unit for unit in tree.units if layer_of(unit) is None)


def upward_edges(tree: Tree) -> list[Edge]:
    return [
        edge
        for edge in tree.edges()
        if not edge.foreign and (layer_of(edge.target) or 0) > (layer_of(edge.unit) or 0)
    ]


def missing_targets(tree: Tree) -> list[Edge]:
    return [e for e in tree.edges() if not e.foreign and layer_of(e.target) is None]


def cuda_edges(tree: Tree) -> list[Edge]:
    return [
        edge
        for edge in tree.edges()
        if edge.foreign and edge.target.split(".")[0] == "cuda" and edge.unit not in KNOWS_CUDA
    ]


def python_in_cython(tree: Tree) -> list[Edge]:
    return [
        edge
        for edge in tree.edges()
        if edge.path.suffix in CYTHON_SUFFIXES
        and edge.target.endswith(".py")
        and edge.target not in PYTHON_FOR_CYTHON
    ]


def private_names_in_adapters(tree: Tree) -> list[Edge]:
    return [
        edge
        for edge in tree.edges()
        if edge.unit.startswith("adapters/")
        and not edge.foreign
        and edge.target.startswith("_")
        and edge.target != "__init__.py"
    ]


RULES = (upward_edges, missing_targets, cuda_edges, python_in_cython, private_names_in_adapters)


@pytest.fixture(scope="module")
def tree():
    return Tree(ROOT)


def test_layers_every_module_is_entered(tree):
    assert unknown_units(tree) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_layers_rule_holds(tree, rule):
    assert [f"{edge.path}: {edge.target}" for edge in rule(tree)] == []


def test_layers_no_module_is_named_after_no_job(tree):
    assert [path for path in tree.files if path.stem.strip("_") in NAMES_WITHOUT_A_JOB] == []


def test_layers_table_names_each_unit_once():
    names = [name for patterns in LAYERS.values() for name in patterns]
    assert len(names) == len(set(names))


BROKEN = (
    (upward_edges, "kalos_ctx/store.py", "import kalos_ctx.planner\n", "planner.py"),
    (upward_edges, "kalos_ctx/store.py", "from kalos_ctx import planner\n", "planner.py"),
    (upward_edges, "kalos_ctx/store.py", "from . import planner\n", "planner.py"),
    (upward_edges, "kalos_ctx/store.py", "from .planner import Policy\n", "planner.py"),
    (
        upward_edges,
        "kalos_ctx/store.py",
        "def f():\n    from kalos_ctx import Policy\n",
        "__init__.py",
    ),
    (upward_edges, "kalos_ctx/store.py", "import_module('kalos_ctx.cli')\n", "cli.py"),
    (
        upward_edges,
        "kalos_ctx/planner.py",
        "from kalos_ctx.backends import cpu\n",
        "backends/cpu.py",
    ),
    (
        upward_edges,
        "cython_ext/kalos_ctx/_writer.pyx",
        "from kalos_ctx._cpu_ops cimport scan, \\\n    merge\n",
        "_cpu_ops",
    ),
    (
        upward_edges,
        "cython_ext/kalos_ctx/_writer.pxd",
        "from kalos_ctx cimport _cpu_ops\n",
        "_cpu_ops",
    ),
    (
        upward_edges,
        "cython_ext/kalos_ctx/_writer.pyx",
        'cdef extern from "kalos_plan.h" nogil:\n',
        "kalos_plan.h",
    ),
    (upward_edges, "cuda/kalos_layout.h", '#  include "kalos_plan.h"\n', "kalos_plan.h"),
    (missing_targets, "cuda/kalos_plan.h", '#include "unheard_of.h"\n', "unheard_of.h"),
    (missing_targets, "kalos_ctx/store.py", "from kalos_ctx.gone import x\n", "gone.py"),
    (cuda_edges, "kalos_ctx/cli.py", "def f():\n    import cuda.core\n", "cuda.core"),
    (cuda_edges, "cython_ext/kalos_ctx/_writer.pyx", "from cuda.bindings import driver\n", None),
    (
        python_in_cython,
        "cython_ext/kalos_ctx/_cpu_ops.pyx",
        "from kalos_ctx import planner\n",
        None,
    ),
    (python_in_cython, "cython_ext/kalos_ctx/_cpu_ops.pyx", "import kalos_ctx\n", "__init__.py"),
    (private_names_in_adapters, "kalos_ctx/adapters/x.py", "import kalos_ctx._writer\n", "_writer"),
)


@pytest.fixture
def small_tree(tmp_path):
    """Lay out a tree in which every rule holds; a test then breaks one."""
    for name, text in {
        "kalos_ctx/__init__.py": "from kalos_ctx.store import SessionStore\n",
        "kalos_ctx/errors.py": "import enum\n",
        "kalos_ctx/store.py": '"""import kalos_ctx.cli"""\nfrom kalos_ctx import _writer, errors\n',
        "kalos_ctx/planner.py": "from .errors import KalosError\n",
        "kalos_ctx/cli.py": "import kalos_ctx\n",
        "kalos_ctx/backends/__init__.py": "",
        "kalos_ctx/backends/cpu.py": "from kalos_ctx import _cpu_ops\n",
        "kalos_ctx/backends/cuda_device.py": "import cuda.core\n",
        "kalos_ctx/adapters/x.py": "import kalos_ctx\n",
        "cython_ext/kalos_ctx/__init__.pxd": "",
        "cython_ext/kalos_ctx/_writer.pxd": 'cdef extern from "kalos_layout.h":\n    pass\n',
        "cython_ext/kalos_ctx/_writer.pyx": (
            "# import kalos_ctx.cli\nfrom kalos_ctx.errors import (\n    StoreFull,\n)\n"
        ),
        "cython_ext/kalos_ctx/_cpu_ops.pyx": "from kalos_ctx._writer cimport Core\n",
        "cuda/kalos_layout.h": "#include <stdint.h>\n",
        "cuda/kalos_plan.h": '#include "kalos_layout.h"\n',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_layers_small_tree_keeps_every_rule(small_tree):
    tree = Tree(small_tree)
    assert unknown_units(tree) == []
    assert [rule(tree) for rule in RULES] == [[]] * len(RULES)


@pytest.mark.parametrize(("rule", "file", "line", "target"), BROKEN)
def test_layers_broken_rule_is_found(small_tree, rule, file, line, target):
    path = small_tree / file
    path.write_text(path.read_text() + line)
    found = rule(Tree(small_tree))
    assert {edge.path for edge in found} == {path}
    assert target in {found[0].target, None}


def test_layers_module_outside_the_table_is_found(small_tree):
    (small_tree / "kalos_ctx" / "surprise.py").write_text("")
    assert unknown_units(Tree(small_tree)) == ["surprise.py"]
