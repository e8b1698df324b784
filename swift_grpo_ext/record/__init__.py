"""The run's record: every completion once, and how it scored. Imports no torch, vLLM or ms-swift.

`tables` defines rows. `recorder` makes one of each completion, `rewards` says how it scored, the
diversity monitor what a round was worth. `log` writes them as Parquet, `query` reads them over all
sessions, with the tools.
"""
