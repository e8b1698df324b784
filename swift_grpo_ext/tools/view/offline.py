"""`swift-grpo-ext view --output`: a bounded selection of groups as one page that opens offline.

The page is the server's own; its scripts, style, data and images are inside it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_grpo_ext.tools.view import media, queries
from swift_grpo_ext.tools.view.curves import make_panels
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.server import STATIC, describe, finite, open_runs
from swift_grpo_ext.version import __version__

SCRIPTS = ("dom.js", "words.js", "data.js", "charts.js", "app.js")
"""Each behind those that it imports."""


def write_page(
    run_dirs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    num_groups: int = 100,
    steps: str = "",
) -> Path:
    """Write the page; returns its path.

    Args:
        num_groups: of each run at most: a quarter are those whose rewards lie furthest apart, the
            others are spread evenly over the run. The second run has the groups of the first.
        steps: only these, such as `10:20`.

    Raises:
        FileNotFoundError: a folder is not there, or holds no samples.
        ValueError: `steps` cannot be read.
        OSError: the page cannot be written.
    """
    runs = open_runs(run_dirs)
    for run in runs:
        run.follower.refresh()
        if run.snapshot.problem:
            raise FileNotFoundError(run.snapshot.problem)
    query = queries.read_query({"steps": steps})
    picked = queries.pick(runs[0].snapshot, query, num_groups)
    images: list[str] = []
    data = {
        "state": {"version": __version__, "runs": [describe(run) for run in runs]},
        "runs": [_run_data(run, picked, images) for run in runs],
        "images": images,
    }
    path = Path(output)
    path.write_text(_page(finite(data)), encoding="utf-8")
    return path


def _run_data(run: RunView, picked: Sequence[tuple[Any, int]], images: list[str]) -> dict[str, Any]:
    """The groups, with the numbers of their images; appends these to `images`, each once."""
    numbers: dict[str, int] = {}
    groups: dict[str, Any] = {}
    for name, group in picked:
        with suppress(KeyError):  # the second run may have no such group
            found = run.group(name, group)
            found["images"] = [
                _image(run, run.medium_name(name, group, number), images, numbers)
                for number in range(len(found["media"]))
            ]
            groups[f"{found['round']}/{group}"] = found
    names = {found["round"] for found in groups.values()}
    rounds = [found for found in queries.list_rounds(run.snapshot) if found["round"] in names]
    return {
        "groups": groups,
        "rounds": rounds,
        "summaries": {
            name: [
                found
                for found in queries.list_groups(run.snapshot.round(queries.parse_round(name)))
                if f"{name}/{found['group']}" in groups
            ]
            for name in names
        },
        "curves": make_panels(run.run_dir, run.snapshot),
    }


def _image(run: RunView, name: str, images: list[str], numbers: dict[str, int]) -> int:
    """The number of an image among `images`; -1 for what cannot be shown."""
    if name not in numbers:
        try:
            content, kind = media.image_bytes(name, "small", run.limits)
        except media.NoImageError:
            return -1
        numbers[name] = len(images)
        images.append(f"data:{kind};base64,{base64.b64encode(content).decode()}")
    return numbers[name]


def _page(data: Any) -> str:
    modules = [(STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = "\n".join(re.sub(r"^(import .*;$|export )", "", m, flags=re.M) for m in modules)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # `<` could end the element: completions are hostile text.
    embedded = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    parts = {
        '<meta charset="utf-8">': '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="static/style.css">': f"<style>{style}</style>",
        '<script type="module" src="static/app.js"></script>\n': "",
        "</body>": f'<script type="application/json" id="data">{embedded}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    for old, new in parts.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page
