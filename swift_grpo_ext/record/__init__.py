"""The run's record: every completion once, and how it scored. Imports no torch, vLLM or ms-swift.

`recorder` makes a row of each completion (`row`), `rewards` says how it scored, `log` writes both
as Parquet, `reader` reads them over all ranks and sessions.
"""
