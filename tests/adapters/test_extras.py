"""An adapter whose framework is missing says which extra to install; Kalos alone needs none."""

import subprocess
import sys

import pytest

import kalos_ctx as kalos
from kalos_ctx.adapters.extras import MissingExtra

FRAMEWORKS = {
    "openai_agents": ("openai-agents", "agents"),
    "langchain": ("langchain", "langchain_core"),
    "langchain_vectors": ("langchain", "langchain_core"),
    "llama_index": ("llama-index", "llama_index"),
    "huggingface": ("huggingface", "transformers"),
}
BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
"""


def run(code):
    # -I: not the folder in which the tests run, which may hold sources that were not built.
    return subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_missing_framework_names_the_extra(module):
    extra, framework = FRAMEWORKS[module]
    code = BLOCKED.format(names=[framework]) + (
        "from kalos_ctx.adapters.extras import MissingExtra\n"
        "try:\n"
        f"    import kalos_ctx.adapters.{module}\n"
        "except MissingExtra as error:\n"
        "    print(error)\n"
    )
    assert f"pip install 'kalos-ctx[{extra}]'" in run(code)


def test_missing_extra_is_an_import_error_of_kalos():
    assert issubclass(MissingExtra, (kalos.KalosError, ImportError))
    assert issubclass(MissingExtra, kalos.KalosError)


def test_kalos_and_the_engines_adapters_import_no_framework():
    loaded = run(
        "import sys, kalos_ctx, kalos_ctx.adapters, kalos_ctx.adapters.vllm\n"
        "import kalos_ctx.adapters.sglang\n"
        "print(*sys.modules)\n"
    ).split()
    frameworks = {"agents", "langchain_core", "llama_index", "torch", "transformers"}
    assert not frameworks & set(loaded)
    assert not {"vllm", "sglang"} & set(loaded)
