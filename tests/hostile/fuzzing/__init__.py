"""A fuzzer of everything that reads: `python -m tests.hostile.fuzzing --help`.

`seeds` has valid inputs, most of them written by other libraries; `json_texts` and `mutations` make hostile
ones of them, with lengths and checksums mended, so that what lies deep is reached; `runner` says what is a
failure.
"""
