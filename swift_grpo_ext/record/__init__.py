"""The run's record: every completion once, and how it scored. Imports no torch or ms-swift."""
