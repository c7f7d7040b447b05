"""Each example runs as it is written, in a process and a folder of its own, without a network."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 60
SAYS = {
    "openai_agents_session": ("agent: It is here: Ann's car", "<tool_response>", "6 items"),
    "langchain_memory": ("recalled p", "6 turns"),
    "llama_index_memory": ("24 messages in the store", "recalls:", "as a window"),
    "huggingface_chat": ("A batch of (3, ", "Fed at the last turn:"),
    "vllm_prompts": ("acme, ", "globex, ", "refused: the window has no tokens"),
    "sglang_requests": ('"cache_salt": "', "more than max_model_len"),
    "packed_inference": ("tokens in one pass, windows at [0, ", "as before"),
}
# Addresses that nothing answers: a library that asked would fail at once.
NO_NETWORK = {
    name: "http://127.0.0.1:9"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
}


def run(path, folder, *options):
    env = {**os.environ, **NO_NETWORK, "HF_HUB_OFFLINE": "1"}
    env.pop("OPENAI_API_KEY", None)
    started = time.monotonic()
    # -I: not this checkout's sources, which may not have been built.
    done = subprocess.run(
        [sys.executable, "-I", *options, str(path)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < SECONDS
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("name", SAYS)
def test_example_runs_and_says_what_happened(name, tmp_path):
    said = run(EXAMPLES / f"{name}.py", tmp_path)
    for words in SAYS[name]:
        assert words in said


def test_packed_inference_does_the_same_with_numpy_alone(tmp_path):
    code = tmp_path.parent / f"{tmp_path.name}-without-torch.py"
    example = EXAMPLES / "packed_inference.py"
    code.write_text(
        "import importlib.util, runpy\n"
        "importlib.util.find_spec = lambda name: None\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    with_numpy = run(code, tmp_path).splitlines()
    with_torch = run(example, tmp_path).splitlines()
    assert with_numpy[0].startswith("numpy on cpu: ")
    assert with_torch[0].startswith("torch on ")
    assert with_numpy[0].partition(": ")[2] == with_torch[0].partition(": ")[2]
    assert with_numpy[1:] == with_torch[1:]
