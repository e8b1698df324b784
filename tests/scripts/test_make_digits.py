"""The digits as ms-swift's rows: the split, the rows, the images, and what a second run does."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import make_digits
import numpy as np
import pytest
from PIL import Image


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("digits")
    make_digits.main(["--output", str(output)])
    return output


def test_split_is_disjoint_complete_and_stratified() -> None:
    labels = np.repeat(np.arange(10), 180)[:1797]  # 177 nines, 180 of every other digit
    parts = make_digits.split_indices(labels, seed=0)
    assert {name: len(indices) for name, indices in parts.items()} == {
        "warmstart": 1029,
        "train": 512,
        "heldout": 256,
    }
    assert sorted(np.concatenate(list(parts.values()))) == list(range(1797))
    for indices in parts.values():
        share = len(indices) / len(labels)
        for digit, count in Counter(labels[indices].tolist()).items():
            assert count == pytest.approx(share * (labels == digit).sum(), abs=1.5)


def test_split_depends_on_the_seed_alone() -> None:
    labels = np.arange(1797) % 10
    first, again, other = (make_digits.split_indices(labels, seed=s) for s in (3, 3, 4))
    assert first["train"].tolist() == again["train"].tolist()
    assert first["train"].tolist() != other["train"].tolist()


def test_rows() -> None:
    assert make_digits.make_row([Path("/a.png")], [7]) == {
        "messages": [
            {
                "role": "user",
                "content": "<image>Which digit is this? Answer as <answer>d</answer>.",
            }
        ],
        "images": ["/a.png"],
        "solution": "7",
    }
    row = make_digits.make_row([Path("/a.png"), Path("/b.png"), Path("/c.png")], [1, 0, 1])
    assert row["messages"][0]["content"] == (
        "<image><image><image>Which digits are these, in order? Answer as <answer>d d d</answer>."
    )
    assert row["solution"] == "1 0 1"


def test_draw_scales_smoothly_from_black_to_white() -> None:
    grey_HW = np.zeros((8, 8))
    grey_HW[:, 4:] = 16
    image = make_digits.draw(grey_HW, 112)
    assert (image.size, image.mode) == ((112, 112), "RGB")
    middle_row = np.asarray(image)[56, :, 0]
    assert (middle_row[0], middle_row[-1]) == (0, 255)
    assert len(set(middle_row.tolist())) > 4


def test_every_image_is_in_one_file_and_paths_are_absolute(built: Path) -> None:
    rows = [
        row
        for name in ("warmstart", "train", "heldout")
        for row in read_rows(built / f"{name}.jsonl")
    ]
    paths = [row["images"][0] for row in rows]
    assert len(set(paths)) == len(paths) == 1797
    assert all(Path(path).is_absolute() and Path(path).is_file() for path in paths)
    with Image.open(paths[0]) as image:
        assert (image.size, image.mode) == ((112, 112), "RGB")


def test_load_rows_have_as_many_marks_images_and_digits(built: Path) -> None:
    rows = read_rows(built / "load.jsonl")
    assert Counter(len(row["images"]) for row in rows) == {1: 12, 2: 4, 3: 4, 4: 4}
    for row in rows:
        assert row["messages"][0]["content"].count("<image>") == len(row["images"])
        assert len(row["solution"].split(" ")) == len(row["images"])
    paths = [path for row in rows for path in row["images"]]
    assert len(set(paths)) == len(paths)
    with Image.open(paths[-1]) as image:
        assert (image.size, image.mode) == ((1024, 1024), "RGB")


def test_load_digits_come_from_the_training_part(built: Path) -> None:
    train = read_rows(built / "train.jsonl")
    digits = [digit for row in read_rows(built / "load.jsonl") for digit in row["solution"].split()]
    assert digits == [row["solution"] for row in train[: len(digits)]]


@pytest.mark.stack  # makes all of it twice
def test_the_same_bytes_again(built: Path) -> None:
    before = digests(built)
    make_digits.main(["--output", str(built), "--force"])
    assert digests(built) == before


def test_second_run_does_nothing(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (built / "train.jsonl").stat().st_mtime_ns
    make_digits.main(["--output", str(built)])
    assert "nothing to do" in capsys.readouterr().out
    assert (built / "train.jsonl").stat().st_mtime_ns == before


def test_another_seed_is_refused(built: Path) -> None:
    with pytest.raises(SystemExit, match=r"'seed': 1.*--force"):
        make_digits.main(["--output", str(built), "--seed", "1"])


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(SystemExit, match="is a file, expected a folder"):
        make_digits.main(["--output", str(path)])
    assert path.read_text() == "mine"


def test_a_moved_folder_is_mended_in_place(built: Path, tmp_path: Path) -> None:
    """And is then what a build in that place would have made."""
    moved = tmp_path / "moved"
    shutil.copytree(built, moved)
    make_digits.main(["--output", str(moved)])
    for path in filter(Path.is_file, built.iterdir()):
        expected = path.read_text(encoding="utf-8").replace(str(built), str(moved))
        assert (moved / path.name).read_text(encoding="utf-8") == expected
