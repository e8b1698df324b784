"""The digit experiment on made-up runs: the band, the check, the report; and what is published."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pytest
import yaml
from band import (
    FIGURES,
    MISS,
    band_of,
    missing_gain,
    outside,
    prediction_interval,
    start_differs,
)
from figures import smooth
from plan import BASE, NUM_STEPS, SEEDS, VARIANTS, plan
from records import (
    PRESET,
    RESULTS,
    VARIATIONS,
    Record,
    deviations,
    of_variant,
    read_results,
    read_run,
    rows_by_step,
    write_results,
)
from result_tables import (
    all_tables,
    band_table,
    compared,
    group_size_table,
    machines,
    seed_table,
    time_table,
    vllm_table,
)
from rich.console import Console
from summarize import table

ROOT = Path(__file__).resolve().parents[1]
BEFORE = {"greedy_accuracy": 0.48, "sampled_accuracy": 0.33, "sampled_format": 0.996}


def record(name: str, greedy: float = 0.7, sampled: float = 0.66, reward: float = 0.9) -> Record:
    return Record(
        name=name,
        seed=int(name.rpartition("-seed")[2]),
        machine=None,
        before=dict(BEFORE),
        after={"greedy_accuracy": greedy, "sampled_accuracy": sampled, "sampled_format": 1.0},
        curves={"reward": [0.4] * 30 + [reward] * 20, "groups_alike": [0.1, 0.3] * 25,
                "step_seconds": [30.0, *[2.0] * 48, 5.0]},
    )  # fmt: skip


PUBLISHED = [
    record("g8-seed1", 0.70, 0.66, 0.90),
    record("g8-seed2", 0.71, 0.65, 0.92),
    record("g8-seed3", 0.72, 0.67, 0.94),
]


def write_run(folder: Path, name: str, steps: int = 3, **changed: Any) -> Path:
    """A run's directory as ms-swift and the demo leave it, with the settings of the preset."""
    run = folder / name
    run.mkdir(parents=True)
    made = {**yaml.safe_load(PRESET.read_text()), "seed": 1, "max_steps": NUM_STEPS}
    made = {**made, "report_to": ["none"], **changed}
    (run / "args.json").write_text(json.dumps(made))
    rows = [
        {"reward": "0.25", "frac_reward_zero_std": 0.5, "step_time": 2.123,
         "global_step/max_steps": f"{step}/{steps}"}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"train_runtime": 9}])
    (run / "logging.jsonl").write_text(text)
    after = {"greedy_accuracy": 0.71, "sampled_accuracy": 0.66, "sampled_format": 1.0}
    models = [{"model": "m", **BEFORE}, {"model": "n", **after}]
    (run / "evaluation.json").write_text(json.dumps(models))
    return run


def test_the_interval_of_one_more_value() -> None:
    # m = 3, s = 1.58114, t(0.975; 4) = 2.776445: 2.776445 * 1.58114 * sqrt(1.2) = 4.80895
    interval = prediction_interval([1, 2, 3, 4, 5], miss=0.05)
    assert (interval.low, interval.high) == pytest.approx((-1.80895, 7.80895), abs=1e-4)
    with pytest.raises(ValueError, match="needs two runs or more, there are 1"):
        prediction_interval([1.0], miss=0.05)


def test_the_interval_holds_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(4000):
        *seen, new = generator.normal(size=6)
        inside += prediction_interval(seen, miss=0.05).holds(new)
    assert inside / 4000 == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_a_sound_run_is_inside_all_bands_as_often_as_promised() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        greedy = generator.normal(0.7, 0.02, size=6)
        sampled = greedy - generator.normal(0.05, 0.01, size=6)  # the figures go together
        reward = generator.normal(0.9, 0.02, size=6)
        runs = [
            record(f"g8-seed{i}", *values)
            for i, values in enumerate(zip(greedy, sampled, reward, strict=True))
        ]
        inside += not outside(runs[-1], runs[:-1])
    assert inside / 1000 >= 1 - MISS - 0.02


def test_bands_end_where_values_do() -> None:
    runs = [record("g8-seed1", 0.1, reward=1.19), record("g8-seed2", 0.9, reward=0.7)]
    assert band_of(FIGURES[0], runs).low == 0.0
    assert [band_of(f, runs).high for f in FIGURES] == [1.0, pytest.approx(0.66), 1.2]


def test_what_is_outside_is_named() -> None:
    assert outside(record("g8-seed9", 0.715, 0.66, 0.93), PUBLISHED) == []
    low = outside(record("g8-seed9", 0.488, 0.66, 1.19), PUBLISHED)
    assert len(low) == 2
    assert low[0].startswith("greedy accuracy 48.8% is below the band, ")
    assert "last 20 steps 1.190 is above the band" in low[1]


