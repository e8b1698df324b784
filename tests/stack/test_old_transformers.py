"""The shim on transformers 4.48.3, in an environment of its own (SPEC L1).

ms-swift 4.6 itself does not run on it; remote code and pinned projects do. The packages are laid
over the installed ones, torch and PEFT among them, by a folder that comes first on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.stack.processes import ROOT

pytestmark = pytest.mark.stack

PACKAGES = ("transformers==4.48.3", "tokenizers==0.21.4", "huggingface-hub==0.36.0")
"""What 4.48.3 asks for where newer releases of it do not do."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("transformers-4.48.3")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *PACKAGES)
    found = run(
        sys.executable, "-m", "tests.stack.old_transformers",
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT / "scripts")]),
    )  # fmt: skip
    results: dict[str, Any] = json.loads(found.splitlines()[-1])
    assert results["version"] == "4.48.3"
    return results


def run(*command: str, **env: str) -> str:
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


@pytest.mark.parametrize("kind", ["", ", LoRA"], ids=["bare", "LoRA"])
@pytest.mark.parametrize(("name", "way"), [("Qwen2", "num_logits_to_keep"), ("Qwen2-VL", "head")])
def test_wanted_positions_only(results: dict[str, Any], name: str, way: str, kind: str) -> None:
    """Values and gradients are compared where they are computed, in `old_transformers`."""
    kept, length, result = results["kept"], results["length"], results["results"][name + kind]
    assert result["way"] == way
    assert result["positions"] == [kept]
    assert result["peak_ours"] <= (kept / length + 0.05) * result["peak_all"]
    # The new spelling is swallowed there, in silence: why a signature alone proves nothing.
    assert result["positions_by_new_spelling"] == (length if name == "Qwen2" else None)
