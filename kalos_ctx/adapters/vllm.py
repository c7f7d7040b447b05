"""Windows as prompts of vLLM.

Extra `vllm`. A `TokensPrompt` is a plain dict when the program runs, so that this module imports
nothing of vLLM: a gateway without a GPU can make prompts for engines elsewhere::

    prompt = tokens_prompt(window, max_model_len=8192, reserve=512, secret=SECRET)
    outputs = llm.generate(prompt, SamplingParams(max_tokens=512))
    store.append(session, "assistant", token_ids=outputs[0].outputs[0].token_ids)

Checked against vLLM 0.33's own input types and prompt parser (`vllm.inputs`,
`vllm.renderers.inputs.preprocess`), which run without a GPU; no engine was run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kalos_ctx.adapters.engine_prompts import ContextWindow, EmptyWindow, cache_salt, prompt_ids
from kalos_ctx.errors import KalosError

if TYPE_CHECKING:
    from vllm.inputs import TokensPrompt


__all__ = ["EmptyWindow", "cache_salt", "tokens_prompt", "tokens_prompts"]


def tokens_prompt(
    window: ContextWindow, *, max_model_len: int, reserve: int = 1, secret: bytes = b""
) -> TokensPrompt:
    """Return a window as a prompt of token IDs whose cached blocks only its tenant shares.

    Parameters
    ----------
    window : ContextWindow
        May be released afterwards: the IDs are copied.
    max_model_len : int
        The engine's, in tokens: `llm.llm_engine.model_config.max_model_len`. Nothing is left to
        the engine's own truncation.
    reserve : int
        Tokens the engine may generate, `SamplingParams.max_tokens`; at least 1.
    secret : bytes
        Keys the salt; see `cache_salt`.

    Returns
    -------
    TokensPrompt
        `prompt_token_ids` and `cache_salt`.

    Raises
    ------
    EmptyWindow, BudgetExceeded, WindowReleased, InvalidArgument, InvalidType
    """
    ids = prompt_ids(window, max_model_len=max_model_len, reserve=reserve)
    prompt: Any = {"prompt_token_ids": ids, "cache_salt": cache_salt(window.tenant, secret)}
    return prompt  # type: ignore[no-any-return,unused-ignore]


def tokens_prompts(
    windows: Iterable[ContextWindow | KalosError],
    *,
    max_model_len: int,
    reserve: int = 1,
    secret: bytes = b"",
) -> list[TokensPrompt]:
    """Return several windows, such as a `ContextBatch`, as prompts; as `tokens_prompt`.

    Raises
    ------
    KalosError
        The error that stands in a window's place.
    """
    prompts = []
    for window in windows:
        if isinstance(window, KalosError):
            raise window
        prompts.append(
            tokens_prompt(window, max_model_len=max_model_len, reserve=reserve, secret=secret)
        )
    return prompts