def test_promised_gain_and_other_starts() -> None:
    assert missing_gain(record("g8-seed9", 0.63, 0.48)) == []
    assert missing_gain(record("g8-seed9", 0.62, 0.48)) == [
        "greedy accuracy gained 14.0 points, promised are 15"
    ]
    other = replace(record("g8-seed9"), before={**BEFORE, "greedy_accuracy": 0.5})
    assert start_differs(record("g8-seed9"), PUBLISHED) == []
    assert start_differs(other, PUBLISHED) == [
        "greedy accuracy before training is 50.0%, published with 48.0%"
    ]


def test_a_step_that_was_made_twice_counts_once(tmp_path: Path) -> None:
    rows = [(1, 0.1), (2, 0.2), (3, 0.9), (2, 0.3), (3, 0.4)]
    text = "".join(
        json.dumps({"reward": r, "global_step/max_steps": f"{s}/3"}) + "\n" for s, r in rows
    )
    (tmp_path / "logging.jsonl").write_text(text)
    assert [row["reward"] for row in rows_by_step(tmp_path)] == [0.1, 0.3, 0.4]


def test_runs_are_read_and_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path, "g8-seed1", max_steps=3)
    read = read_run(run)
    assert read.curves == {
        "reward": [0.25] * 3, "groups_alike": [0.5] * 3, "step_seconds": [2.12] * 3
    }  # fmt: skip
    assert (read.variant, read.step_seconds, read.groups_alike) == ("g8", 2.12, 0.5)
    write_results(tmp_path / "results.json", "command", [read, PUBLISHED[1]])
    assert read_results(tmp_path / "results.json") == [read, PUBLISHED[1]]


def test_runs_that_lack_something_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "g8-seed1", steps=2, max_steps=3)
    with pytest.raises(ValueError, match="has 2 steps, expected 3"):
        read_run(run)
    (run / "evaluation.json").unlink()
    with pytest.raises(ValueError, match="holds no finished run"):
        read_run(run)


def test_settings_are_held_against_the_preset(tmp_path: Path) -> None:
    preset = yaml.safe_load(PRESET.read_text())
    words = {"reward_weights": ["0.2", "1"], "report_to": ["none"]}
    assert deviations({**preset, **words, "seed": 7}) == {}
    assert deviations({**preset, "num_generations": 4}) == {
        "num_generations": "num_generations is 4, published with 8"
    }


def published(tmp_path: Path) -> Path:
    write_results(tmp_path / "published.json", "command", PUBLISHED)
    return tmp_path / "published.json"


def test_check_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = str(published(tmp_path))
    run = write_run(tmp_path, "mine", steps=NUM_STEPS)  # its reward, 0.25, is far below
    assert experiment.main(["check", str(run), "--results", results]) == 1
    assert "mine: outside the band of 3 published seeds (greedy accuracy 71.0%" in (
        capsys.readouterr().out
    )
    assert experiment.main(["check", "--gain-only", str(run), "--results", results]) == 0
    (run / "machine.json").write_text(json.dumps({"first_step": 150}))
    experiment.main(["check", str(run), "--results", results])
    assert "resumed after step 150" in capsys.readouterr().out


def test_check_of_a_folder_leaves_variations_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", "g8-seed1", steps=NUM_STEPS)
    write_run(tmp_path / "runs", "g4-seed1", steps=NUM_STEPS, num_generations=4)
    arguments = ["check", "--results", str(published(tmp_path))]
    assert experiment.main([*arguments, str(tmp_path / "runs")]) == 1
    printed = capsys.readouterr().out
    assert "g8-seed1" in printed
    assert "g4-seed1" not in printed
    assert experiment.main([*arguments, str(tmp_path / "runs/g4-seed1")]) == 2
    assert "num_generations is 4, published with 8" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert experiment.main([*arguments, str(tmp_path / "empty")]) == 2


def test_report_of_made_up_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "g8": {}, "g4": {"num_generations": 4}, "no-vllm": {"use_vllm": False}
    }  # fmt: skip
    for name, changed in changes.items():
        for seed in (1, 2):
            write_run(
                tmp_path / "runs", f"{name}-seed{seed}", steps=NUM_STEPS, seed=seed, **changed
            )
    output = tmp_path / "results"
    assert experiment.main(["report", str(tmp_path / "runs"), "--output", str(output)]) == 0
    written = {path.name for path in output.iterdir()}
    assert written == {"experiment.json", "tables.md", "seeds.png", "group_size.png", "vllm.png"}
    printed = capsys.readouterr().out
    assert experiment.main(["report", str(output / "experiment.json")]) == 0
    assert capsys.readouterr().out == printed
    assert (output / "tables.md").read_text() in printed


