"""Completions end where they must, and text is made only where a stop string needs it, on sync and
async engines, on servers, and in trainings, where reward functions and the record get the stop (T1,
T2, T3, T4, T6). Placeholders of media are never sampled, and have no probability in training (M2).

    python -m tests.stack.test_stops MODEL (sync | async) OUTPUT

generates all cases with one engine: vLLM's engines leave processes and globals behind.
`tests/fast/stops/test_rule.py` compares the rule with brute force.

The weights of a Qwen2.5-VL spell token sequences: greedy decoding follows them. Attention and MLPs
add nothing, so a token's hidden state is its embedding. Each token of the sequences has a channel
of its own, which an untied head maps to the next token. All other tokens, and the last ones of
sequences, share a channel that the head maps to `<|im_end|>`.
"""

import asyncio
import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.model import get_processor
from swift.template import get_template
from transformers import AutoConfig, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.policy import SAME
from tests.rig.processes import run_module
from tests.rig.rounds import BATCH, logged_steps, read_lines, train

# --- models that spell ---

VOCABULARY = 151_936
END = 151_645  # <|im_end|>
IMAGE_PAD = 151_655
PROMPTS_END = 198
"""The last token of every prompt: the line break after `<|im_start|>assistant`."""

NEW_TOKEN = "<|halt|>"
"""A token of `--new_special_tokens`."""

ENDING = 0
"""The channel of tokens that end a sequence."""

LOUD = 100.0
"""Size of an embedding: large enough to make the norm's epsilon negligible."""


def write_speller(base: Path, folder: Path, sequences: Iterable[Sequence[int]]) -> Path:
    """Save a model in `folder` that follows the `sequences` of token ids.

    Args:
        base: a tiny Qwen2.5-VL; its configuration, tokenizer and processor are taken.
        sequences: no token stands in two places.
    """
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    model = Qwen2_5_VLForConditionalGeneration(config)
    successors = successors_of(sequences)
    width = config.text_config.hidden_size
    assert len(successors) < width, "more tokens than channels"
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding_VH = model.get_input_embeddings().weight.zero_()
        head_VH = model.get_output_embeddings().weight.zero_()
        embedding_VH[:, ENDING] = LOUD
        head_VH[END, ENDING] = gain(ENDING) / math.sqrt(width)
        for channel, (token, successor) in enumerate(successors.items(), start=1):
            embedding_VH[token] = 0
            embedding_VH[token, channel] = LOUD
            head_VH[successor, channel] = gain(channel) / math.sqrt(width)
    folder.mkdir(parents=True)
    for pattern in ("*.json", "*.jinja"):
        for file in base.glob(pattern):
            shutil.copy(file, folder)
    model.save_pretrained(folder)
    return folder


