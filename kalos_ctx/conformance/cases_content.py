"""Sections C and G: tokens as given, and content at its edges."""

from __future__ import annotations

import random

from kalos_ctx.conformance.case import case, expect
from kalos_ctx.conformance.stage import Stage, assistant, user


@case(
    "B29",
    "A control token never stands in a user's content",
    section="C",
    cause="text is rendered and then tokenised, so user text can become control tokens",
    reports=("huggingface/transformers#29279", "vllm-project/vllm#31735"),
    needs=("control_ids",),
)
def b29(stage: Stage) -> None:
    control = (100, 101)
    candidate = stage.open(vocab_size=200, control_ids=control)
    rng = random.Random(29)
    contents = [
        [5, 100, 6],
        [101],
        *([rng.randrange(97, 105) for _ in range(4)] for _ in range(50)),
    ]
    for number, content in enumerate(contents):
        if stage.refused(candidate.append, f"s{number}", "user", content):
            continue
        window = candidate.assemble(f"s{number}", None)
        expect(
            not set(control) & set(window),
            "a control token stands in a window, written by a user's content",
        )


@case(
    "B30",
    "Tokens come back as they were given",
    section="C",
    cause="decoding and encoding again is not the identity",
    reports=("huggingface/trl#5224",),
)
def b30(stage: Stage) -> None:
    stage.fill("s", user(7), assistant(10, 11), user(1, 0, 11))
    window = stage.window("s", None)
    expect(window == [7, 10, 11, 1, 0, 11], f"[7], [10, 11] and [1, 0, 11] come back as {window}")


@case(
    "B32",
    "A window and the reply to it are the beginning of the next window",
    section="C",
    cause="generated tokens against tokens that were encoded again",
    reports=("mlc-ai/mlc-llm#3179", "LostRuins/koboldcpp#1368"),
)
def b32(stage: Stage) -> None:
    sent: list[int] = []
    for number in range(10):
        stage.fill("s", user(100 + number, 5))
        window = stage.window("s", None)
        expect(
            window[: len(sent)] == sent, "what the engine has seen is not the window's beginning"
        )
        reply = [200 + number, 6, 7]
        stage.fill("s", assistant(*reply))
        sent = window + reply


@case(
    "B36",
    "A begin-of-text token stands once, and content that begins with one is left alone",
    section="C",
    cause="both the template and the tokeniser add one",
    reports=("vllm-project/vllm#27515", "sgl-project/sglang#888"),
    needs=("pin",),
)
def b36(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "system", [0, 5])
    stage.fill("s", user(7))
    window = stage.window("s", None)
    expect(window == [0, 5, 7], f"[0, 5] pinned and a turn of [7] give {window}")
    stage.fill("t", user(0, 7))
    window = stage.window("t", None)
    expect(window == [0, 7], f"a turn of [0, 7] comes back as {window}")


@case(
    "B39",
    "Two user turns in a row are left, merged or refused, as was asked",
    section="C",
    priority=2,
    cause="trimming, or several writers, leave two user turns in a row",
    reports=("vllm-project/vllm#6862", "microsoft/autogen#3597"),
    needs=("alternation",),
)
def b39(stage: Stage) -> None:
    stage.fill("s", user(1), user(2), assistant(3))
    for alternation in ("off", "merge"):
        window = stage.window("s", None, alternation=alternation)
        expect(window == [1, 2, 3], f'alternation="{alternation}" gives {window}')
    expect(
        stage.refused(stage.window, "s", None, alternation="strict"),
        'alternation="strict" takes two user turns in a row',
    )


@case(
    "B74",
    "Odd text in metadata comes back unchanged or is refused",
    section="G",
    priority=2,
    cause="the backend cannot store U+0000 or lone surrogates",
    reports=("coder/coder#28625", "ZJU-REAL/HugAgentOS#93"),
    needs=("metadata", "read"),
)
def b74(stage: Stage) -> None:
    for number, text in enumerate(("a\0b", "\ud83d", "\U0001f600", "a\u0308 \u00e4", "\u2028")):
        session = f"s{number}"
        if stage.refused(stage.candidate.append, session, "user", [1], metadata={"text": text}):
            continue
        if stage.has("reopen"):
            stage.reopen()
        turns = stage.candidate.turns(session)
        expect(
            [turn.token_ids for turn in turns] == [[1]], f"{text!a} in metadata changes the turn"
        )
        kept = (turns[0].metadata or {}).get("text")
        expect(kept == text, f"{text!a} in metadata comes back as {kept!a}")


@case(
    "B76",
    "A turn without tokens does no harm",
    section="G",
    cause="an empty turn is stored and replayed for ever",
    reports=("HKUDS/nanobot#1303", "dimagi/open-chat-studio#4106", "github/copilot-cli#4269"),
)
def b76(stage: Stage) -> None:
    stage.fill("s", user(1))
    stage.refused(stage.candidate.append, "s", "assistant", [])
    stage.fill("s", user(2), assistant(3))
    window = stage.window("s", None)
    expect(window == [1, 2, 3], f"behind an empty turn the window is {window}, not [1, 2, 3]")
