"""Print, as Markdown, the test files that name each promise of docs/promises.md, and what each test
file proves. The exit status is 1 if no test names a promise in a docstring or comment."""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def words_of(path: Path) -> str:
    """Return a module's docstrings, the module's own first, and comments."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    docs = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n\n".join([*docs, *comments])


tests = sorted((ROOT / "tests").rglob("test_*.py"))
words = {str(path.relative_to(ROOT)): words_of(path) for path in tests}
page = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
is_missing = False
print("| promise | tests |\n|---|---|")
for promise in re.findall(r"^- \*\*([A-Z]\d+)\*\*", page, re.M):
    naming = [name for name, text in words.items() if re.search(rf"\b{promise}\b", text)]
    is_missing |= not naming
    print(f"| {promise} | {', '.join(naming) or 'none'} |")
print("\n| test file | what it proves |\n|---|---|")
for name, text in words.items():
    first = re.split(r"(?<=[.])\s|\n\n", text)[0]
    print(f"| {name} | {' '.join(first.split())} |")
raise SystemExit(int(is_missing))
