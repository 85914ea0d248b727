"""An abort storm: thousands of requests, half of them cancelled, each byte checked.

::

    toy.py       a model whose every byte tells which tokens it stands for; prompts
    weather.py   a store that is slow, and now and then forgets a page
    storm.py     clients, the batch that they share, and who hangs up when
    lag.py       how late the event loop is, and the cache's part in that
    inside.py    when the loop is inside the cache
    report.py    the tables and the plot
    __main__.py  ``python -m examples.storm``, or ``make storm``
"""
