"""Windows as prompts of vLLM: token IDs, a salt for each tenant, and checked lengths.

Run it without arguments to see the prompts, on any machine. With a model's path, where vLLM and a
GPU are, it generates the answers too: ``python examples/vllm_prompts.py /models/qwen3``.
"""

import sys
import tempfile
from pathlib import Path

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.vllm import EmptyWindow, tokens_prompt, tokens_prompts

MAX_MODEL_LEN, RESERVE, NUM_CHATS = 1024, 256, 2
SECRET = b"of the servers alone; read yours from where secrets are kept"
POLICY = kalos.Policy(generation_prompt=True)


def fill(store):
    for tenant in ("acme", "globex"):
        for chat in demo_data.conversations()[:NUM_CHATS]:
            turns = [
                {"role": one["role"], "content": one["content"]} for one in chat["messages"][:21]
            ]
            store.extend(chat["id"], turns, tenant=tenant)
            yield {"session": chat["id"], "tenant": tenant, "max_tokens": MAX_MODEL_LEN,
                   "reserve": RESERVE, "policy": POLICY}  # fmt: skip


def refused(store, assembler):
    """Show that a window without tokens never reaches the engine."""
    store.set_segment("new chat", "persona", "Keep it short.")
    policy = kalos.Policy(include_system=False)
    with assembler.assemble("new chat", max_tokens=MAX_MODEL_LEN, policy=policy) as window:
        try:
            tokens_prompt(window, max_model_len=MAX_MODEL_LEN, reserve=RESERVE, secret=SECRET)
        except EmptyWindow as error:
            print(f"refused: {error}")


def main(model=None):
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "vllm.kalos", tokenizer=model or demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        requests = list(fill(store))
        with assembler.assemble_batch(requests) as batch:
            prompts = tokens_prompts(
                batch, max_model_len=MAX_MODEL_LEN, reserve=RESERVE, secret=SECRET
            )
        for request, prompt in zip(requests, prompts, strict=True):
            ids, salt = prompt["prompt_token_ids"], prompt["cache_salt"]
            print(f"{request['tenant']}, {request['session']}: {len(ids)} IDs, salt {salt[:8]}...")
        refused(store, assembler)
        if model is None:
            return
        from vllm import LLM, SamplingParams

        engine = LLM(model=model, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=True)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=RESERVE))
        for request, output in zip(requests, outputs, strict=True):
            ids = [i for i in output.outputs[0].token_ids if i not in store.codec.structural_ids]
            store.append(request["session"], "assistant", token_ids=ids, tenant=request["tenant"])
            print(f"{request['session']}: {output.outputs[0].text[:60]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
