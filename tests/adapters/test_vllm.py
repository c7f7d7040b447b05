"""Prompts of vLLM, against its own input types and prompt parser.

vLLM is installed without its dependencies, which want a GPU's libraries: what is tested here
imports and runs all the same. No engine is run.
"""

import typing
import warnings

import pytest

import kalos_ctx as kalos
from kalos_ctx.adapters import vllm

SECRET = b"known to the servers alone"


@pytest.fixture
def store(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store", vocab_size=1000) as opened:
        for tenant in ("", "acme", "globex"):
            opened.append("s", "user", token_ids=range(10, 40), tenant=tenant)
            opened.append("t", "user", token_ids=[7, 8, 9], tenant=tenant)
            opened.set_segment("empty", "head", token_ids=[1], tenant=tenant)
        yield opened


@pytest.fixture
def assembler(store):
    with kalos.ContextAssembler(store) as made:
        yield made


# torch tells of its own old calls while vLLM is imported.
@pytest.fixture(scope="module")
def vllm_inputs():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        from vllm import inputs
        from vllm.renderers.inputs import preprocess

    return inputs, preprocess


def test_vllm_prompt_is_what_its_parser_takes(vllm_inputs, assembler):
    inputs, preprocess = vllm_inputs
    with assembler.assemble("s", tenant="acme", max_tokens=99) as window:
        prompt = vllm.tokens_prompt(window, max_model_len=99, secret=SECRET)
    parsed = preprocess.parse_dec_only_prompt(prompt)
    assert parsed == inputs.TokensPrompt(**prompt) == prompt
    fields = inputs.TokensPrompt.__annotations__
    assert set(prompt) == {"prompt_token_ids", "cache_salt"}
    assert fields["prompt_token_ids"] == list[int]
    assert typing.get_args(fields["cache_salt"]) == (str,) or fields["cache_salt"] is str
    assert inputs.tokens_input(prompt["prompt_token_ids"])["type"] == "token"


def test_vllm_takes_a_whole_batch(vllm_inputs, assembler):
    _, preprocess = vllm_inputs
    batch = assembler.assemble_batch([{"session": name, "max_tokens": 99} for name in "st"])
    made = vllm.tokens_prompts(batch, max_model_len=99, reserve=8)
    assert preprocess.prompt_to_seq(made) == made
    assert [one["prompt_token_ids"] for one in made] == [list(range(10, 40)), [7, 8, 9]]
    requests = [{"session": name, "max_tokens": 99} for name in ("s", "unknown")]
    batch = assembler.assemble_batch(requests, on_error="return")
    with pytest.raises(kalos.SessionNotFound):
        vllm.tokens_prompts(batch, max_model_len=99)
