"""Measure accuracy and form of models on the held-out digits with ms-swift's own engine.

Each row is answered greedily, and once at temperature 1 as in training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rewards import DigitAccuracy, DigitFormat
from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine

BATCH_SIZE = 64
MAX_NEW_TOKENS = 12
SAMPLING_SEED = 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluate(model: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of right answers (greedy, sampled) and of the right form (sampled)."""
    engine = TransformersEngine(
        str(model),
        model_type="qwen2_5_vl",
        template_type="qwen2_5_vl",
        torch_dtype=torch.float32,
        max_batch_size=BATCH_SIZE,
    )
    solutions = [row["solution"] for row in rows]
    greedy = complete(engine, rows, temperature=0.0)
    torch.manual_seed(SAMPLING_SEED)
    sampled = complete(engine, rows, temperature=1.0)
    return {
        "greedy_accuracy": mean(DigitAccuracy()(greedy, solutions)),
        "sampled_accuracy": mean(DigitAccuracy()(sampled, solutions)),
        "sampled_format": mean(DigitFormat()(sampled)),
    }


def complete(
    engine: TransformersEngine, rows: list[dict[str, Any]], temperature: float
) -> list[str]:
    requests = [InferRequest(messages=row["messages"], images=row["images"]) for row in rows]
    config = RequestConfig(max_tokens=MAX_NEW_TOKENS, temperature=temperature)
    responses = engine.infer(requests, config, use_tqdm=False)
    return [response.choices[0].message.content for response in responses]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="rows with images and solutions")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file for the results")
    options = parser.parse_args()
    rows = read_rows(options.data)
    results = [{"model": str(m), "rows": len(rows), **evaluate(m, rows)} for m in options.models]
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
