"""The run's record: every completion once, with its score. Imports no torch or ms-swift."""