def test_report_refuses_a_run_of_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "g4-seed1", steps=NUM_STEPS)  # with 8 generations
    assert experiment.main(["report", str(tmp_path)]) == 2
    assert "was not made by" in capsys.readouterr().err


def test_missing_runs_are_made_and_cut_off_ones_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = tmp_path / "root" / "scripts" / "demo.sh"
    demo.parent.mkdir(parents=True)
    demo.write_text(
        'mkdir "$RUN"; echo "$SEED $STEPS $OMP_NUM_THREADS $*" >"$RUN/made"; [ "$SEED" = 1 ]'
    )
    monkeypatch.setattr(experiment, "ROOT", tmp_path / "root")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (tmp_path / "g4-seed1" / "checkpoint-50").mkdir(parents=True)
    chosen = [p for p in plan(["group-size"]) if p.variant.name == "g4"]
    assert experiment.make_runs(chosen, tmp_path, jobs=2) == ["g4-seed2"]
    assert (tmp_path / "g4-seed1/made").read_text() == "1 200 2 --num_generations 4\n"
    assert not (tmp_path / "g4-seed1/checkpoint-50").exists()


def test_the_plan() -> None:
    names = [planned.name for planned in plan()]
    assert len(set(names)) == len(names)
    assert [p.seed for p in plan(["seeds"])] == list(SEEDS)
    assert plan(["vllm"])[1].command == (
        "OMP_NUM_THREADS=1 SEED=2 RUN=DIR/no-vllm-seed2 bash scripts/demo.sh --use_vllm false"
    )
    assert {v.group_size * v.prompts_a_step for v in VARIANTS.values()} == {64}
    assert (BASE.arguments, BASE.epochs) == ((), 3.125)


def test_variations_are_compared_at_their_own_seeds() -> None:
    records = [*PUBLISHED, record("g4-seed1")]
    chosen = compared(records, [VARIANTS["g4"], BASE])
    assert {name: [r.seed for r in runs] for name, runs in chosen.items()} == {
        "g4": [1], "g8": [1]
    }  # fmt: skip


def test_moving_average() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0], window=2).tolist() == [1.0, 1.5, 2.5, 3.5]


def test_the_pages_hold_what_the_report_prints() -> None:
    for path in (RESULTS, VARIATIONS):
        tables = (path.parent / "tables.md").read_text(encoding="utf-8")
        assert tables == all_tables(read_results(path), experiment.COMMAND)
    records, variations = read_results(), read_results(VARIATIONS)
    page = (ROOT / "examples/digits/README.md").read_text(encoding="utf-8")
    for name in ("docs/demo.md", "docs/demo_CN.md"):
        rows = seed_table(records).partition("|---|\n")[2]
        assert rows in (ROOT / name).read_text(encoding="utf-8")
    for text in (seed_table, band_table, machines, time_table):
        assert text(records) in page, text.__name__
    for text in (group_size_table, vllm_table, machines):
        assert text(variations) in page, text.__name__


def test_the_page_shows_what_the_demo_prints_of_its_default_seed() -> None:
    (run,) = of_variant(read_results(), BASE.name, [42])
    rows = {"rows": 256}
    output = io.StringIO()
    Console(file=output, width=80).print(table({**run.before, **rows}, {**run.after, **rows}))
    printed = [line.rstrip() for line in output.getvalue().splitlines()]
    assert "\n".join(printed) in (ROOT / "docs/demo.md").read_text(encoding="utf-8")


def test_every_published_seed_gains_what_is_promised() -> None:
    base = of_variant(read_results(), BASE.name)
    assert [r.seed for r in base] == list(SEEDS)
    for run in base:
        assert missing_gain(run) == [], run.name
        assert start_differs(run, base) == [], run.name


def test_a_run_that_learned_nothing_is_outside_in_every_figure() -> None:
    base = of_variant(read_results(), BASE.name)
    curves = {**base[0].curves, "reward": base[0].curves["reward"][:20]}
    assert len(outside(replace(base[0], after=base[0].before, curves=curves), base)) == 3


def test_published_results_name_no_folder_of_a_machine() -> None:
    for file in RESULTS.parent.rglob("*.[jm]*"):
        text = file.read_text(encoding="utf-8")
        assert "/root" not in text
        assert "/home" not in text
