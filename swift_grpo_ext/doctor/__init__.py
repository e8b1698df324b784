"""`swift-grpo-ext doctor`: is this machine ready, and does what was named fit together?

Each check looks at one thing and answers with a `Result`: green, yellow (works, or will, with a
loss) or red (does not work), the last two with a remedy. `machine.py` looks at the installation,
`inputs.py` at model, template, data and servers; `show.py` runs them and shows what they found.
"""

from swift_grpo_ext.doctor.result import Result
from swift_grpo_ext.doctor.show import examine, report
from swift_grpo_ext.doctor.wanted import Wanted, wanted

__all__ = ["Result", "Wanted", "examine", "report", "wanted"]
