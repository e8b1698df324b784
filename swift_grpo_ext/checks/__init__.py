"""What is wrong with a run before it starts: one way from settings to findings.

A check takes settings and yields findings (`finding.py`: error, warning, note, ok). Nothing else
decides what a fault is called or how it is mended. The settings come from one parser, ms-swift's
own with our flags: from a YAML file (`settings.py`), or in `swift` itself from its command line.

Who asks, and what:
- `swift-grpo-ext check`: `rules.py` (settings alone, pure), then `lookup.py`
  (what is on this machine: model, data, plugins, packages, GPUs).
- `swift rlhf` and `swift rollout`: `preflight.py` before a model is loaded, with `rows.py` (the
  data set) and `resume.py` (checkpoints). `enforce` turns the first error into a `ValueError`.
- `swift-grpo-ext doctor`: all of it, and `machine.py` (installation), `doctor.py` (model, template,
  first rows, servers).

`share.py` is beside that: the presets and scripts that an installed package brings along.
"""

from swift_grpo_ext.checks.finding import Finding
from swift_grpo_ext.checks.rules import check
from swift_grpo_ext.checks.settings import Run, read_run

__all__ = ["Finding", "Run", "check", "read_run"]
