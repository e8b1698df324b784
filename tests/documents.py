"""Reads Markdown pages section by section, and says where two translations of a page differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
class Section:
    """A heading, and what follows it up to the next one of any level."""

    title: str
    level: int
    """1 to 6; 0 for what stands before the first heading."""

    anchor: str
    blocks: list[tuple[str, str]] = field(default_factory=list)
    """Language and text of code blocks."""

    rows: list[list[list[str]]] = field(default_factory=list)
    """The rows of tables, heads included: the code spans of each cell."""

    spans: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    """In running text; in code they are part of it."""

    links: list[str] = field(default_factory=list)
    """Targets of links and pictures."""

    num_items: int = 0
    """The number of items in lists."""

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


def is_relative(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is None


@cache
def _read(text: str) -> tuple[Section, ...]:
    return tuple(_sections(text))


def _sections(text: str) -> Iterator[Section]:
    section = Section(title="(top)", level=0, anchor="")
    tokens = iter(MarkdownIt("commonmark").enable("table").parse(text))
    for token in tokens:
        if token.type == "heading_open":
            yield section
            inline = next(tokens)
            title = "".join(t.content for t in inline.children or ())
            # An anchor as GitHub makes it.
            anchor = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
            section = Section(title=title, level=int(token.tag[1]), anchor=anchor)
            _read_inline(section, inline)
        elif token.type in ("fence", "code_block"):
            section.blocks.append((token.info.strip(), token.content))
        elif token.type == "tr_open":
            section.rows.append([])
        elif token.type in ("th_open", "td_open"):
            section.rows[-1].append(_read_inline(section, next(tokens)))
        elif token.type == "inline":
            _read_inline(section, token)
        section.num_items += token.type == "list_item_open"
    yield section


def _read_inline(section: Section, inline: Token) -> list[str]:
    """Add a line's code, links and numbers to its section; return its code spans."""
    spans = []
    for token in inline.children or ():
        if token.type == "link_open":
            section.links.append(str(token.attrs["href"]))
        elif token.type == "image":
            section.links.append(str(token.attrs["src"]))
        elif token.type == "code_inline":
            spans.append(token.content)
        elif token.type == "text":
            section.numbers.update(NUMBER.findall(token.content))
    section.spans.update(spans)
    return spans


def drift(original: Page, translation: Page) -> list[str]:
    """Return where two translations of a page differ in what does not depend on a language."""
    ours, theirs = original.sections, translation.sections
    if [section.level for section in ours] != [section.level for section in theirs]:
        titles = zip_longest(*([f"{'#' * x.level} {x.title}" for x in p] for p in (ours, theirs)))
        return ["they have other sections:", *(f"{a} / {b}" for a, b in titles)]
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        links = [_shared_names(page, x.links) for page, x in ((original, a), (translation, b))]
        for what, of_a, of_b in (
            ("code blocks", a.blocks, b.blocks),
            ("code spans", a.spans, b.spans),
            ("numbers", a.numbers, b.numbers),
            ("links", *links),
            ("list items", a.num_items, b.num_items),
            ("cells of rows", list(map(len, a.rows)), list(map(len, b.rows))),
        ):
            if isinstance(of_a, Counter) and isinstance(of_b, Counter):
                of_a, of_b = of_a - of_b, of_b - of_a
            if of_a != of_b:
                differences.append(f"{a.title!r} / {b.title!r}: {what}: {of_a} / {of_b}")
    return differences


def _shared_names(page: Page, links: Sequence[str]) -> Counter[str]:
    """Return links by names that both translations of a page share."""
    names: Counter[str] = Counter()
    for link in links:
        if is_relative(link):
            path, anchor = page.target(link)
            name = path.with_stem(path.stem.removesuffix(TRANSLATED)).name
            link = f"{name}#{Page(path).number_of(anchor) if anchor else ''}"
        names[link] += 1
    return names
