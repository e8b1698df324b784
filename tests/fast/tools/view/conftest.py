"""A run that all tests of the viewer read; tests that change a run make their own."""

from __future__ import annotations

import pytest

from swift_grpo_ext.tools.view.runs import Run
from tests.rig.view.runs import add_logs, add_tokenizer, make_run, open_run


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = make_run(tmp_path_factory.mktemp("runs") / "a run")
    add_logs(folder, 1.0, 1.0, 1.0)
    add_tokenizer(folder)
    return open_run(folder)
