"""Random rows are accepted, or refused by name, within seconds (M1).

FUZZ_CASES=10000 pytest tests/unit/fuzz
"""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np
import pytest
import swift.rl_core.data  # noqa: F401  else a case would import it within its deadline
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from swift_grpo_ext.checks.rows import check_rows, question_of, row_fault

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PIL's
fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "50")),
    deadline=10_000,  # milliseconds
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- values as data sets have them ---


def png() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (5, 3)).save(content, "PNG")
    return content.getvalue()


words = st.text(st.characters(), max_size=8)  # with lone halves of surrogate pairs
leaves = st.none() | st.booleans() | st.integers() | st.floats() | words
json_like = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
contents = st.binary(max_size=40) | st.integers(0, len(png())).map(lambda end: png()[:end])
odd_names = ["", ".", "/", "~nobody-of-this-name/a.png", "a\0.png", "x" * 5000, "file:///no.png"]
odd_names += ["https://x", "data:,", "data:image/png;base64,A"]
encoded = contents.map(lambda content: base64.b64encode(content).decode())
names = words | st.sampled_from(odd_names) | encoded
odd = st.sampled_from([bytearray(b"x"), np.array([1, 2]), np.float32(1), {1}, object()])
kept = {"bytes": st.none() | contents | odd, "path": st.none() | names}
images = names | contents | st.fixed_dictionaries(kept) | json_like | odd
messages = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "tool"]) | json_like, "content": json_like}
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(messages, max_size=4),
        "images": st.none() | names | contents | st.lists(images, max_size=4),
        "videos": st.none() | st.lists(names, max_size=2),
        "tools": json_like | odd,
        "objects": json_like | odd,
        "teacher_prompt": json_like,
        "teacher_images": json_like | st.lists(images, max_size=2),
        "solution": json_like,
    },
)


@fuzz
@given(st.lists(rows, max_size=4), st.booleans(), st.booleans())
@example([{"images": "é" * 300}, {"images": "/dev/zero"}], True, False)
@example([{"videos": ["~nobody-of-this-name/a.png"]}], True, False)
def test_a_data_set_is_sound_or_refused_by_name(
    data: list[Any], expects_media: bool, deletes: bool
) -> None:
    for row in data:
        assert row_fault(row) != ""
        assert isinstance(question_of(row), str)
    findings = check_rows(
        data, setting="dataset", expects_media=expects_media, deletes_bad_rows=deletes
    )
    refusals = [finding.sentence for finding in findings if finding.level == "error"]
    if refusals:
        assert refusals[0].startswith("--dataset: ")
    else:
        assert deletes or not any(map(row_fault, data))
