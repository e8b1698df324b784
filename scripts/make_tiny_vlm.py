"""Build a Qwen2.5-VL of 20 million parameters that reads some handwritten digits, offline.

    python scripts/make_digits.py --output DIGITS
    python scripts/make_tiny_vlm.py --output DIR --data DIGITS

The result is an ordinary Hugging Face folder with Qwen's real vocabulary. transformers, vLLM (also
on a CPU) and ms-swift (`--model DIR --model_type qwen2_5_vl --template qwen2_5_vl`) load it. After
supervised training (the warm start) it answers "Which digit is this?" in the right form, and about
a third of its samples are right. GRPO can improve it, because the rewards of a group differ.

    python scripts/make_tiny_vlm.py --output DIR --family qwen3_vl

makes a random model of another family (`tiny_vlm/families.yaml`) in seconds, without a warm start.

`tiny_vlm.json`, next to the weights, has the model's accuracy on the held-out images, its seed and
the versions used. The same seed, versions and kind of processor give the same weights. It takes 30
to 40 seconds on an idle machine, mostly on one core.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tiny_vlm.output_folder import MANIFEST, claim, finish


def make_tiny_vlm(output: Path, data: Path, seed: int) -> str:
    """Write model, processor and report into the existing folder `output`; return a summary.

    Args:
        data: the folder that `make_digits.py` wrote.
    """
    # These imports take seconds, which --help and a complete folder do not need.
    import torch
    import transformers
    from tiny_vlm.families import FAMILIES, make_model, make_processor
    from tiny_vlm.tokenizer import build_tokenizer, read_ranks
    from tiny_vlm.warm_start import measure, read_examples, warm_start

    tokenizer = build_tokenizer(read_ranks())
    family = FAMILIES["qwen2_5_vl"]
    processor = make_processor(family, tokenizer)
    model = make_model(family, tokenizer, seed)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    report: dict[str, Any] = {
        "seed": seed,
        "num_parameters": model.num_parameters(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    report["num_steps"] = warm_start(
        model, read_examples(data / "warmstart.jsonl", processor), seed
    )
    heldout = read_examples(data / "heldout.jsonl", processor)
    quality = measure(model, heldout, torch.arange(len(heldout.digits_N)))
    shares = report["heldout"] = {name: round(share, 4) for name, share in quality.items()}
    model.save_pretrained(output)
    processor.save_pretrained(output)
    publish(output)
    (output / "tiny_vlm.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return (
        f"{report['num_parameters']:,} parameters, {report['num_steps']} warm-start steps; "
        f"held-out accuracy {shares['greedy_accuracy']:.0%} greedy, "
        f"{shares['sampled_accuracy']:.0%} sampled, in form {shares['form_rate']:.1%}"
    )


def publish(folder: Path) -> None:
    """Rewrite a saved model's settings in the form that Qwen publishes.

    The text model's settings are at the top level, in the spelling of transformers 4, which
    transformers 4 and 5 and every vLLM read.
    """
    paths = [folder / name for name in ("config.json", "processor_config.json")]
    config, processor = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config = {**text, **config}  # `model_type` comes from the whole model
    for kind in ("image_processor", "video_processor"):
        size = processor[kind]["size"]
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        processor[kind] |= limits
    for path, settings in zip(paths, (config, processor), strict=True):
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--data", type=Path, help="folder that make_digits.py wrote")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--family", help="make a random model of this family instead")
    args = parser.parse_args()
    settings: dict[str, Any] = {"seed": args.seed, "digits_seed": None}
    if args.family:
        settings["family"] = args.family
    elif args.data:
        manifest = json.loads((args.data / MANIFEST).read_text(encoding="utf-8"))
        settings["digits_seed"] = manifest["settings"]["seed"]
    else:
        parser.error("--data is missing: name the folder that make_digits.py wrote")
    if claim(args.output, settings):
        if args.family:
            from tiny_vlm.families import FAMILIES, make_family

            family = FAMILIES[args.family]
            count = make_family(family, args.output, args.seed)
            made = f"{count:,} parameters, random weights ({' '.join(family.swift_argv)})"
        else:
            made = make_tiny_vlm(args.output, args.data, args.seed)
        finish(args.output, settings)
        print(f"{args.output}: {made}")


if __name__ == "__main__":
    main()