def successors_of(sequences: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return each token's successor, in the order of the channels."""
    successors: dict[int, int] = {}
    for sequence in sequences:
        for token, successor in pairwise(sequence):
            assert token not in successors, f"token {token} of {sequence} has two successors"
            successors[token] = successor
    return successors


def gain(channel: int) -> float:
    """Return the logit of a channel's token; all other logits are 0. Neighbours differ."""
    return 8.0 + channel % 7 / 2


def expected_logprobs(sequences: Iterable[Sequence[int]], token_ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of sampled tokens, in nats at temperature 1.

    Args:
        token_ids: the prompt's last token, then the sampled ones.
    """
    channels = {token: i for i, token in enumerate(successors_of(sequences), start=1)}
    gains = [gain(channels.get(token, ENDING)) for token in token_ids[:-1]]
    return [-math.log1p((VOCABULARY - 1) * math.exp(-g)) for g in gains]


def token_ids(pieces: Sequence[str | int], tokenizer: Any) -> list[int]:
    """Return the ids of pieces, each of which is one token, by its text or its id."""
    ids = [
        [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        for piece in pieces
    ]
    assert all(len(of_one) == 1 for of_one in ids), f"{pieces!r} are the tokens {ids}"
    return [int(i) for (i,) in ids]


# --- what they say, and where it must end ---

SEARCH = [" find", " it", "</", "search", ">\n\n", "More"]
LETTERS = [f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
SETTINGS = {"model_type": "qwen2_5_vl", "torch_dtype": torch.float32}


@dataclass(frozen=True)
class Case:
    """A completion that the model spells, and how it must end."""

    name: str
    start: str
    """The beginning of the answer, one token in the prompt: it selects the case."""

    pieces: list[str | int]
    """The model says this after `start`: texts of tokens, or ids of tokens without text."""

    words: list[str]
    num_tokens: int
    text: str
    bare: str
    """The text with `--include_stop_str_in_output false`."""

    reason: str | int | None
    ids: tuple[int, ...] = ()
    max_tokens: int = 40
    question: str = "Which?"


CASES = [
    Case("ends inside a token", "Alice", SEARCH, ["</search>"],
         num_tokens=5, text=" find it</search>", bare=" find it", reason="</search>"),
    Case("at the last possible token", "Alice", SEARCH, ["</search>"], max_tokens=5,
         num_tokens=5, text=" find it</search>", bare=" find it", reason="</search>"),
    Case("cut off before it", "Alice", SEARCH, ["</search>"], max_tokens=4,
         num_tokens=4, text=" find it</search", bare=" find it</search", reason=None),
    Case("a stop token", "Alice", SEARCH, [], ids=(1836,),
         num_tokens=4, text=" find it</search", bare=" find it</", reason=1836),
    Case("spans twenty-six tokens", "Dave", [*LETTERS, "."], ["".join(LETTERS)],
         num_tokens=26, text="".join(LETTERS), bare="", reason="".join(LETTERS)),
    Case("a special token", "Frank", ["It", "<|box_start|>", "!"], ["<|box_start|>"],
         num_tokens=2, text="It<|box_start|>", bare="It", reason="<|box_start|>"),
    Case("an added token", "Henry", ["{", "}", "</tool_call>", "and"], ["</tool_call>"],
         num_tokens=3, text="{}</tool_call>", bare="{}", reason="</tool_call>"),
    Case("a new special token", "Kevin", ["Then", NEW_TOKEN, "go"], [NEW_TOKEN],
         num_tokens=2, text=f"Then{NEW_TOKEN}", bare="Then", reason=NEW_TOKEN),
    Case("an emoji of three tokens", "Peter", ["OK", 9284, 104, 254, "Yes"], ["🫠"],
         num_tokens=4, text="OK🫠", bare="OK", reason="🫠"),
    Case("stops in the prompt", "FIN", ["ISH", "ed"], ["FINISH", "</search>"],
         question="FINISH </search> FIN", num_tokens=3, text="ISHed", bare="ISHed",
         reason="<|im_end|>"),
    Case("the end of the turn, and no stops", "FIN", ["ISH", "ed"], [],
         num_tokens=3, text="ISHed", bare="ISHed", reason="<|im_end|>"),
]  # fmt: skip


# --- the program with an engine ---


def request_of(
    case: Case, *, include: bool
) -> tuple[RolloutInferRequest, RequestMetadata, RequestConfig]:
    messages = [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": case.start},  # goes on from here
    ]
    request = RolloutInferRequest(messages=messages)
    metadata = RequestMetadata(
        sample_id=SampleId(phase="train", step=0, number=0, group=0, index=0),
        count=2,
        run_seed=42,
        as_arrays=True,
        stop_token_ids=case.ids,
        include_stop_str_in_output=include,
    )
    wire.write_metadata(request.data_dict, metadata)
    config = RequestConfig(
        max_tokens=case.max_tokens,
        temperature=1.0,
        top_k=1,  # greedy; at temperature 0 vLLM would refuse several samples
        stop=case.words,
        return_details=True,
        logprobs=True,
    )
    return request, metadata, config


def completions_of(output: Any, metadata: RequestMetadata) -> list[dict[str, Any]]:
    """Return the samples of an answer, of a colocated engine or of a server, as JSON values."""
    answer = getattr(output.response, "answer", None)
    if answer is None:
        message = json.loads(json.dumps(output.rollout_infos[wire.KEY]))  # over HTTP
        answer = wire.read_answer(message, metadata, "server 0")
    return [
        {
            "text": sample.text,
            "token_ids": np.asarray(sample.token_ids).tolist(),
            "logprobs": np.asarray(sample.logprobs).tolist(),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        for sample in answer.completions
    ]


async def generate_cases(model: str, use_async: bool) -> dict[str, Any]:
    """Generate each case with one vLLM engine, colocated and as a server."""
    from swift_grpo_ext.rollout.engine import RolloutEngine

    apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
    processor = get_processor(model, new_special_tokens=[NEW_TOKEN], **SETTINGS)
    engine = RolloutEngine(
        model,
        template=get_template(processor, template_type="qwen2_5_vl"),
        use_async_engine=use_async,
        max_model_len=512,
        enforce_eager=True,
        logprobs_mode="raw_logprobs",  # with ms-swift's mode all are 0 under top_k=1
        engine_kwargs={"kv_cache_memory_bytes": 2**27},
        **SETTINGS,
    )
    detokenized: set[bool] = set()
    name, place = ("generate", 1) if use_async else ("add_request", 2)
    upstream = getattr(engine.engine, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        detokenized.add(args[place].detokenize)
        return upstream(*args, **kwargs)

    setattr(engine.engine, name, watched)
    results: dict[str, Any] = {}
    for case, include in product(CASES, (True, False)):
        detokenized.clear()
        completions = []
        for engine.serves in (False, True):
            request, metadata, config = request_of(case, include=include)
            if use_async:
                [output] = await engine.async_infer([request], config, use_tqdm=False)
            else:
                [output] = engine.infer([request], config, use_tqdm=False)
            completions += completions_of(output, metadata)
        results[f"{case.name}/{include}"] = {
            "completions": completions,
            "detokenized": sorted(detokenized),
        }
    return results


# --- tests ---

Sequences = dict[str, list[int]]
"""The token ids of each start, and of all that the model says after it."""


@pytest.fixture(scope="module")
def spelled(assets: Path) -> Sequences:
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    tokenizer.add_special_tokens({"additional_special_tokens": [NEW_TOKEN]})
    return {case.start: token_ids([case.start, *case.pieces], tokenizer) for case in CASES}


@pytest.fixture(scope="module")
def speller(assets: Path, spelled: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that spells known tokens with the real Qwen tokenizer."""
    folder = tmp_path_factory.mktemp("speller") / "model"
    return write_speller(assets / "tiny_vlm", folder, spelled.values())


@pytest.fixture(scope="module", params=["sync", "async"])
def answers(request: pytest.FixtureRequest, speller: Path) -> Any:
    """The answers of an engine."""
    output = speller.parent / f"{request.param}.json"
    argv = (str(speller), request.param, str(output))
    run_module(__name__, *argv, log=output.with_suffix(".log"))
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("include", [True, False])
def test_a_completion_ends_where_it_must(
    case: Case, include: bool, answers: dict[str, Any], spelled: Sequences
) -> None:
    """vLLM makes text only where a stop string is looked for in it. Stop tokens, stop strings that
    are special tokens, and the template's own need no text."""
    start, *rest = spelled[case.start]
    ids = [*rest, END][: case.num_tokens]
    expected = {
        "text": case.text if include else case.bare,
        "token_ids": ids,
        "finish_reason": "length" if case.reason is None else "stop",
        "stop_reason": case.reason,
        # Neighbours differ by 0.3 nats and more; float32 adds up 151,935 small numbers.
        "logprobs": pytest.approx(expected_logprobs(spelled.values(), [start, *ids]), abs=0.01),
    }
    found = answers[f"{case.name}/{include}"]
    # Two samples of the colocated engine, and two of the server.
    assert found["completions"] == [expected] * 4
    needs_text = not all(word in ("<|box_start|>", NEW_TOKEN) for word in case.words)
    assert found["detokenized"] == [needs_text]


def test_a_training_stops_at_a_token_that_does_not_show(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    """The model's answer to any prompt is ` find it</search>`. No sample counts as truncated."""
    answer = token_ids(SEARCH, AutoTokenizer.from_pretrained(assets / "tiny_vlm"))
    folder = write_speller(assets / "tiny_vlm", tmp_path / "searcher", [[PROMPTS_END, *answer]])
    model = ("--model", str(folder), "--new_special_tokens", NEW_TOKEN)
    stops = ("--stop_token_ids", "1836", "--include_stop_str_in_output", "false", "--top_k", "1")
    argv = (*model, *stops, "--reward_funcs", "stopped")
    train(assets, rows, tmp_path / "a", *argv, steps=2)
    text, ids = " find it</", answer[:4]
    rewarded = read_lines(tmp_path / "a/record/rewards.jsonl")
    assert rewarded == [[text, 1836, ids, False]] * 2 * BATCH
    row = {"text": text, "token_ids": ids, "finish_reason": "stop", "stop_reason": "1836"}
    assert read_samples(tmp_path / "a/run", columns=list(row)).to_pylist() == [row] * 2 * BATCH


def test_a_placeholder_of_probability_1_is_never_sampled(assets: Path, tmp_path: Path) -> None:
    """The model's first token is `<|image_pad|>` with probability 1; others are equally likely."""
    model = write_speller(assets / "tiny_vlm", tmp_path / "model", [[PROMPTS_END, IMAGE_PAD]])
    speller = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        speller.get_output_embeddings().weight[IMAGE_PAD] *= 10
    speller.save_pretrained(model)
    rows, argv = assets / "digits/train.jsonl", ("--model", str(model))
    train(assets, rows, tmp_path, *argv, steps=2)
    completions = read_samples(tmp_path / "run", columns=["token_ids"])["token_ids"].to_pylist()
    assert len(completions) == 2 * BATCH
    assert all(completions)
    assert not any(IMAGE_PAD in token_ids for token_ids in completions)
    # Both sides compute the softmax over the other tokens.
    gaps = [step["rollout_gap/max"] for step in logged_steps(tmp_path / "run")]
    assert len(gaps) == 2
    assert max(gaps) < SAME


if __name__ == "__main__":
    model, engine, output = sys.argv[1:]
    results = asyncio.run(generate_cases(model, engine == "async"))
    Path(output).write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")
