"""Build a Qwen2.5-VL of 20 million parameters that half knows the handwritten digits, offline.

    python scripts/make_digits.py --output DIGITS
    python scripts/make_tiny_vlm.py --output DIR --data DIGITS

The result is an ordinary Hugging Face folder with Qwen's real vocabulary, which transformers,
vLLM (on a CPU, too) and ms-swift (`--model DIR --model_type qwen2_5_vl --template qwen2_5_vl`)
load. After the warm start it answers "Which digit is this?" in the right form, and its samples are
right on about a third of the images: room for GRPO to improve, and groups whose rewards differ.

    python scripts/make_tiny_vlm.py --output DIR --family qwen3_vl

makes a random model of another family in seconds (`tiny_vlm/families.py` lists them), of which no
warm start is known.

`tiny_vlm.json` beside the weights says how good this model is on the held-out images, and what
made it. The same seed, versions and kind of processor give the same weights. It takes 30 to 40
seconds on an idle machine, most of them on one core.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiny_vlm.output_folder import MANIFEST, claim, finish, read_manifest

REPORT = "tiny_vlm.json"


def check_family(name: str) -> None:
    """Raise `ValueError` for a family that is not known; names those that are."""
    from tiny_vlm.families import FAMILIES

    if name not in FAMILIES:
        raise ValueError(f"--family {name} is not known; expected one of {', '.join(FAMILIES)}")


def find_digits_seed(data: Path | None) -> int:
    """The seed with which `make_digits.py` built `data`."""
    if data is None:
        raise ValueError(
            "--data is missing, but the warm start needs the digits; pass the folder that "
            "make_digits.py wrote, or --no-warm-start for random weights"
        )
    manifest = read_manifest(data)
    if manifest is None or not manifest["complete"]:
        raise ValueError(
            f"--data {data} has no {MANIFEST} of a complete build; "
            f"make it first: python scripts/make_digits.py --output {data}"
        )
    return int(manifest["settings"]["seed"])


def make_tiny_vlm(output: Path, data: Path | None, seed: int) -> dict[str, Any]:
    """Write model, processor and report into the existing folder `output`; the report.

    `data` is the digits' folder of the warm start; None leaves the weights as they were drawn.
    """
    # These take seconds to import, which --help and a folder that is complete already need not.
    import torch
    import transformers
    from tiny_vlm.architecture import build_model, make_config, make_processor, publish
    from tiny_vlm.examples import encode_rows, read_rows
    from tiny_vlm.quality import measure
    from tiny_vlm.tokenizer import build_tokenizer, check_tokenizer, find_ranks_file, read_ranks
    from tiny_vlm.warm_start import warm_start

    tokenizer = build_tokenizer(read_ranks(find_ranks_file()))
    check_tokenizer(tokenizer)
    processor = make_processor(tokenizer)
    model = build_model(make_config(tokenizer), seed)
    report: dict[str, Any] = {
        "seed": seed,
        "num_parameters": model.num_parameters(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if data is not None:
        examples = encode_rows(read_rows(data / "warmstart.jsonl"), processor)
        report["num_steps"] = warm_start(model, examples, seed)
        heldout = encode_rows(read_rows(data / "heldout.jsonl"), processor)
        quality = asdict(measure(model, heldout))
        report["heldout"] = {name: round(value, 4) for name, value in quality.items()}
    model.save_pretrained(output)
    processor.save_pretrained(output)
    publish(output)
    (output / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def make_one_of_family(output: Path, name: str, seed: int) -> dict[str, Any]:
    """Write a random model of a family into the existing folder `output`; the report."""
    from tiny_vlm import families
    from tiny_vlm.tokenizer import find_ranks_file, read_ranks

    family = families.FAMILIES[name]
    count = families.make_family(family, read_ranks(find_ranks_file()), output, seed)
    return {"seed": seed, "num_parameters": count, "swift": family.swift_argv}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--data", type=Path, help="folder that make_digits.py wrote")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights (default: 0)")
    parser.add_argument("--no-warm-start", action="store_true", help="leave the weights random")
    parser.add_argument("--family", help="of a random model; default: a trained Qwen2.5-VL")
    parser.add_argument("--force", action="store_true", help="build again, whatever is there")
    return parser.parse_args(argv)


def summary(report: dict[str, Any]) -> str:
    if "heldout" not in report:
        given = f" ({' '.join(report['swift'])})" if "swift" in report else ""
        return f"{report['num_parameters']:,} parameters, random weights{given}"
    heldout = report["heldout"]
    return (
        f"{report['num_parameters']:,} parameters, {report['num_steps']} warm-start steps; "
        f"held-out accuracy {heldout['greedy_accuracy']:.0%} greedy, "
        f"{heldout['sampled_accuracy']:.0%} sampled, in form {heldout['form_rate']:.1%}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    has_warm_start = not (args.no_warm_start or args.family)
    try:
        digits_seed = find_digits_seed(args.data) if has_warm_start else None
        settings: dict[str, Any] = {"seed": args.seed, "digits_seed": digits_seed}
        if args.family:
            check_family(args.family)
            settings["family"] = args.family
        if not claim(args.output, settings, force=args.force):
            print(f"{args.output} is complete already; nothing to do")
            return
        if args.family:
            report = make_one_of_family(args.output, args.family, args.seed)
        else:
            data = args.data if has_warm_start else None
            report = make_tiny_vlm(args.output, data, args.seed)
    except ValueError as error:
        raise SystemExit(f"make_tiny_vlm: {error}") from error
    finish(args.output, settings)
    print(f"{args.output}: {summary(report)}")


if __name__ == "__main__":
    main()
