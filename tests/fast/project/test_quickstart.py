"""Settings and trainings of the quickstart work as a reader types them; its table of memory is up
to date."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import memory
import pytest
from pages import ROOT, read_from

from swift_grpo_ext.tools import cli
from swift_grpo_ext.tools.sources import read_sources
from tests.rig.newest import is_newest

PAGE = ROOT / "docs/quickstart.md"


def blocks(language: str) -> list[str]:
    """Return the page's code blocks of a language, including blocks within lists."""
    pattern = rf"^ *```{language}\n(.*?)^ *```$"
    found = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [textwrap.dedent(text) for text in found]


@pytest.mark.skipif(not is_newest("swift"), reason="pages speak of the newest ms-swift")
def test_each_training_of_the_page_holds_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainings on 1 GPU, on 8, resumed, and with W&B: groups fill the batch, flags are known."""
    from swift_grpo_ext.command_line import Parser, RLHFExtArguments

    known = {action.dest for action in Parser([RLHFExtArguments])._actions}
    settings, *_ = blocks("yaml")  # the one for GPUs is first
    (tmp_path / "train.yaml").write_text(settings, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rounds = []
    commands = "".join(blocks("bash")).replace("\\\n", " ")
    pattern = r"^(?:NPROC_PER_NODE=(\d+) )?swift rlhf train\.yaml(.*)$"
    for ranks, words in re.findall(pattern, commands, re.M):
        argv = shlex.split(words, comments=True)
        status = cli.main(["check", "train.yaml", "--settings-only", "--", *argv])
        assert status == 0, capsys.readouterr().out
        given = read_sources("train.yaml", overrides=argv)["training"].given
        assert given.keys() <= known
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
        size, steps, group = (int(given[name][0]) for name in names)
        rounds.append(divmod(int(ranks or 1) * size * steps, group))
    assert rounds == [(4, 0), (16, 0), (4, 0), (4, 0)]


def test_the_table_of_memory_is_up_to_date() -> None:
    """Else: `python scripts/memory.py --write`."""
    for page in (PAGE, PAGE.with_stem("quickstart_CN")):
        assert read_from(page, memory.TABLE) == memory.table()
