"""A sidecar's clients get what a store and an assembler give in process."""

import asyncio
import os
import threading

import numpy as np
import pytest
from helpers.sidecars import SidecarProcess, eventually, socket_folder, threaded

import kalos_ctx
from kalos_ctx import ContextAssembler, Policy, SessionStore
from kalos_ctx.demo_data import tokenizer_dir

GPU = os.environ.get("KALOS_DEVICE") == "cuda"
WAYS = {
    "memory": {"mode": "served", "transport": "memory"},
    "socket": {"mode": "served", "transport": "socket"},
    "direct": {"mode": "direct"},
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with sessions of several kinds, passages, and a sidecar that serves it."""
    path = tmp_path_factory.mktemp("served") / "chats.kalos"
    rng = np.random.default_rng(5)
    with SessionStore.open(path, vector_dim=8) as store:
        fill(store, rng)
    with socket_folder() as folder, threaded(path, f"{folder}/s") as sidecar:
        yield path, f"{folder}/s", sidecar


def fill(store, rng):
    for n in range(60):
        ids = rng.integers(0, 9000, rng.integers(1, 40))
        store.append("plain", ("user", "assistant")[n % 2], token_ids=ids, framed=True)
    for n in range(12):
        store.append("tools", "user", token_ids=rng.integers(0, 9000, 9), framed=True)
        store.append("tools", "assistant", token_ids=[1, 2, 3], group=f"g{n}", framed=True)
        store.append("tools", "tool", token_ids=rng.integers(0, 9000, 30), group=f"g{n}")
    store.set_segment("plain", "profile", token_ids=[7, 8, 9])
    store.set_segment(None, "rules", token_ids=[4, 5])
    store.set_segment("tools", "clock", token_ids=[6], placement="end", volatile=True)
    for n in range(6):
        store.append("summed", "user", token_ids=[n] * 5, framed=True)
    store.summarize("summed", 0, 3, token_ids=[99, 98])
    store.append("müller/../x", "user", token_ids=[1], tenant="ä", framed=True)
    store.append(b"\xff\x00", "user", token_ids=[2], framed=True)
    rows = rng.standard_normal((50, 8)).astype(np.float32)
    store.add_passages("notes", rows, token_ids=[[n, n + 1] for n in range(50)])
    for n in range(5):
        store.append("vectors", "user", token_ids=[n], vector=rows[n], framed=True)


@pytest.fixture(params=WAYS)
def client(request, filled):
    _, socket, _ = filled
    with kalos_ctx.connect(socket, timeout=10, **WAYS[request.param]) as client:
        yield client


@pytest.fixture
def assembler(filled):
    path, _, _ = filled
    with SessionStore.open(path, "r") as store, ContextAssembler(store, device="cpu") as assembler:
        yield assembler


def told(report):
    """What a report says, but for times."""
    hits = report.hits
    return {
        "segments": report.segments,
        "kept": report.kept,
        "dropped": report.dropped,
        "hits": (hits.ids.tolist(), hits.scores.tolist(), hits.counts.tolist(), hits.sources),
        "reason": hits.reason,
        "trimmed": report.trimmed,
        "low_water": report.low_water,
        "by_segment": report.by_segment,
        "reused": (report.reused_tokens, report.reused_until),
        # A window that recalls may pass over a GPU; its answer and its report are the same.
        "path": "" if GPU else report.path,
        "degraded": report.degraded,
        "keys": list(report.block_keys(16)),
    }


QUERY = np.linspace(-1, 1, 8).astype(np.float32)
REQUESTS = [
    {"session": "plain", "max_tokens": 300},
    {"session": "plain", "max_tokens": 64, "reserve": 8},
    {"session": "plain", "max_tokens": None},
    {"session": "plain", "max_tokens": 300, "as_of": 7},
    {"session": "plain", "max_tokens": 100, "policy": Policy(stable_prefix=False)},
    {"session": "plain", "max_tokens": 97, "policy": Policy(allow_partial=True, start_on="user")},
    {"session": "tools", "max_tokens": 150},
    {"session": "tools", "max_tokens": 120, "policy": Policy(keep_groups=False)},
    {"session": "tools", "max_tokens": 90, "policy": Policy(alternation="merge")},
    {"session": "summed", "max_tokens": 100},
    {"session": "müller/../x", "tenant": "ä", "max_tokens": 10},
    {"session": b"\xff\x00", "max_tokens": 10},
    {"session": "plain", "max_tokens": 200, "query": QUERY, "top_k": 3, "collections": "notes"},
    {"session": "plain", "max_tokens": 200, "query": QUERY.tolist(), "top_k": 5,
     "collections": ["notes"], "placement": "end", "min_score": 0.1},
    {"session": "vectors", "max_tokens": 200, "query": QUERY, "top_k": 3, "session_recall": True},
    {"session": "plain", "max_tokens": 200, "query": np.zeros(8), "top_k": 3,
     "collections": "notes"},
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: str(r["session"])[:6])
def test_a_window_is_that_of_an_assembler_with_all_its_report(client, assembler, request_):
    with client.assemble(**request_) as asked, assembler.assemble(**request_) as made:
        assert asked.token_ids.tolist() == made.token_ids.tolist()
        assert (asked.session, asked.tenant) == (made.session, made.tenant)
        found, expected = told(asked.report), told(made.report)
        found.pop("reused"), expected.pop("reused")  # each compares with its own window before
        assert found == expected
        assert set(asked.report.timings) == set(made.report.timings)


def test_reuse_is_counted_against_the_window_before(filled):
    _, socket, _ = filled
    with kalos_ctx.connect(socket, mode="served") as client:
        client.append("grows", "user", token_ids=[1, 2, 3], framed=True)
        client.assemble("grows", max_tokens=100).release()
        client.append("grows", "assistant", token_ids=[4, 5], framed=True)
        client.append("grows", "user", token_ids=[6], framed=True)
        window = client.assemble("grows", max_tokens=100)
        assert window.report.reused_tokens == 2 + 5  # the tenant's segment stands before them
        assert window.report.reused_until is None


def test_a_report_outlives_its_window_and_the_connection(filled):
    _, socket, _ = filled
    with kalos_ctx.connect(socket, mode="served") as client:
        window = client.assemble("tools", max_tokens=100)
        report = window.report
        window.release()
    assert report.dropped
    assert report.segments[-1].stop == report.by_segment["history"] + 3


ERRORS = [
    ({"session": "nobody", "max_tokens": 5}, "SessionNotFound"),
    ({"session": "", "max_tokens": 5}, None),
    ({"session": "plain", "max_tokens": 5, "reserve": 6}, None),
    ({"session": "plain", "max_tokens": -1}, None),
    ({"session": "plain", "max_tokens": "5"}, None),
    ({"session": "plain", "max_tokens": 6}, "BudgetExceeded"),
    ({"session": "plain", "max_tokens": 100, "policy": "last"}, None),
    ({"session": "plain", "max_tokens": 100, "query": [1.0], "top_k": 1, "collections": "notes"},
     "DimensionMismatch"),
    ({"session": "plain", "max_tokens": 100, "query": [np.nan] * 8, "top_k": 1,
      "collections": "notes"}, "NonFiniteVector"),
    ({"session": "plain", "max_tokens": 100, "query": QUERY, "top_k": 1025}, None),
    ({"session": "plain", "max_tokens": 100, "query": QUERY, "top_k": -1}, None),
    ({"session": "plain", "max_tokens": 100, "query": QUERY, "top_k": 1, "collections": "notes",
      "filters": {"nothing": 1}}, "UnknownField"),
    ({"session": "plain", "max_tokens": 100, "placement": "nowhere"}, None),
    ({"session": "plain", "max_tokens": 100, "recall_role": 5}, None),
    ({"session": "vectors", "max_tokens": 300, "policy": Policy(alternation="strict")}, "Conflict"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "name"), ERRORS)
def test_what_an_assembler_refuses_raises_the_same_from_a_client(client, assembler, request_, name):
    with pytest.raises(kalos_ctx.KalosError) as made:
        assembler.assemble(**request_)
    with pytest.raises(type(made.value)) as asked:
        client.assemble(**request_)
    assert type(asked.value) is type(made.value)
    assert name is None or type(made.value).__name__ == name
    assert str(asked.value) == str(made.value)
    assert vars(asked.value) == vars(made.value)


def test_recall_plan_and_count_are_those_of_the_assembler(client, assembler):
    for options in (
        {"top_k": 4, "collections": "notes"},
        {"top_k": 2, "collections": ("notes",), "session": "vectors"},
        {"top_k": 0, "collections": "notes"},
        {"top_k": 4, "collections": "nothing"},
    ):
        asked, made = client.recall(QUERY, **options), assembler.recall(QUERY, **options)
        for name in ("ids", "scores", "counts"):
            assert getattr(asked, name).tolist() == getattr(made, name).tolist()
            assert getattr(asked, name).dtype == getattr(made, name).dtype
        assert (asked.sources, asked.reason) == (made.sources, made.reason)
    several = np.stack([QUERY, -QUERY])
    asked = client.recall(several, top_k=2, collections="notes")
    assert (
        asked.ids.tolist() == assembler.recall(several, top_k=2, collections="notes").ids.tolist()
    )
    for request in REQUESTS:
        assert client.plan(**request) == assembler.plan(**request)
    assert client.count("plain") == 60
    assert client.count("nobody") == 0


@pytest.mark.parametrize("layout", ["packed", "left", "right"])
def test_a_batch_is_that_of_an_assembler(client, assembler, layout):
    requests = [{"session": "plain", "max_tokens": 90}, {"session": "tools", "max_tokens": 70},
                {"session": "nobody", "max_tokens": 5}]  # fmt: skip
    options = {"layout": layout, "pad_id": 0, "on_error": "return", "dtype": "int64"}
    with client.assemble_batch(requests, **options) as asked:
        made = assembler.assemble_batch(requests, **options)
        assert np.array_equal(asked.token_ids, made.token_ids)
        assert type(asked[2]) is type(made[2])
        assert str(asked[2]) == str(made[2])
        with pytest.raises(kalos_ctx.SessionNotFound):
            client.assemble_batch(requests, layout=layout, pad_id=0)


def test_out_is_filled_and_one_too_short_is_refused(client, assembler):
    expected = assembler.assemble("plain", max_tokens=64).token_ids
    out = np.zeros(64, np.int32)
    client.assemble("plain", max_tokens=64, out=out)
    assert out[: len(expected)].tolist() == expected.tolist()
    for wrong in (np.zeros(1, np.int32), np.zeros(64, np.int64), "x"):
        with pytest.raises(kalos_ctx.InvalidArgument):
            client.assemble("plain", max_tokens=64, out=wrong)


def test_windows_of_a_client_are_bounded_and_come_back(filled):
    _, socket, _ = filled
    with kalos_ctx.connect(socket, mode="served", slots=2, timeout=0.2) as client:
        held = [client.assemble("plain", max_tokens=64) for _ in range(2)]
        with pytest.raises(kalos_ctx.PoolExhausted):
            client.assemble("plain", max_tokens=64)
        held[0].release()
        kept = client.assemble("plain", max_tokens=64).token_ids
        assert kept.tolist() == held[1].token_ids.tolist()


def test_a_message_larger_than_its_slot_goes_by_the_socket(tmp_path):
    ids = np.arange(9000, dtype=np.int32)
    with (
        socket_folder() as folder,
        threaded(
            tmp_path / "s", f"{folder}/s", request_nbytes=4096, response_nbytes=4096
        ) as sidecar,
        kalos_ctx.connect(f"{folder}/s", mode="served") as client,
    ):
        assert client.append("s", "user", token_ids=ids, framed=True) == 0
        assert client.assemble("s", max_tokens=None).token_ids.tolist() == ids.tolist()
        client.add_passages("c", np.ones((1, 3), np.float32))
        query = np.ones(2000, np.float32)
        with pytest.raises(kalos_ctx.DimensionMismatch):
            client.assemble("s", max_tokens=None, query=query, top_k=1, collections="c")
        assert sidecar.status.read()["counts"]["on_socket"] == 1
        assert client.ping()


def test_writes_of_a_client_are_those_of_a_store(filled):
    path, socket, _ = filled
    with kalos_ctx.connect(socket, mode="served") as client, SessionStore.open(path, "r") as store:
        turn = {"group": "g", "created_at": 12.5, "metadata": {"a": [1, None, {"b": "ü"}]}}
        assert client.append("written", "assistant", token_ids=[1, 2], key="k", **turn) == 0
        assert client.append("written", "assistant", token_ids=[1, 2], key="k", **turn) == 0
        with pytest.raises(kalos_ctx.IdempotencyConflict):
            client.append("written", "assistant", token_ids=[1], key="k")
        more = [{"role": "tool", "token_ids": np.array([3]), "group": "g"}, {"role": "user",
                "token_ids": [4], "vector": [1.0] * 8}]  # fmt: skip
        assert client.extend("written", more) == [1, 2]
        (first, *_) = store.turns("written")
        assert (first.group, first.created_at) == ("g", 12.5)
        assert first.metadata == turn["metadata"]
        client.set_segment("written", "profile", token_ids=[9])
        assert list(store.segments("written")) == ["profile"]
        client.set_segment("written", "profile")
        client.summarize("written", 0, 2, token_ids=[5])
        client.fork("written", "forked", at=2)
        assert store.count("forked") == 2
        assert client.rollback("written", 1, expect_last=2) == 2
        ids = client.add_passages("more", np.ones((2, 8)), token_ids=[[1], [2]],
                                  metadata=[{"x": 1}, {"x": 2}])  # fmt: skip
        assert [p.metadata["x"] for p in store.passages("more", ids)] == [1, 2]
        assert client.delete_passages("more", ids) == 2
        assert client.delete("written").counts["turns"] == 1
        assert "forked" in client.sessions(prefix="fork").items
        client.delete("forked")


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "narrator", "token_ids": [1]},
        {"role": "user"},
        {"role": "user", "token_ids": [-1]},
        {"role": "user", "token_ids": [1], "metadata": {1: 2}},
        {"role": "user", "token_ids": [1], "metadata": {"x": object()}},
        {"role": "user", "token_ids": [1], "group": 2.5},
        {"role": "user", "token_ids": [1], "vector": [1.0]},
        {"role": "user", "content": "text without a tokenizer"},
        {"role": "user", "token_ids": object()},
    ],
)
def test_a_refused_write_raises_as_in_process_and_changes_nothing(filled, tmp_path, wrong):
    _, socket, _ = filled
    store = SessionStore.open(tmp_path / "s", vector_dim=8)
    with store, pytest.raises(kalos_ctx.KalosError) as made:
        store.append("s", **wrong)
    with kalos_ctx.connect(socket, mode="served") as client:
        with pytest.raises(kalos_ctx.KalosError) as asked:
            client.append("refused", **wrong)
        assert isinstance(asked.value, (type(made.value), kalos_ctx.InvalidType))
        assert client.count("refused") == 0


def test_text_is_framed_by_the_sidecars_template(tmp_path):
    tokenizer = str(tokenizer_dir())
    with (
        socket_folder() as folder,
        threaded(tmp_path / "s", f"{folder}/s", tokenizer=tokenizer),
        kalos_ctx.connect(f"{folder}/s", mode="served", timeout=10) as served,
    ):
        served.append("chat", "user", "Where did I park?")
        served.set_segment("chat", "system", "You are brief.")
        with kalos_ctx.connect(f"{folder}/s", mode="direct", device="cpu", timeout=10) as direct:
            policy = Policy(generation_prompt=True)
            one = served.assemble("chat", max_tokens=100, policy=policy)
            two = direct.assemble("chat", max_tokens=100, policy=policy)
            assert one.token_ids.tolist() == two.token_ids.tolist()
            assert told(one.report) == told(two.report)


def test_direct_reads_send_no_message_and_outlive_the_sidecar(tmp_path):
    with socket_folder() as folder:
        with SidecarProcess(tmp_path / "s", f"{folder}/s") as sidecar:
            client = kalos_ctx.connect(f"{folder}/s", mode="direct", device="cpu")
            client.append("s", "user", token_ids=[1, 2, 3], framed=True)
            before = client.status()["counts"]["requests"]
            for _ in range(20):
                assert client.assemble("s", max_tokens=10).token_ids.tolist() == [1, 2, 3]
                assert client.count("s") == 1
            assert client.status()["counts"]["requests"] == before
            sidecar.kill()
            assert client.assemble("s", max_tokens=10).token_ids.tolist() == [1, 2, 3]
            with pytest.raises(kalos_ctx.SidecarUnavailable):
                client.append("s", "user", token_ids=[4], framed=True)
        with SidecarProcess(tmp_path / "s", f"{folder}/s"):
            client.append("s", "user", token_ids=[5], framed=True)
            assert client.assemble("s", max_tokens=10).token_ids.tolist() == [1, 2, 3, 5]
            client.close()


def test_auto_gives_direct_mode_and_says_why_where_it_does_not(tmp_path):
    with socket_folder() as folder, threaded(tmp_path / "s", f"{folder}/s"):
        with kalos_ctx.connect(f"{folder}/s") as client:
            assert (client.mode, client.mode_why) == ("direct", "")
        with kalos_ctx.connect(f"{folder}/s", store_path=tmp_path / "elsewhere") as client:
            assert client.mode == "served"
            assert "cannot be opened here" in client.mode_why
        with pytest.raises(kalos_ctx.KalosError):
            kalos_ctx.connect(f"{folder}/s", mode="direct", store_path=tmp_path / "elsewhere")


def test_90_many_threads_share_a_client_and_each_gets_its_own_answer(filled, assembler):
    _, socket, _ = filled
    sizes = [64, 80, 100, 300]
    expected = {n: assembler.assemble("plain", max_tokens=n).token_ids.tolist() for n in sizes}
    wrong = []
    with kalos_ctx.connect(socket, mode="served", timeout=30) as client:

        def ask(k):
            for n in range(200):
                size = sizes[(n + k) % len(sizes)]
                with client.assemble("plain", max_tokens=size) as window:
                    if window.token_ids.tolist() != expected[size]:
                        wrong.append(size)
                if client.count("plain") != 60:
                    wrong.append("count")

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_one_thread_without_pause_gets_each_answer_to_its_request(filled):
    _, socket, _ = filled
    with kalos_ctx.connect(socket, mode="served", timeout=30) as client:
        for n in range(3000):
            size = 64 + n % 500
            with client.assemble("plain", max_tokens=size) as window:
                assert len(window) <= size
                assert window.report._parts.total == size


def test_an_event_loop_asks_without_being_blocked(filled):
    _, socket, _ = filled

    async def main():
        async with await kalos_ctx.connect_async(socket, mode="served") as client:
            assert await client.ping()
            counts = await asyncio.gather(*(client.count("plain") for _ in range(20)))
            assert counts == [60] * 20
            window = await client.assemble("plain", max_tokens=64)
            assert len(window) <= 64
            task = asyncio.ensure_future(client.assemble("plain", max_tokens=64))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            free = client.client.pool
            window.release()
            for _ in range(500):
                if free.free == free.slots:
                    return True
                await asyncio.sleep(0.01)
            return False

    assert asyncio.run(main())


def test_the_status_page_counts_without_a_call(filled):
    _, socket, sidecar = filled
    with kalos_ctx.connect(socket, mode="served") as client:
        before = client.status()
        client.assemble("plain", max_tokens=64)
        with pytest.raises(kalos_ctx.SessionNotFound):
            client.assemble("nobody", max_tokens=64)
        client.ping()
        asked = before["counts"]["requests"] + 3
        assert eventually(lambda: client.status()["counts"]["requests"] == asked)
        after = client.status()
        grew = {name: after["counts"][name] - before["counts"][name] for name in after["counts"]}
        assert (grew["requests"], grew["windows"], grew["errors"]) == (3, 1, 1)
        assert grew["tokens"] > 0
        assert after["state"] == "ready"
        assert after["stages"]["total"]["sum_s"] > before["stages"]["total"]["sum_s"]
        assert eventually(lambda: client.status()["gauges"]["clients"] >= 1)
        assert after["generation"] == sidecar.generation


def test_a_closed_client_says_so(filled):
    _, socket, _ = filled
    client = kalos_ctx.connect(socket, mode="served")
    client.close()
    client.close()
    for call in (lambda: client.count("plain"), lambda: client.assemble("plain", max_tokens=5)):
        with pytest.raises(kalos_ctx.StoreClosed):
            call()
