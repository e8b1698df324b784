"""Reads Markdown pages section by section, and says where two translations of a page differ.

Both hold the same code, numbers, links' targets, tables' shapes, and numbers of paragraphs and list
items, section by section, so that neither says what the other does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

NUMBER = re.compile(r"[0-9]+(?:[.,:][0-9]+)*")
TRANSLATED = "_CN"
"""Ends the name of a page's Chinese translation."""


@dataclass(kw_only=True)
class Cell:
    """A cell of a table: its code spans and its numbers, counted."""

    spans: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)


@dataclass(kw_only=True)
class Section:
    """A heading, and what follows it up to the next one of any level."""

    title: str
    level: int
    """1 to 6; 0 for what stands before the first heading."""

    anchor: str
    blocks: list[tuple[str, str]] = field(default_factory=list)
    """Language and text of code blocks."""

    tables: list[list[list[Cell]]] = field(default_factory=list)
    """Each as rows of cells, the head's first."""

    spans: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    """In running text; in code they are part of it."""

    links: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    num_items: int = 0
    """The number of items in lists."""

    num_paragraphs: int = 0

    @property
    def code(self) -> Iterator[str]:
        """Everything that is set as code."""
        yield from self.spans.elements()
        yield from (text for _, text in self.blocks)


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def sections(self) -> Sequence[Section]:
        return _read(self.path.read_text(encoding="utf-8"))

    def number_of(self, anchor: str) -> int | None:
        """Return the index of the section that an anchor names; None where there is none."""
        if not self.path.is_file():
            return None
        numbers = (i for i, section in enumerate(self.sections) if section.anchor == anchor)
        return next(numbers, None)

    def target(self, link: str) -> tuple[Path, str]:
        """Return the file and the anchor ("" for none) of a relative link."""
        path, _, anchor = unquote(link).partition("#")
        return (self.path.parent / path).resolve() if path else self.path.resolve(), anchor


def originals(root: Path) -> list[Path]:
    """Return the English pages that have a translation, of README and docs/."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in pages if counterpart(page).is_file() and is_original(page)]


def is_original(page: Path) -> bool:
    return not page.stem.endswith(TRANSLATED)


def is_relative(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is None


@cache
def _read(text: str) -> tuple[Section, ...]:
    return tuple(_sections(text))


def _sections(text: str) -> Iterator[Section]:
    section = Section(title="(top)", level=0, anchor="")
    anchors: Counter[str] = Counter()
    tokens = iter(MarkdownIt("commonmark").enable("table").parse(text))
    for token in tokens:
        if token.type == "heading_open":
            yield section
            inline = next(tokens)
            title = "".join(t.content for t in inline.children or ())
            anchor = slug(title)
            number, anchors[anchor] = anchors[anchor], anchors[anchor] + 1
            anchor = f"{anchor}-{number}" if number else anchor
            section = Section(title=title, level=int(token.tag[1]), anchor=anchor)
            _read_inline(section, inline, None)
        elif token.type in ("fence", "code_block"):
            section.blocks.append((token.info.strip(), token.content))
        elif token.type == "table_open":
            section.tables.append([])
        elif token.type == "tr_open":
            section.tables[-1].append([])
        elif token.type in ("th_open", "td_open"):
            cell = Cell()
            section.tables[-1][-1].append(cell)
            _read_inline(section, next(tokens), cell)
        elif token.type == "inline":
            _read_inline(section, token, None)
        section.num_items += token.type == "list_item_open"
        section.num_paragraphs += token.type == "paragraph_open" and not token.hidden
    yield section


def _read_inline(section: Section, inline: Token, cell: Cell | None) -> None:
    holders: Sequence[Section | Cell] = (section, cell) if cell else (section,)
    for token in inline.children or ():
        if token.type == "link_open":
            section.links.append(str(token.attrs["href"]))
        elif token.type == "image":
            section.images.append(str(token.attrs["src"]))
        for holder in holders:
            if token.type == "code_inline":
                holder.spans[token.content] += 1
            elif token.type in ("text", "image"):
                holder.numbers.update(NUMBER.findall(token.content))


def slug(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


# --- drift ---


def drift(original: Page, translation: Page) -> list[str]:
    """Return where two translations of a page differ in what does not depend on a language."""
    ours, theirs = original.sections, translation.sections
    if [section.level for section in ours] != [section.level for section in theirs]:
        titles = zip_longest(*([f"{'#' * x.level} {x.title}" for x in p] for p in (ours, theirs)))
        return ["they have other sections:", *(f"{a} / {b}" for a, b in titles)]
    return [
        f"{a.title!r} / {b.title!r}: {text}"
        for a, b in zip(ours, theirs, strict=True)
        for text in _differences(a, b, original, translation)
    ]


def _differences(a: Section, b: Section, original: Page, translation: Page) -> Iterator[str]:
    for number, (block, other) in enumerate(zip_longest(a.blocks, b.blocks), 1):
        if block != other:
            yield f"code block {number} differs"
    yield from _counts("code span", a.spans, b.spans)
    yield from _counts("number", a.numbers, b.numbers)
    yield from _counts("link", _targets(original, a.links), _targets(translation, b.links))
    pictures = _targets(original, a.images), _targets(translation, b.images)
    yield from _counts("picture", *map(_of_any_language, pictures))
    for what, ours, theirs in (
        ("list items", a.num_items, b.num_items),
        ("paragraphs", a.num_paragraphs, b.num_paragraphs),
        ("tables", len(a.tables), len(b.tables)),
    ):
        if ours != theirs:
            yield f"{ours} and {theirs} {what}"
    for number, (table, other_table) in enumerate(zip(a.tables, b.tables, strict=False), 1):
        yield from _table_differences(f"table {number}", table, other_table)


def _of_any_language(pictures: Counter[str]) -> Counter[str]:
    """`group_zh.png` shows the Chinese page where `group.png` shows the English one."""
    return Counter(name.replace("_zh.", ".") for name in pictures.elements())


def _table_differences(name: str, a: list[list[Cell]], b: list[list[Cell]]) -> Iterator[str]:
    if [len(row) for row in a] != [len(row) for row in b]:
        yield f"{name} has {len(a)} and {len(b)} rows, or rows of other lengths"
        return
    for i, (row, other_row) in enumerate(zip(a, b, strict=True)):
        for j, (cell, other) in enumerate(zip(row, other_row, strict=True), 1):
            where = f"{name}, row {i}, column {j}:"
            yield from _counts(f"{where} code span", cell.spans, other.spans)
            yield from _counts(f"{where} number", cell.numbers, other.numbers)


def _counts(what: str, a: Counter[str], b: Counter[str]) -> Iterator[str]:
    for words, more in (("only in the original", a - b), ("only in the translation", b - a)):
        if more:
            yield f"{what} {', '.join(map(repr, sorted(more.elements())))} {words}"


def _targets(page: Page, links: Iterable[str]) -> Counter[str]:
    """Targets by names that both translations share."""
    return Counter(_shared_name(page, link) if is_relative(link) else link for link in links)


def _shared_name(page: Page, link: str) -> str:
    """Return a relative link's target by the original page's name and the number of its section."""
    path, anchor = page.target(link)
    name = path.with_stem(path.stem.removesuffix(TRANSLATED)).name
    number = Page(path).number_of(anchor) if anchor else None
    return f"{name}#{anchor if number is None else number}".rstrip("#")


def counterpart(path: Path) -> Path:
    """Return the path of the other translation of a page."""
    stem = path.stem
    return path.with_stem(stem + TRANSLATED if is_original(path) else stem.removesuffix(TRANSLATED))
