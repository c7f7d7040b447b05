"""Windows for transformers, on a small Llama with random weights: the same logits, fewer tokens."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

import kalos_ctx as kalos
from kalos_ctx.adapters.huggingface import (
    EmptyWindow,
    SessionCache,
    cache_argument,
    generate,
    ids_to_feed,
    model_inputs,
    prompts,
)

VOCAB, PAD, END, MODEL_LEN = 97, 0, 1, 512
# Float64: what is compared are two ways to compute the same, not rounding.
DTYPE = torch.float64


def tiny(**options):
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MODEL_LEN,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
        **options,
    )
    return LlamaForCausalLM(config).to(DTYPE).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def store(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store", vocab_size=VOCAB) as opened:
        yield opened


@pytest.fixture
def assembler(store):
    with kalos.ContextAssembler(store) as made:
        yield made


def ids(seed, n):
    return np.random.default_rng(seed).integers(2, VOCAB, n).astype(np.int32)


def batch_of(store, assembler, lengths, **options):
    requests = []
    for i, length in enumerate(lengths):
        store.append(f"s{i}", "user", token_ids=ids(i, length))
        requests.append({"session": f"s{i}", "max_tokens": 256})
    options = {"layout": "left", "pad_id": PAD, "dtype": "int64", **options}
    return assembler.assemble_batch(requests, **options)


def logits(model, rows, cache=None):
    cached = {} if cache is None else {cache_argument(model): cache}
    with torch.inference_mode():
        return model(torch.as_tensor(np.asarray(rows, np.int64)), **cached).logits


# ---- Batches ----------------------------------------------------------------------------------


def test_padded_rows_have_the_logits_of_each_row_alone(model, store, assembler):
    batch = batch_of(store, assembler, (3, 17, 8))
    with torch.inference_mode():
        found = model(**model_inputs(batch)).logits
    for i, window in enumerate(batch):
        alone = logits(model, [window.token_ids])[0]
        assert torch.allclose(found[i, -len(window) :], alone, atol=1e-12)


def test_batch_is_not_copied(store, assembler):
    batch = batch_of(store, assembler, (3, 5))
    inputs = model_inputs(batch)
    assert {one.dtype for one in inputs.values()} == {torch.int64}
    assert inputs["input_ids"].data_ptr() == batch.token_ids.ctypes.data
    assert model_inputs(batch, "meta")["input_ids"].device.type == "meta"


def test_mask_comes_from_lengths_where_tokens_equal_the_padding(store, assembler):
    store.append("s", "user", token_ids=[PAD, 5, PAD])
    store.append("t", "user", token_ids=[PAD] * 5)
    requests = [{"session": name, "max_tokens": 9} for name in "st"]
    batch = assembler.assemble_batch(requests, layout="left", pad_id=PAD, dtype="int64")
    assert model_inputs(batch)["attention_mask"].sum(1).tolist() == [3, 5]


def test_answers_are_those_of_each_window_alone(model, store, assembler):
    batch = batch_of(store, assembler, (4, 30, 11))
    answers = generate(model, batch, max_new_tokens=12, do_sample=False)
    for answer, window in zip(answers, batch, strict=True):
        row = torch.from_numpy(window.token_ids.astype(np.int64))[None]
        whole = model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=12, do_sample=False
        )[0, len(window) :].numpy()
        end = np.flatnonzero(whole == END)
        assert answer.tolist() == whole[: end[0] if end.size else None].tolist()
        assert answer.dtype == np.int32


def test_answer_ends_before_the_end_token_and_can_be_stored(model, store, assembler):
    batch = batch_of(store, assembler, (4, 30))
    free = generate(model, batch, max_new_tokens=8, do_sample=False, eos_token_id=None)
    end = int(free[0][3])
    place = free[0].tolist().index(end)
    cut = generate(model, batch, max_new_tokens=8, do_sample=False, eos_token_id=end)
    assert cut[0].tolist() == free[0][:place].tolist()
    config = GenerationConfig(eos_token_id=[end, VOCAB - 1], pad_token_id=PAD, do_sample=False)
    again = generate(model, batch, max_new_tokens=8, generation_config=config)
    assert again[0].tolist() == cut[0].tolist()
    assert store.append("s0", "assistant", token_ids=free[0]) == 1


def test_sampling_gives_several_answers_a_row_and_takes_dict_outputs(model, store, assembler):
    batch = batch_of(store, assembler, (4, 6))
    answers = generate(
        model,
        batch,
        max_new_tokens=3,
        do_sample=True,
        num_return_sequences=2,
        return_dict_in_generate=True,
    )
    assert len(answers) == 4


@pytest.mark.parametrize("room", [0, 1])
def test_batch_that_does_not_fit_the_model_is_refused(model, store, assembler, room):
    batch = batch_of(store, assembler, (200, 3))
    asked = {"max_new_tokens": MODEL_LEN - 200 + room}
    if not room:
        assert len(generate(model, batch, max_model_len=MODEL_LEN, **asked)) == 2
        return
    with pytest.raises(kalos.BudgetExceeded, match="longest window has 200 tokens") as caught:
        generate(model, batch, **asked)
    assert caught.value.over == 1


def test_empty_row_and_error_in_a_row_are_refused(model, store, assembler):
    store.set_segment("empty", "head", token_ids=[3])
    store.append("s", "user", token_ids=[4])
    requests = [
        {"session": "s", "max_tokens": 9},
        {"session": "empty", "max_tokens": 9, "policy": kalos.Policy(include_system=False)},
    ]
    batch = assembler.assemble_batch(requests, layout="left", pad_id=PAD, dtype="int64")
    with pytest.raises(EmptyWindow, match="row 1 of the batch has no tokens"):
        generate(model, batch, max_new_tokens=1)
    requests[1] = {"session": "unknown", "max_tokens": 9}
    batch = assembler.assemble_batch(
        requests, layout="left", pad_id=PAD, dtype="int64", on_error="return"
    )
    with pytest.raises(kalos.SessionNotFound, match=r"requests\[1\]"):
        model_inputs(batch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "packed"}, "layout 'left'"),
        ({"layout": "right"}, "layout 'left'"),
        ({"dtype": "int32"}, "dtype 'int64'"),
    ],
)
def test_batch_of_another_form_is_refused(model, store, assembler, options, words):
    batch = batch_of(store, assembler, (3, 4), **options)
    with pytest.raises(kalos.InvalidArgument, match=words):
        generate(model, batch, max_new_tokens=1)


def test_number_of_new_tokens_is_checked(model, store, assembler):
    batch = batch_of(store, assembler, (3,))
    with pytest.raises(kalos.InvalidArgument, match="max_new_tokens must be at least 1"):
        generate(model, batch, max_new_tokens=0)
    with pytest.raises(kalos.InvalidType, match="max_new_tokens must be an int"):
        generate(model, batch, max_new_tokens=1.5)


# ---- Continuous batching ----------------------------------------------------------------------


def test_prompts_are_lists_of_int_for_continuous_batching(store, assembler):
    batch = batch_of(store, assembler, (3, 5))
    made = prompts(batch, max_model_len=6, reserve=1)
    assert made == [ids(0, 3).tolist(), ids(1, 5).tolist()]
    assert {type(one) for row in made for one in row} == {int}
    with pytest.raises(kalos.BudgetExceeded, match="window 1 has 5 tokens"):
        prompts(batch, max_model_len=6, reserve=2)


def test_continuous_batching_gives_the_same_answers(store, assembler):
    from transformers import ContinuousBatchingConfig

    single = tiny(attn_implementation="sdpa").float()
    batch = batch_of(store, assembler, (3, 12, 7))
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=END, pad_token_id=PAD)
    made = single.generate_batch(
        prompts(batch, max_model_len=MODEL_LEN, reserve=6),
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, block_size=32),
        warmup=False,
    )
    wanted = generate(single, batch, max_new_tokens=6, do_sample=False)
    found = [made[name].generated_tokens for name in sorted(made)]
    assert [[one for one in row if one != END] for row in found] == [row.tolist() for row in wanted]


# ---- The KV cache -----------------------------------------------------------------------------


def talk(store, assembler, model, rounds, policy=None, max_tokens=120):
    """Yield each window of a chat, its logits without and with the cache, and how many were fed."""
    cache = SessionCache()
    for i in range(rounds):
        store.append("chat", "user", token_ids=ids(i, 12))
        with assembler.assemble("chat", max_tokens=max_tokens, reserve=20, policy=policy) as window:
            fed = cache.feed(window)
            cached = logits(model, fed, cache=cache.cache)[0, -1]
            yield window, logits(model, [window.token_ids])[0, -1], cached, fed.shape[1]
        answer = []
        for _ in range(4):
            answer.append(int(cached[2:].argmax()) + 2)
            cached = logits(model, [answer[-1:]], cache=cache.cache)[0, -1]
        cache.note(answer)
        store.append("chat", "assistant", token_ids=answer)


@pytest.mark.parametrize("stable", [True, False])
def test_cropped_cache_gives_the_logits_of_the_whole_window(model, store, assembler, stable):
    saved = 0
    policy = kalos.Policy(stable_prefix=stable)
    for window, whole, cached, fed in talk(store, assembler, model, 14, policy):
        assert torch.allclose(whole, cached, atol=1e-12)
        assert 1 <= fed <= len(window)
        saved += len(window) - fed
    assert saved > (600 if stable else 100)


def test_cache_is_cropped_by_what_the_report_says_was_reused(model, store, assembler):
    cache = DynamicCache()
    store.append("s", "user", token_ids=ids(0, 20))
    with assembler.assemble("s", max_tokens=64) as window:
        fed = ids_to_feed(window, cache)
        assert fed.tolist() == [window.token_ids.tolist()]
        logits(model, fed, cache=cache)
    logits(model, [[5, 6, 7]], cache=cache)  # an answer that is not stored
    store.append("s", "user", token_ids=ids(1, 8))
    with assembler.assemble("s", max_tokens=64) as window:
        assert window.report.reused_tokens == 20
        fed = ids_to_feed(window, cache)
        assert fed.tolist() == [window.token_ids[20:].tolist()]
        assert cache.get_seq_length() == 20
        cached = logits(model, fed, cache=cache)[0, -1]
        assert torch.allclose(cached, logits(model, [window.token_ids])[0, -1], atol=1e-12)


def test_answer_stored_under_other_ids_is_fed_again(model, store, assembler):
    cache = DynamicCache()
    store.append("s", "user", token_ids=ids(0, 20))
    with assembler.assemble("s", max_tokens=64) as window:
        logits(model, ids_to_feed(window, cache), cache=cache)
        held = window.token_ids.tolist()
    logits(model, [[5, 6, 7]], cache=cache)
    store.append("s", "assistant", token_ids=[5, 9, 7])  # as if encoded again from its text
    store.append("s", "user", token_ids=[8])
    with assembler.assemble("s", max_tokens=64) as window:
        assert window.report.reused_tokens == 23
        fed = ids_to_feed(window, cache, [*held, 5, 6, 7])
        assert fed.tolist() == [[9, 7, 8]]
        cached = logits(model, fed, cache=cache)[0, -1]
        assert torch.allclose(cached, logits(model, [window.token_ids])[0, -1], atol=1e-12)


def test_same_window_again_feeds_its_last_token(model, store, assembler):
    cache = SessionCache()
    store.append("s", "user", token_ids=ids(0, 9))
    for wanted in (9, 1):
        with assembler.assemble("s", max_tokens=64) as window:
            fed = cache.feed(window)
            assert fed.shape == (1, wanted)
            cached = logits(model, fed, cache=cache.cache)[0, -1]
            assert torch.allclose(cached, logits(model, [window.token_ids])[0, -1], atol=1e-12)


def test_inputs_of_a_window_are_keyword_arguments_of_the_model(model, store, assembler):
    chat = SessionCache()
    for i in range(2):
        store.append("s", "user", token_ids=ids(i, 9))
        with assembler.assemble("s", max_tokens=64) as window, torch.inference_mode():
            inputs = chat.inputs(model, window)
            assert inputs["input_ids"].shape == (1, 9)
            cached = model(**inputs).logits[0, -1]
            assert torch.allclose(cached, logits(model, [window.token_ids])[0, -1], atol=1e-12)


def test_forward_pass_that_failed_costs_no_wrong_token(model, store, assembler):
    cache = SessionCache()
    store.append("s", "user", token_ids=ids(0, 9))
    for _ in range(2):
        with assembler.assemble("s", max_tokens=64) as window:
            fed = cache.feed(window)  # given out and never fed
    assert fed.tolist() == [ids(0, 9).tolist()]


def test_generate_goes_on_from_the_cropped_cache(model, store, assembler):
    cache = SessionCache()
    for i in range(3):
        store.append("s", "user", token_ids=ids(i, 10))
        with assembler.assemble("s", max_tokens=200) as window:
            cache.feed(window)
            row = torch.from_numpy(window.token_ids.astype(np.int64))[None]
            options = {"attention_mask": torch.ones_like(row), "max_new_tokens": 5}
            options |= {"do_sample": False, "eos_token_id": None}
            wanted = model.generate(row, **options)
            made = model.generate(row, **{cache_argument(model): cache.cache}, **options)
        assert made.tolist() == wanted.tolist()
        answer = made[0, row.shape[1] :].tolist()
        cache.note(answer[:-1])  # the last token was never fed
        store.append("s", "assistant", token_ids=answer)


def test_cache_that_cannot_go_back_is_refused_and_left_as_it_was(model, store, assembler):
    store.append("s", "user", token_ids=ids(0, 9))
    two = DynamicCache()
    logits(model, [[3, 4], [5, 6]], cache=two)
    sliding = DynamicCache(config=sliding_config())
    logits(tiny_sliding(), [list(range(2, 14))], cache=sliding)
    for cache, words in ((two, "one row"), (sliding, "cannot go back")):
        length = cache.get_seq_length()
        with (
            assembler.assemble("s", max_tokens=64) as window,
            pytest.raises(kalos.InvalidArgument, match=words),
        ):
            ids_to_feed(window, cache)
        assert cache.get_seq_length() == length


def sliding_config():
    from transformers import MistralConfig

    return MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )


def tiny_sliding():
    from transformers import MistralForCausalLM

    return MistralForCausalLM(sliding_config()).to(DTYPE).eval()


def test_empty_window_and_ids_of_another_type_are_refused(store, assembler):
    store.set_segment("s", "head", token_ids=[3])
    policy = kalos.Policy(include_system=False)
    with (
        assembler.assemble("s", max_tokens=9, policy=policy) as window,
        pytest.raises(EmptyWindow, match="the window has no tokens"),
    ):
        ids_to_feed(window, DynamicCache())
    with pytest.raises(kalos.InvalidType, match="token_ids must be 1-D integers"):
        SessionCache().note([1.5])
