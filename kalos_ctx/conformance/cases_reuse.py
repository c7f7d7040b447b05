"""Sections J, K and L: prefixes that stay, batches, and the hand-over to engines."""

from __future__ import annotations

from typing import Any

from kalos_ctx.conformance.case import case, expect
from kalos_ctx.conformance.stage import Stage, assistant, common_prefix, pairs, user

X = [1.0, 0.0]


@case(
    "B73",
    "Block keys under different salts share nothing",
    section="F",
    cause="the salt is missing from the first block's key",
    reports=("llm-d/llm-d-router#1494",),
    needs=("block_keys",),
)
def b73(stage: Stage) -> None:
    stage.fill("s", user(*range(64)))
    one, two, again = (
        stage.candidate.block_keys("s", 16, salt=salt) for salt in ("one", "two", "one")
    )
    expect(len(one) == 4, f"64 tokens are {len(one)} blocks of 16")
    expect(not set(one) & set(two), "blocks of two salts have the same key")
    expect(one == again, "the same salt gives other keys the second time")


@case(
    "B104",
    "The boundary seldom moves, and most of each window is as before",
    section="J",
    cause="a sliding boundary moves at every turn",
    reports=("cloudflare/agents#2200", "crystal-autobot/autobot#143", "microsoft/vscode#330232"),
    needs=("token_limit", "stable_prefix"),
)
def b104(stage: Stage) -> None:
    moves = reused = total = 0
    sent: list[int] = []
    for number in range(150):
        stage.fill("s", user(*[2 * number + 1] * 20))
        window = stage.window("s", 1000)
        moves += bool(sent) and window[:1] != sent[:1]
        if number:
            reused += common_prefix(sent, window)
            total += len(window)
        reply = [2 * number + 2] * 20
        stage.fill("s", assistant(*reply))
        sent = window + reply
    expect(moves <= 12, f"in 150 windows of 6,000 tokens the beginning moves {moves} times")
    expect(reused >= 0.9 * total, f"only {reused / total:.0%} of a window is as before on average")


@case(
    "B105",
    "Pinned text that changes often stands behind what does not",
    section="J",
    priority=2,
    cause="volatile tokens at the very beginning",
    reports=("goruck/home-generative-agent#617", "NousResearch/hermes-agent#18547"),
    needs=("pin", "volatile"),
)
def b105(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "clock", [50, 51], volatile=True)
    stage.candidate.pin("s", "system", [1, 2, 3])
    stage.fill("s", user(4))
    before = stage.window("s", None)
    stage.candidate.pin("s", "clock", [50, 52], volatile=True)
    after = stage.window("s", None)
    same = common_prefix(before, after)
    expect(same >= 3, f"a clock that moves on leaves {same} tokens of the prompt as before")


@case(
    "B106",
    "What is recalled leaves the prompt's beginning alone",
    section="J",
    cause="the recalled block stands at the head and is ranked anew each turn",
    reports=("BYK/loreai#42", "mozilla-ai/clawbolt#1420"),
    needs=("token_limit", "recall"),
)
def b106(stage: Stage) -> None:
    stage.candidate.add_passages("notes", [X, [0.0, 1.0]], [[70], [71]])
    stage.fill("s", *pairs(4), user(99))
    before, after = (
        stage.candidate.assemble("s", 400, query=query, top_k=1, collection="notes")
        for query in (X, [0.0, 1.0])
    )
    same = common_prefix(before, after)
    expect(same >= 8, f"another passage leaves {same} of the 8 tokens before the last user turn")


@case(
    "B107",
    "Block keys are the same in every process",
    section="J",
    cause="hashes that depend on the process",
    reports=("LMCache/LMCache#1139", "LMCache/LMCache#2136", "LMCache/LMCache#2979"),
    needs=("block_keys", "readers"),
)
def b107(stage: Stage) -> None:
    stage.fill("s", user(*range(1, 65)))
    keys = stage.candidate.block_keys("s", 16)
    for seed in ("0", "1"):
        there = stage.elsewhere([["block_keys", ["s", 16], {}]], seed=seed)[0]
        expect(there == keys, "another process has other keys for the same tokens")


@case(
    "B109",
    "Only whole blocks have keys",
    section="J",
    priority=3,
    cause="partial blocks are counted",
    reports=("llm-d/llm-d-router#2889",),
    needs=("block_keys",),
)
def b109(stage: Stage) -> None:
    stage.fill("s", user(*range(63)))
    counts = [len(stage.candidate.block_keys("s", size)) for size in (1, 16, 63, 64)]
    expect(counts == [63, 3, 1, 0], f"63 tokens have {counts} keys for blocks of 1, 16, 63, 64")


# ---- K. Batches, padding, masks ------------------------------------------------------------------


def fill_rows(stage: Stage) -> list[str]:
    """Store a session of three tokens and one of five; the padding occurs in both."""
    stage.fill("three", user(5, 2, 2))
    stage.fill("five", user(2, 6, 7, 8, 9))
    return ["three", "five"]


@case(
    "B110",
    "Rows of a batch have positions of their own",
    section="K",
    cause="positions are shared across rows",
    reports=("unslothai/unsloth#4078",),
    needs=("batches",),
)
def b110(stage: Stage) -> None:
    names = fill_rows(stage)
    packed = stage.candidate.batch(names, 9, layout="packed")
    expect(packed.starts == [0, 3, 8], f"rows of 3 and 5 tokens begin at {packed.starts}")
    expect(packed.token_ids == [5, 2, 2, 2, 6, 7, 8, 9], f"packed rows are {packed.token_ids}")
    expect(packed.positions == [0, 1, 2, 0, 1, 2, 3, 4], f"positions are {packed.positions}")
    left = stage.candidate.batch(names, 9, layout="left", pad_id=0)
    shown = [list(row) for row in left.positions]
    expect(
        shown[0][2:] == [0, 1, 2] and shown[1] == [0, 1, 2, 3, 4],
        f"padded on the left the positions are {shown}",
    )


@case(
    "B111",
    "A mask comes from lengths, also where the padding is an ID of the content",
    section="K",
    cause="the padding equals the end-of-text ID, so real ones are masked",
    reports=("microsoft/onnxruntime-genai#1694", "huggingface/transformers#25790"),
    needs=("batches",),
)
def b111(stage: Stage) -> None:
    left = stage.candidate.batch(fill_rows(stage), 9, layout="left", pad_id=2)
    mask: list[Any] = [list(row) for row in left.mask]
    expect(mask == [[0, 0, 1, 1, 1], [1] * 5], f"with 2 as padding the mask is {mask}")


# ---- L. Hand-over to engines ---------------------------------------------------------------------


@case(
    "B114",
    "IDs outside the vocabulary are refused",
    section="L",
    cause="IDs are not checked before they are used as an index",
    reports=("vllm-project/vllm#51795", "vllm-project/vllm#9634", "sgl-project/sglang#27482"),
    needs=("vocabulary",),
)
def b114(stage: Stage) -> None:
    candidate = stage.open(vocab_size=1000)
    stage.fill("s", user(0, 999))
    for bad in (-1, 1000, 1001, 2**31):
        expect(
            stage.refused(candidate.append, "s", "user", [1, bad]),
            f"the ID {bad} is stored where the vocabulary has 1,000",
        )
    window = stage.window("s", None)
    expect(window == [0, 999], f"behind refused IDs the window is {window}")
