"""Both languages say the same: README and the pages of docs/, section by section."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.flags import flag_infos, flag_names, show
from tests.documents import Page, counterpart, drift, originals, slug

ROOT = Path(__file__).resolve().parents[1]
ORIGINALS = originals(ROOT)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("original", ORIGINALS, ids=name_of)
def test_the_translation_has_not_drifted(original: Path) -> None:
    translation = counterpart(original)
    assert translation.is_file(), f"{name_of(original)} has no translation"
    assert drift(Page(original), Page(translation)) == []


@pytest.mark.parametrize("original", ORIGINALS, ids=name_of)
def test_each_translation_links_to_the_other_at_its_top(original: Path) -> None:
    translation = counterpart(original)
    for page, other in ((original, translation), (translation, original)):
        assert Page(page).sections[1].links[0] == other.name, name_of(page)


ENGLISH = """# Title

See [the end](#the-end) and [the other page](other.md#second-part), 3 of 4.

## Flags

| flag | default | meaning |
|---|---|---|
| `--a` | 1 | one |
| `--b` | 2.5 | two |

- `x` is 7
- `y`

### Commands

```bash
run --a 1
```

![curve](curve.png)

## The end
"""
CHINESE = """# 标题

见[结尾](#结尾)和[另一页](other_CN.md#第二部分)，4 个中的 3 个。

## 参数

| 参数 | 默认值 | 含义 |
|---|---|---|
| `--a` | 1 | 一 |
| `--b` | 2.5 | 二 |

- `x` 为 7
- `y`

### 命令

```bash
run --a 1
```

![曲线](curve.png)

## 结尾
"""


def drift_of(folder: Path, english: str, chinese: str) -> list[str]:
    texts = {
        "page.md": english,
        "page_CN.md": chinese,
        "other.md": "# Other\n## Second part\n",
        "other_CN.md": "# 另一页\n## 第二部分\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return drift(Page(folder / "page.md"), Page(folder / "page_CN.md"))


def test_a_faithful_translation_has_no_drift(tmp_path: Path) -> None:
    assert drift_of(tmp_path, ENGLISH, CHINESE) == []


@pytest.mark.parametrize(
    ("before", "after", "section", "finding"),
    [
        ("4 个中的 3 个", "4 个中的 2 个", "标题", "number '2' only in the translation"),
        ("| `--b` | 2.5", "| `--b` | 2.6", "参数", "table 1, row 2, column 2: number '2.5'"),
        ("| `--b` |", "| `--c` |", "参数", "table 1, row 2, column 1: code span '--b'"),
        ("| `--b` | 2.5 | 二 |\n", "", "参数", "table 1 has 3 and 2 rows"),
        ("`x` 为 7", "`z` 为 7", "参数", "code span 'x' only in the original"),
        ("- `y`", "", "参数", "2 and 1 list items"),
        ("### 命令", "多出一段。\n\n### 命令", "参数", "0 and 1 paragraphs"),
        ("run --a 1", "run --a 2", "命令", "code block 1 differs"),
        ("curve.png", "other.png", "命令", "picture 'curve.png' only in the original"),
        ("(#结尾)", "(#参数)", "标题", "link 'page.md#2' only in the translation"),
        ("other_CN.md#第二部分", "other_CN.md#另一页", "标题", "link 'other.md#1'"),
        ("other_CN.md#第二部分", "other_CN.md#第三部分", "标题", "link 'other.md#第三部分'"),
    ],
)
def test_drift_is_found_by_section(
    before: str, after: str, section: str, finding: str, tmp_path: Path
) -> None:
    assert before in CHINESE
    found = drift_of(tmp_path, ENGLISH, CHINESE.replace(before, after, 1))
    assert any(f"'{section}'" in text and finding in text for text in found), found


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        (
            "### 命令",
            "## 命令",
            "has 'Commands' of level 3 where page_CN.md has '命令' of level 2.",
        ),
        ("## 结尾\n", "", "has 'The end' of level 2 where page_CN.md has no section."),
        ("## 参数", "## 多余\n## 参数", "has no section where page_CN.md has '多余' of level 2."),
    ],
)
def test_other_sections_are_named(before: str, after: str, finding: str, tmp_path: Path) -> None:
    assert before in CHINESE
    found = drift_of(tmp_path, ENGLISH, CHINESE.replace(before, after, 1))
    assert found == [f"page.md {finding}"]


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("From a laptop to 2+6 GPUs", "from-a-laptop-to-26-gpus"),
        ("`--stop_words`: what ends", "--stop_words-what-ends"),
        ("从笔记本到 2+6 块 GPU", "从笔记本到-26-块-gpu"),
        ("补全都一样，为什么？", "补全都一样为什么"),
    ],
)
def test_anchors_are_those_of_github(title: str, anchor: str) -> None:
    assert slug(title.replace("`", "")) == anchor


# --- tables of flags ---


def rows_of_flags(page: str) -> list[list[str]]:
    """The rows of a page's tables that begin with a flag of ours, as cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [line.removeprefix("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0].strip("`-") in flag_names()]


def test_the_chinese_table_has_the_same_flags_values_and_defaults() -> None:
    """The English one is the output of `swift-grpo-ext flags --markdown` (`test_cli`)."""
    ours = [row[:3] for row in rows_of_flags("docs/flags.md")]
    assert [row[:3] for row in rows_of_flags("docs/flags_CN.md")] == ours
    assert len(ours) == len(flag_names())


@pytest.mark.parametrize("page", ["docs/migration.md", "docs/migration_CN.md"])
def test_the_page_on_migration_has_every_flag_with_its_default(page: str) -> None:
    expected = [[f"`--{info.name}`", show(info.default)] for info in flag_infos()]
    assert [row[:2] for row in rows_of_flags(page)] == expected
