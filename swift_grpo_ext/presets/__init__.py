"""Settings of a run in YAML: whether they hold together, before any GPU is asked.

`run.py` reads them, `rules.py` and `engines.py` check them, `memory.py` estimates what they need,
`share.py` knows where the presets and scripts of an installed package are. Plain values only: no
torch, no ms-swift.
"""

from swift_grpo_ext.presets.finding import Finding
from swift_grpo_ext.presets.rules import check
from swift_grpo_ext.presets.run import DEFAULTS, Run, read_run

__all__ = ["DEFAULTS", "Finding", "Run", "check", "read_run"]
