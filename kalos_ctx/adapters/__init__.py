"""Kalos inside other frameworks: one module a framework, each an optional extra.

`openai_agents`, `langchain` and `llama_index` keep chat histories; `huggingface`, `vllm` and
`sglang` hand windows to an engine. Importing this package imports none of the frameworks.
"""
