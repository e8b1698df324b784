"""Several runs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

from starlette.testclient import TestClient

from swift_grpo_ext.tools.diff import differing_settings
from swift_grpo_ext.tools.view.overview import runs_values
from swift_grpo_ext.tools.view.pages import write_page
from swift_grpo_ext.tools.view.runs import Run
from swift_grpo_ext.tools.view.server import make_app
from tests.rig.view.runs import Writer, add_logs, make_rows


def make_pair(folder: Path) -> list[Run]:
    """Write and open two runs, of three steps and of two."""
    runs = []
    for number, num_steps in enumerate((3, 2)):
        run_dir = folder / f"run-{number}" / "v0"
        run_dir.mkdir(parents=True)
        writer = Writer(run_dir)
        for step in range(num_steps):
            writer.write(make_rows(step))
        settings = {"seed": number, "output_dir": str(run_dir)}
        (run_dir / "args.json").write_text(json.dumps(settings))
        add_logs(run_dir, *[1.0] * num_steps)
        runs.append(Run(run_dir))
        runs[-1].refresh()
    return runs


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = make_pair(tmp_path)
    values = runs_values(runs)
    assert [row[0].facts.step for row in values["rows"]] == [3, 2]
    assert [row[1] for row in values["rows"]] == [0.5, 0.375]
    [chart] = runs_values([Run(tmp_path), *runs])["charts"]  # one has no rewards yet
    assert [curve["name"] for curve in chart["curves"]] == [str(run.run_dir) for run in runs]
    assert values["settings"] == {"seed": (0, 1)}


def test_settings_that_a_run_lacks_differ() -> None:
    assert differing_settings({"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}) == {"b": (2, None, 2)}
    assert differing_settings({"a": 1}, {}) == {}


def test_pages_of_several_runs(tmp_path: Path) -> None:
    runs = make_pair(tmp_path)
    with TestClient(make_app(runs, "T0ken"), base_url="http://127.0.0.1/T0ken/") as client:
        start = client.get("")
        assert start.url == client.get("runs").url
        assert f"swift-grpo-ext diff {runs[0].run_dir} {runs[1].run_dir}<" in start.text
        link = re.findall(r'href="(1/overview)"', start.text)[0]
        assert 'href="../runs"' in client.get(link).text
        assert client.get("2/overview").status_code == 404
        assert client.get("state").text == " ".join(client.get(f"{n}/state").text for n in (0, 1))
    text = write_page([run.run_dir for run in runs], tmp_path / "page.html").read_text()
    assert str(runs[1].run_dir) in text.partition('id="runs"')[2]
    assert 'href="' not in text.partition("<main")[2]
