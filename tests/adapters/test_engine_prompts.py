"""What prompts for both engines hold, and what is refused before an engine sees it."""

import json
import re

import numpy as np
import pytest

import kalos_ctx as kalos
from kalos_ctx.adapters import sglang, vllm
from kalos_ctx.adapters.engine_prompts import EmptyWindow, cache_salt

SECRET = b"known to the servers alone"
PARTS = {
    "vllm": vllm.tokens_prompt,
    "sglang": sglang.generate_arguments,
}
IDS = {"vllm": "prompt_token_ids", "sglang": "input_ids"}


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


@pytest.fixture(params=sorted(PARTS))
def engine(request):
    return request.param


def test_ids_are_a_list_of_python_ints_equal_to_the_window(engine, assembler):
    with assembler.assemble("s", max_tokens=99) as window:
        made = PARTS[engine](window, max_model_len=99, reserve=8)
        view = window.token_ids
        assert made[IDS[engine]] == window.tolist() == view.tolist() == list(range(10, 40))
        assert np.from_dlpack(window).tolist() == made[IDS[engine]]
    assert {type(one) for one in made[IDS[engine]]} == {int}
    assert json.loads(json.dumps(made)) == made


def test_prompt_outlives_its_window(engine, assembler):
    with assembler.assemble("s", max_tokens=99) as window:
        made = PARTS[engine](window, max_model_len=99, reserve=8)
    assert made[IDS[engine]] == list(range(10, 40))
    with pytest.raises(kalos.WindowReleased):
        PARTS[engine](window, max_model_len=99, reserve=8)


@pytest.mark.parametrize(("max_model_len", "fits"), [(37, False), (38, True)])
def test_window_and_reserve_must_fit_the_model(engine, assembler, max_model_len, fits):
    with assembler.assemble("s", max_tokens=99) as window:
        if fits:
            assert PARTS[engine](window, max_model_len=max_model_len, reserve=8)
            return
        with pytest.raises(kalos.BudgetExceeded, match="is 1 more than max_model_len") as caught:
            PARTS[engine](window, max_model_len=max_model_len, reserve=8)
    assert (caught.value.over, caught.value.budget) == (1, 37)
    assert caught.value.by_segment == {"window": 30, "reserve": 8}


def test_window_without_tokens_is_refused_with_its_own_error(engine, assembler):
    policy = kalos.Policy(include_system=False)
    with assembler.assemble("empty", max_tokens=9, policy=policy) as window:
        assert len(window) == 0
        assert np.from_dlpack(window).shape == (0,)
        with pytest.raises(EmptyWindow, match="has no tokens") as caught:
            PARTS[engine](window, max_model_len=9, reserve=1)
    assert isinstance(caught.value, (kalos.InvalidArgument, ValueError))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reserve": 0}, kalos.InvalidArgument, "reserve must be at least 1"),
        ({"max_model_len": 0}, kalos.InvalidArgument, "max_model_len must be at least 1"),
        ({"reserve": True}, kalos.InvalidType, r"reserve must be an int \(got bool\)"),
        ({"max_model_len": None}, kalos.InvalidType, "max_model_len must be an int"),
        ({"secret": "text"}, kalos.InvalidType, "secret must be bytes"),
    ],
)
def test_wrong_argument_is_refused(engine, assembler, options, error, words):
    with (
        assembler.assemble("s", max_tokens=99) as window,
        pytest.raises(error, match=words),
    ):
        PARTS[engine](window, **{"max_model_len": 99, "reserve": 8, **options})


def test_salt_parts_tenants_and_shows_no_name(engine, assembler):
    salts = {}
    for tenant in ("", "acme", "globex"):
        for secret in (b"", SECRET):
            with assembler.assemble("s", tenant=tenant, max_tokens=99) as window:
                made = PARTS[engine](window, max_model_len=99, reserve=8, secret=secret)
            salts[tenant, secret] = made["cache_salt"]
            assert tenant == "" or tenant not in json.dumps(made)
            assert made["cache_salt"] == cache_salt(tenant, secret)
    assert len(set(salts.values())) == 6
    assert all(re.fullmatch("[0-9a-f]{64}", salt) for salt in salts.values())


def test_salt_is_a_published_recipe():
    import hashlib
    import hmac

    wanted = hmac.new(SECRET, b"kalos cache salt 1\0acme", hashlib.sha256).hexdigest()
    assert cache_salt("acme", SECRET) == cache_salt(b"acme", bytearray(SECRET)) == wanted
    with pytest.raises(kalos.InvalidType, match="tenant must be a str or bytes"):
        cache_salt(None, SECRET)


def test_ids_outside_the_vocabulary_never_reach_a_prompt(store):
    for bad in (-1, 1000, 1001, 2**31):
        with pytest.raises(kalos.InvalidTokenId, match="1"):
            store.append("s", "user", token_ids=[5, bad])
