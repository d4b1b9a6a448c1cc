"""Quantised targets as strangers make them, right ones and ones with a mistake, by packages that people use.

They judge `tcap compare` and `tcap localize`. Read `entry.py` first (what an entry is), then `layers.py`
(layers that keep their weights packed as GPTQ, AWQ, DeepSeek and gpt-oss do), and any catalogue.
`python -m tests.quantised_zoo.run` scores all. They were written by somebody who had not read the code that
judges them, nor its tests: add what a porter does, not what that code can do.
"""
