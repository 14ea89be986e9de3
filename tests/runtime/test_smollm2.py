"""The real model: SmolLM2 from its GGUF file, against transformers' own route for GGUF."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.runtime.frontend.tokenizer import Tokenizer
from sgl_aspects.runtime.loader.checkpoint import open_checkpoint
from tests.support.tiny_models import greedy

NEW_TOKENS = 32
pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
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


@pytest.fixture(scope="module", autouse=True)
def _file_parsed_once() -> Iterator[None]:
    """transformers parses the file at each look at it, and makes the map of names for each module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    with Engine(model_path=smollm2_path, dtype="float32", max_total_tokens=4096) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    # The model was trained with a step that transformers drops in its GGUF route: each digit on its own.
    backend = reference.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return reference


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return open_checkpoint(str(smollm2_path)).load_tokenizer()


@pytest.fixture(scope="module")
def expected(smollm2_path: Path, reference_tokenizer: Any) -> list[list[int]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # What from_pretrained(gguf_file=...) does, which insists on the accelerate package for nothing here.
    config = LlamaConfig(**load_gguf_checkpoint(str(smollm2_path))["config"])
    model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return greedy(model.eval(), [reference_tokenizer.encode(prompt) for prompt in PROMPTS], NEW_TOKENS)


def test_eight_prompts_in_one_batch_answer_as_transformers(engine: Engine, expected: list[list[int]]) -> None:
    results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [result.output_ids for result in results] == expected


def test_each_prompt_alone_answers_as_transformers(engine: Engine, expected: list[list[int]]) -> None:
    results = [engine.generate(prompt, SamplingParams(max_new_tokens=NEW_TOKENS)) for prompt in PROMPTS]
    assert [result.output_ids for result in results] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "tp_size"), [(1, 1), (16, 1), (16, 3)])
def test_in_a_tiny_cache_and_on_several_ranks_they_answer_as_transformers(
    smollm2_path: Path, expected: list[list[int]], page_size: int, tp_size: int
) -> None:
    with Engine(
        model_path=smollm2_path,
        dtype="float32",
        page_size=page_size,
        tp_size=tp_size,
        max_total_tokens=400,
        decode_reserve=0,
        chunked_prefill_size=48,
    ) as engine:
        for _ in range(2):  # the second time with prefixes
            results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
            assert [result.output_ids for result in results] == expected
        stats = engine.stats()
        assert stats["retractions"] > 0
        assert stats["kv_available_tokens"] == stats["kv_total_tokens"]


def test_chat_answers_in_english(engine: Engine) -> None:
    result = engine.generate([{"role": "user", "content": "What is the capital of France?"}])
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("text", CORPUS)
def test_the_rebuilt_tokenizer_cuts_text_as_transformers_does(
    tokenizer: Tokenizer, reference_tokenizer: Any, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference_tokenizer.encode(text)
    assert tokenizer.decode(ids) == reference_tokenizer.decode(ids, skip_special_tokens=True)


def test_every_single_token_decodes_as_in_transformers(
    tokenizer: Tokenizer, reference_tokenizer: Any
) -> None:
    ids = range(0, len(reference_tokenizer), 7)
    assert [tokenizer.decode([i]) for i in ids] == [
        reference_tokenizer.decode([i], skip_special_tokens=True) for i in ids
    ]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_prompts_are_those_of_transformers(
    tokenizer: Tokenizer, reference_tokenizer: Any, messages: list[dict[str, str]]
) -> None:
    text = reference_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.encode_chat(messages) == reference_tokenizer.encode(text, add_special_tokens=False)
