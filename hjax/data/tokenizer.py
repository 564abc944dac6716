"""Text to token ids and back: Hugging Face tokenizers and character tokenizers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hjax.data.chat_templates import render
from hjax.data.limited_process import ComputationFailed
from hjax.data.token_bytes import TokenBytes
from hjax.data.tokenizer_backend import TokenizerBackend
from hjax.data.tokenizer_files import (
    DEFAULT,
    HIGHEST_ID,
    MORE_TEMPLATES,
    TEMPLATE,
    content,
    read_tokenizer_files,
    special_tokens,
)
from hjax.data.turn_ends import TurnEnds, find_turn_ends
from hjax.errors import ConfigError, DataError, short_repr
from hjax.files import replace_file

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")

# Usual names of special tokens, for a tokenizer whose files name none.
_USUAL_NAMES = {
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos_token": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]"),
    "pad_token": ("<pad>", "[PAD]"),
}

# Name of the template of chats with tools, where there is one beside the default.
TOOL_USE = "tool_use"

# What `clean_up_tokenization_spaces` replaces in decoded text, in this order.
_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


class Tokenizer:
    """Encodes and decodes text; picklable, and loaded without `transformers`.

    Made by `Tokenizer.load` or `Tokenizer.characters`.

    Attributes:
      name: the directory's or file's name, or "characters".
      vocab_size: highest id + 1, so that an embedding of that many rows holds every id.
      bos_id, eos_id, pad_id: ids, or None where the tokenizer has no such token.
      chat_template: Jinja source of the default chat template, which `chat` renders, or None.
      chat_templates: sources of further templates by name: `chat` renders `tool_use` where tools
        are given; the others are only saved again.
    """

    def __init__(
        self,
        backend: TokenizerBackend | tokenizers.Tokenizer,
        config: dict[str, Any],
        *,
        name: str,
        chat_templates: Mapping[str, str] = {},
        extra_eos_ids: Sequence[int] = (),
    ):
        if not isinstance(backend, TokenizerBackend):
            backend = TokenizerBackend.from_library(backend)
        self._backend = backend
        self._library = backend.library
        self._config = config
        self.name = name
        self.chat_template = chat_templates.get(DEFAULT)
        self.chat_templates = {k: v for k, v in chat_templates.items() if k != DEFAULT}
        self.vocab_size = self._check_ids()
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        self._extra_eos_ids = tuple(extra_eos_ids)
        self._rows = self.vocab_size
        self._prefix = self._within_limits("a text", backend.added_prefix)
        if any(i >= self.vocab_size for i in self._prefix):
            raise DataError(
                f"tokenizer {name}: its post-processor adds the ids {short_repr(self._prefix)}, "
                f"and the highest of its tokens is {self.vocab_size - 1}"
            )
        # As in transformers, which leaves BPE alone: there the spaces are the text's own.
        corrupts = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        self._cleans = bool(config.get("clean_up_tokenization_spaces")) and (
            type(self._library.model).__name__ != "BPE" or bool(config.get(corrupts))
        )

    @classmethod
    def load(cls, path: str | Path, model: Path | None = None) -> Tokenizer:
        """Load a directory with a tokenizer.json, or the json file itself.

        `model`: directory of a model whose `generation_config.json` is read too.

        These files beside it are read too, as transformers reads them: tokenizer_config.json,
        special_tokens_map.json and added_tokens.json (both only without the config's
        `added_tokens_decoder`), chat_template.jinja and additional_chat_templates/*.jinja (which
        override the config's templates), generation_config.json and config.json (end-of-sequence
        ids). A directory without tokenizer.json is converted by transformers, if it is installed.
        Raises DataError when there is no usable tokenizer.
        """
        files = read_tokenizer_files(path, model)
        return cls(
            files.backend,
            files.config,
            name=files.name,
            chat_templates=files.templates,
            extra_eos_ids=files.eos_ids,
        )

    @classmethod
    def characters(cls, alphabet: str) -> Tokenizer:
        """One token per character: `<pad>` 0, `<bos>` 1, `<eos>` 2, then the alphabet in order.

        `encode` puts BOS first. `save` writes files that transformers' PreTrainedTokenizerFast
        reads too. Raises ConfigError for an empty alphabet or a character that comes twice.
        """
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, processors

        twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
        if not alphabet or twice:
            problem = f"has {twice[0]!r} more than once" if twice else "is empty"
            raise ConfigError(f"the alphabet {problem}; list each character once")
        special = ["<pad>", "<bos>", "<eos>"]
        vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
        backend.add_special_tokens(special)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
        }
        return cls(backend, config, name="characters")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` prepends BOS, if tokenizer.json's post-processor says so; beside that file
        transformers does not follow the config's `add_bos_token` either. EOS is never added. Pass
        `add_special=False` for text that already contains its special tokens, such as a rendered
        chat template. Raises DataError for a character outside the vocabulary of a tokenizer
        without an unknown token.
        """
        try:
            ids = self._within_limits(text, self._backend.encode, text)
        except ComputationFailed:
            raise
        except Exception as error:  # WordLevel without an unknown token
            known = self._library.get_vocab(with_added_tokens=True)
            missing = next((c for c in text if c not in known), None)
            if missing is None:
                raise DataError(
                    f"tokenizer {self.name}: cannot encode {short_repr(text, 80)} ({error})"
                ) from None
            raise DataError(
                f"tokenizer {self.name}: the character {missing!r} of {short_repr(text, 80)} is "
                f"not in its vocabulary of {self.vocab_size} tokens; change the text or tokenizer"
            ) from None
        if self._rows < self.vocab_size and ids and max(ids) >= self._rows:
            token = self._library.id_to_token(max(ids))
            raise DataError(
                f"tokenizer {self.name}: {short_repr(text, 80)} has the token {token!r}, id "
                f"{max(ids)}, and the model's embedding {self._rows} rows; leave it out"
            )
        return [*self._prefix, *ids] if add_special and self._prefix else ids

    def _within_limits(self, given: Any, compute: Callable[..., T], *arguments: Any) -> T:
        """The result; of a limit that was exceeded the error names this tokenizer."""
        try:
            return compute(*arguments)
        except ComputationFailed as error:
            shown = short_repr(given, 80)
            raise ComputationFailed(f"tokenizer {self.name}: given {shown}, it {error}") from None

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids (ints or an integer array), by default without special tokens."""
        ids = [int(t) for t in tokens]
        text = self._within_limits(ids, self._backend.decode, ids, skip_special)
        for spaced, cleaned in _CLEANED if self._cleans else ():
            text = text.replace(spaced, cleaned)
        return text

    @property
    def decodes_here(self) -> bool:
        """Whether it decodes in this process: a decoder that may take long does not."""
        return self._backend.decodes_here

    def decode_response(
        self,
        prompt_tokens: Sequence[int],
        response_tokens: Sequence[int],
        skip_special: bool = True,
    ) -> str:
        """Text that `response_tokens` add after `prompt_tokens`, by default without special tokens.

        SentencePiece-like tokenizers drop the first space of what they decode. So the prompt is
        decoded along, and a response that begins a new word keeps its space. If the prompt ends
        inside a character, its text is no prefix of the whole; then the response is decoded alone.
        """
        before = self.decode(prompt_tokens, skip_special)
        whole = self.decode([*prompt_tokens, *response_tokens], skip_special)
        if whole.startswith(before):
            return whole[len(before) :]
        return self.decode(response_tokens, skip_special)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render chat messages with the tokenizer's Jinja template, in an isolated process.

        Where there is a template `tool_use` and tools are given, it is that one.

        Args:
          messages: dicts with `role` and `content`, as Hugging Face templates expect them.
          add_generation_prompt: end with the header of the assistant's turn.
          **variables: further variables of the template (`tools`, `enable_thinking`, ...).

        Returns the text with special tokens: encode it with `add_special=False`.
        Raises DataError without a template, or when the template raises.
        """
        template = self.template_for(variables.get("tools"))
        if not template:
            others = f" named default, only {', '.join(sorted(self.chat_templates))}"
            raise DataError(
                f"tokenizer {self.name} has no chat template{others if self.chat_templates else ''}"
                "; give prompts as strings with data.chat=False, or put a chat_template.jinja "
                "beside its tokenizer.json"
            )
        if variables.get("continue_final_message"):
            raise DataError(
                f"tokenizer {self.name}: continue_final_message is not supported; render the turns "
                "before it with add_generation_prompt, and add the beginning of the last"
            )
        # As in transformers: templates test for missing keys, not for null.
        messages = [{k: v for k, v in each.items() if v is not None} for each in messages]
        values = {"tools": None, "documents": None, **special_tokens(self._config), **variables}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return render(template, values)
        except DataError as error:
            shown = short_repr(list(messages), 80)
            raise DataError(
                f"tokenizer {self.name}: given {shown}, the chat template {error}"
            ) from None

    @functools.cached_property
    def turn_ends(self) -> TurnEnds:
        """Where the chat template ends the assistant's turn; empty without a template."""
        added = self._library.get_added_tokens_decoder().values()
        return find_turn_ends(self.chat, [token.content for token in added])

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a response, `eos_id` first: the tokenizer's, those of the chat
        template's `turn_ends`, and those that `generation_config.json` or `config.json` beside it
        add."""
        turns = (self._library.token_to_id(token) for token in self.turn_ends.tokens)
        ids = (self.eos_id, *turns, *self._extra_eos_ids)
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def template_for(self, tools: Any) -> str | None:
        """Source of the template that renders a chat with these tools (None: without any)."""
        found = None if tools is None else self.chat_templates.get(TOOL_USE)
        return found or self.chat_template

    def token_bytes(self) -> TokenBytes:
        """The bytes of each token; DataError where the decoder does not tell them.

        A response is the concatenation of its tokens' bytes; after a prompt without text a
        SentencePiece-like tokenizer drops its first space.
        """
        if self._cleans:
            raise DataError(
                f"tokenizer {self.name}: clean_up_tokenization_spaces changes what its tokens "
                "decode to; set it to false in tokenizer_config.json"
            )
        added = self._library.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        spelled = self._library.get_vocab(with_added_tokens=True)
        tokens = {i: token for token, i in spelled.items() if i not in special}
        try:
            decoder = self._backend.decoder
        except DataError as error:
            raise DataError(f"tokenizer {self.name}: {error}") from None
        return TokenBytes.from_decoder(decoder, tokens, self.name)

    def check_fits(self, vocab_size: int, what: str | Path) -> None:
        """Raise ConfigError if some ids exceed an embedding of ``vocab_size`` rows.

        Special tokens but BOS and EOS may (Gemma 3's image token, a pad token that a config adds):
        `encode` then refuses a text that has one.
        """
        added = self._library.get_added_tokens_decoder()
        needed = {self.bos_id, self.eos_id}
        spare = {i for i, token in added.items() if token.special and i not in needed}
        ids = self._library.get_vocab(with_added_tokens=True).values()
        if max(i for i in ids if i not in spare) >= vocab_size:
            raise ConfigError(
                f"{what}: its tokenizer has ids up to {self.vocab_size - 1}, its embedding "
                f"{vocab_size} rows; give the tokenizer of these weights"
            )
        self._rows = vocab_size

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates; where several ids end
        a response, also generation_config.json with them."""
        (directory := Path(directory)).mkdir(parents=True, exist_ok=True)
        replace_file(directory / "tokenizer.json", self._backend.to_json())
        config = {k: v for k, v in self._config.items() if k != "chat_template"}
        text = json.dumps(config, indent=1, ensure_ascii=False)
        replace_file(directory / "tokenizer_config.json", text + "\n")
        if len(self.eos_ids) > 1:
            ids = {"bos_token_id": self.bos_id, "pad_token_id": self.pad_id}
            ids = {key: i for key, i in ids.items() if i is not None}
            text = json.dumps(ids | {"eos_token_id": list(self.eos_ids)}, indent=1)
            replace_file(directory / "generation_config.json", text + "\n")
        if self.chat_template:
            replace_file(directory / TEMPLATE, self.chat_template)
        for name, template in self.chat_templates.items():
            (directory / MORE_TEMPLATES).mkdir(exist_ok=True)
            replace_file(directory / MORE_TEMPLATES / f"{name}.jinja", template)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether both map every token to the same id, so that ids can be shared."""
        return self._library.get_vocab(with_added_tokens=True) == other._library.get_vocab(
            with_added_tokens=True
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def _check_ids(self) -> int:
        """The highest id + 1; DataError for ids that are none."""
        ids = self._library.get_vocab(with_added_tokens=True).values()
        if not ids or max(ids) > HIGHEST_ID or len(set(ids)) < len(ids):
            problem = (
                "it has no token" if not ids
                else f"its highest id is {max(ids)}, at most {HIGHEST_ID}" if max(ids) > HIGHEST_ID
                else f"{len(ids) - len(set(ids))} of its tokens have the id of another"
            )  # fmt: skip
            raise DataError(f"tokenizer {self.name}: {problem}")
        return max(ids) + 1

    def _special_id(self, key: str) -> int | None:
        text = content(self._config.get(key))
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"tokenizer {self.name}: {key} is {short_repr(self._config[key], 80)}; text, "
                "or null"
            )
        named = not _USUAL_NAMES.keys().isdisjoint(self._config)
        candidates = ((text,) if text else ()) if named else _USUAL_NAMES[key]
        ids = (self._library.token_to_id(candidate) for candidate in candidates)
        return next((i for i in ids if i is not None), None)
