"""A real training whose reward favours one answer is called collapsed, in its log and on its page
(D2, D5)."""

from pathlib import Path

from swift_grpo_ext.tools.view.pages import write_page
from tests.rig.diversity.samples import train_watched
from tests.rig.record.rows import read_diversity


def test_a_reward_that_favours_one_answer_collapses_the_policy(
    assets: Path, tmp_path: Path
) -> None:
    finished, run = train_watched(
        *(assets, assets / "digits/train.jsonl", tmp_path),
        *("--reward_funcs", "favour", "--reward_weights", "1", "--seed", "1"),
        *("--max_steps", "16", "--save_strategy", "no"),
    )
    records = read_diversity(run)
    assert records[0].verdict == "healthy"
    assert {r.verdict for r in records} == {"healthy", "collapse"}
    assert "diversity: collapsed policy" in finished.output
    page = write_page([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'class="verdict collapse"' in page
    assert "data:image/png" in page
