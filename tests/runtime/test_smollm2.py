"""The real model: SmolLM2 from its GGUF file, against transformers' own route for GGUF.

transformers takes half a minute for the file: what it gives is kept beside this file, and ``make test-slow``
compares the two.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.runtime.loader.checkpoint import open_checkpoint
from sgl_aspects.runtime.loader.tokenizer import Tokenizer
from tests.support.answers import MARGIN, greedy, margin

NEW_TOKENS = 32
REFERENCE = Path(__file__).with_name("smollm2_reference.json")
pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("forked_schedulers"),
    # transformers' loader reads arrays of the file that cannot be written to.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]

PROMPTS = [
    "Hi",
    "The capital of France is",
    "Count from 1 to 20: 1, 2, 3,",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who",
    "List three uses of a paperclip.\n\n1.",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils earlier, because",
    "The quick brown fox jumps over the lazy dog. " * 12 + "After that, the fox",
]

CORPUS = [
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n   and spaces",
    "1234567890 3.14159 1,000,000 2024-05-06 0x1F",
    "1/2 is ½, 2 squared is ², Ⅷ, ٣٤٥, １２３ and 四",
    "A list:\n\n1. one\n\n  2. two",
    "don't can't I'll we've they'd it's",
    "naïve café Übergröße ßtraße Ångström",
    "日本語のテキスト, 中文文本, 한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε, שלום עולם, مرحبا",
    "emoji 🙂🙃👩‍👩‍👧‍👦🇩🇪 and combining é ñ",
    "def f(x: int) -> list[int]:\n\treturn [x**2 for _ in range(10)]  # comment",
    "<|im_start|>user\nspecial <|im_end|> in the <|endoftext|> middle<|im_end|>",
    "<repo_name>a/b<file_sep>c <not_special> <|im_start",
    "https://example.org/?q=a%20b&c=1#frag",
    "ALL CAPS MiXeD cAsE snake_case camelCase",
    "\u200bzero\u00a0width\u3000spaces\ufeff",
    "",
]

CONVERSATIONS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Sky?"}],
    [
        {"role": "user", "content": "Hi 🙂"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "  Bye  "},
    ],
]


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    with Engine(model_path=smollm2_path, dtype="float32", max_total_tokens=4096) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What transformers gives, by the names of :func:`made_by_transformers`."""
    found: dict[str, Any] = json.loads(REFERENCE.read_text())
    return found


@pytest.fixture(scope="module")
def expected(reference: dict[str, Any]) -> list[list[int]]:
    answers: list[list[int]] = reference["answers"]
    return answers


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return open_checkpoint(str(smollm2_path)).load_tokenizer()


def test_eight_prompts_in_one_batch_answer_as_transformers(engine: Engine, expected: list[list[int]]) -> None:
    results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [result.output_ids for result in results] == expected


def test_chat_answers_in_english(engine: Engine) -> None:
    result = engine.generate([{"role": "user", "content": "What is the capital of France?"}])
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"


def digest(texts: list[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def test_the_rebuilt_tokenizer_cuts_text_as_transformers_does(
    tokenizer: Tokenizer, reference: dict[str, Any]
) -> None:
    for text, (ids, decoded) in zip(CORPUS, reference["corpus"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == decoded


def test_every_single_token_decodes_as_in_transformers(
    tokenizer: Tokenizer, reference: dict[str, Any]
) -> None:
    texts = [tokenizer.decode([i]) for i in range(0, reference["vocabulary"], 7)]
    assert digest(texts) == reference["single tokens"]


def test_chat_prompts_are_those_of_transformers(tokenizer: Tokenizer, reference: dict[str, Any]) -> None:
    for messages, (text, ids) in zip(CONVERSATIONS, reference["conversations"], strict=True):
        assert tokenizer.render_chat(messages) == text
        assert tokenizer.encode_chat(messages) == ids


def made_by_transformers(path: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # The model was trained with a step that transformers drops in its GGUF route: each digit on its own.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    # What from_pretrained(gguf_file=...) does, which insists on the accelerate package for nothing here.
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"]))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    chats = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in CONVERSATIONS
    ]
    cut = [tokenizer.encode(text) for text in CORPUS]
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = greedy(model.eval(), prompts, NEW_TOKENS)
    assert min(map(margin, itertools.repeat(model), prompts, answers)) > MARGIN
    return {
        "answers": answers,
        "corpus": [[ids, decode(ids)] for ids in cut],
        "conversations": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in chats],
        "vocabulary": len(tokenizer),
        "single tokens": digest([decode([i]) for i in range(0, len(tokenizer), 7)]),
    }


@pytest.mark.slow
def test_the_reference_is_what_transformers_gives(
    smollm2_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers parses the file at each look at it, and makes the map of names for each module.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    assert made_by_transformers(smollm2_path) == reference
