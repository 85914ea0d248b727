"""An OpenAI-style HTTP server on one model and one asyncache.

::

    app.py       the routes; who hangs up is cancelled, whatever the server tells of it
    wire.py      what comes in and goes out: fields, errors, chunks
    service.py   model, cache and batch, from the server's start to its end
    metrics.py   one snapshot of the cache as Prometheus metrics
    models.py    what can be served, and its text
    __main__.py  ``python -m examples.serve``

Read ``app.py`` first; how requests share a batch is in ``examples/llm/loop.py``.
"""
