"""Print accuracy on held-out images before and after training, and the paths of results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    result = Table(title=f"Held-out digits ({before['rows']} images)")
    for column in ("", "before", "after", "gain (points)"):
        result.add_column(column, justify="left" if not column else "right")
    for key in ("greedy_accuracy", "sampled_accuracy", "sampled_format"):
        gain = 100 * (after[key] - before[key])
        cells = (f"{before[key]:.1%}", f"{after[key]:.1%}", f"{gain:+.1f}")
        result.add_row(key.replace("_", " "), *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args()
    run: Path = options.run
    before, after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    Console().print(table(before, after))
    print(f"checkpoint     {after['model']}")
    print(f"training log   {run / 'logging.jsonl'}  (swift's own output: swift.log)")


if __name__ == "__main__":
    main()
