"""Text to tokens and back, and chat messages to text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
import tokenizers.decoders

from sgl_aspects.errors import InvalidRequestError, ModelLoadError

ChatMessage = Mapping[str, Any]

_EXAMPLE = 'a message is a dict such as {"role": "user", "content": "Hello"}'


class Tokenizer:
    """A fast tokenizer and the chat template that came with the model.

    ``template_tokens`` are the special tokens that the template may name, such as ``bos_token``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._template_tokens = dict(template_tokens or {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the text holds half of a surrogate pair: it is not valid Unicode"
            ) from None
        # As a batch, because encode() would hold the GIL, for seconds at some MB.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The template writes the special tokens itself, so that none are added here."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode; special tokens leave no text."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token, special tokens by their name."""
        token = self.backend.id_to_token(token_id)
        if token is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token_id in self._added_tokens:
            return token.encode()
        if isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return b"".join(_BYTE_OF.get(character, character.encode()) for character in token)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def _added_tokens(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Format the conversation by the chat template, up to the assistant's answer."""
        if not _are_messages(messages):
            raise InvalidRequestError(f"{messages!r} is not a conversation: {_EXAMPLE}")
        try:
            return self._compiled_template.render(
                messages=list(messages), add_generation_prompt=True, **self._template_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a template that joins text and None
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}; {_EXAMPLE}"
            ) from error

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template: give the prompt as text to generate()"
            )
        # The template comes with the model and is untrusted: in the sandbox it can only produce text.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template is not valid: {error}") from error


def _byte_alphabet() -> dict[str, bytes]:
    """Byte-level tokenizers write printable bytes as themselves, the others as characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def read_tokenizer_file(file: Path) -> tokenizers.Tokenizer:
    """Read ``tokenizer.json``."""
    if not file.is_file():
        raise ModelLoadError(f"{file} is missing: a folder without it has no fast tokenizer to read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    # Training leftovers in the file; an engine neither cuts prompts silently nor pads them.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _are_messages(messages: object) -> bool:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in messages)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike jinja2's own filter it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
