"""Settings of a run in YAML: whether they hold together, before any GPU is asked.

`run.py` reads them, `rules.py` and `engines.py` check them, `memory.py` estimates what they need,
`share.py` knows where the presets and scripts of an installed package are. Plain values only: no
torch, no ms-swift.
"""

from swift_grpo_ext.checks.finding import Finding
from swift_grpo_ext.checks.presets import DEFAULTS, Run, read_run
from swift_grpo_ext.checks.rules import check

__all__ = ["DEFAULTS", "Finding", "Run", "check", "read_run"]
