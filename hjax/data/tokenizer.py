"""Text to token ids and back: Hugging Face tokenizer.json files and character tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.data.chat_templates import render
from hjax.data.token_bytes import TokenBytes
from hjax.errors import ConfigError, DataError, short
from hjax.files import replace_file
from hjax.user_input import given_path, read_object, read_text

if TYPE_CHECKING:
    import tokenizers

# What a bare tokenizer.json calls its special tokens when no tokenizer_config.json says so.
_CUSTOMARY = {
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos_token": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]"),
    "pad_token": ("<pad>", "[PAD]"),
}

# Where files have chat templates beside the default one's, each NAME.jinja.
TEMPLATE, MORE_TEMPLATES, DEFAULT = "chat_template.jinja", "additional_chat_templates", "default"

# Characters of a text that takes long enough for other threads to be let run.
LONG = 4096


class Tokenizer:
    """Encodes and decodes text; picklable, and loaded without `transformers`.

    Made by `Tokenizer.load` or `Tokenizer.characters`.

    Attributes:
      name: the directory's or file's name, or "characters".
      vocab_size: highest id + 1, so that an embedding of that many rows holds every id.
      bos_id, eos_id, pad_id: ids, or None where the tokenizer has no such token.
      eos_ids: every id that ends a sequence, `eos_id` first: the tokenizer's and those that
        `generation_config.json` or `config.json` beside it add.
      chat_template: Jinja source of the default one, which `chat` renders, or None.
      chat_templates: of others by name, which are kept and saved.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        *,
        name: str,
        chat_templates: Mapping[str, str] = {},
        extra_eos_ids: Sequence[int] = (),
    ):
        self._backend = backend
        self._config = config
        self.name = name
        self.chat_template = chat_templates.get(DEFAULT)
        self.chat_templates = {k: v for k, v in chat_templates.items() if k != DEFAULT}
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        own = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *extra_eos_ids]))
        self._prefix = self._added_before()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a directory with a tokenizer.json, or the json file itself.

        Beside it are read, where present: tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja and additional_chat_templates/*.jinja (which win over the config's
        templates), generation_config.json and config.json (end-of-sequence ids). Raises DataError
        when there is no usable tokenizer.
        """
        import tokenizers

        path = given_path(path, "tokenizer ")
        file = path if path.is_file() else path / "tokenizer.json"
        if not file.is_file():
            if not path.exists():
                problem = "there is no such file or directory"
            elif (path / "tokenizer.model").is_file():
                problem = "it holds only a SentencePiece tokenizer.model; convert it to json first"
            else:
                problem = "the directory holds no tokenizer.json"
            raise DataError(f"tokenizer {path}: {problem}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            reason = str(error).splitlines()[0]
            raise DataError(f"tokenizer {file}: not a readable tokenizer.json ({reason})") from None
        # A file's own padding and truncation would silently change what encode returns.
        backend.no_padding()
        backend.no_truncation()
        folder = file.parent
        config = {
            **_read_json(folder / "special_tokens_map.json"),
            **_read_json(folder / "tokenizer_config.json"),
        }
        templates = _templates(folder, config.get("chat_template"))
        extra: list[int] = []
        for neighbour in ("generation_config.json", "config.json"):
            ids = _read_json(folder / neighbour).get("eos_token_id")
            several = ids if isinstance(ids, list) else [] if ids is None else [ids]
            for one in several:
                if not isinstance(one, int) or isinstance(one, bool) or one < 0:
                    raise DataError(
                        f"{folder / neighbour}: eos_token_id is {short(ids, 80)}; a token id, or a "
                        "list of them"
                    )
            extra += several
        name = folder.resolve().name if file.name == "tokenizer.json" else file.stem
        return cls(backend, config, name=name, chat_templates=templates, extra_eos_ids=extra)

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

        With `add_special` the tokens that belong in front (BOS) come first: as
        tokenizer_config.json's `add_bos_token` says, else as the json's post-processor does.
        EOS is never added. Text that already holds its special tokens (a chat template's)
        wants `add_special=False`. Raises DataError for a character the vocabulary lacks (of
        tokenizers without an unknown token).
        """
        try:
            ids = self._ids(text)
        except Exception as error:  # WordLevel without an unknown token
            known = self._backend.get_vocab(with_added_tokens=True)
            missing = next((c for c in text if c not in known), None)
            if missing is None:
                raise DataError(
                    f"tokenizer {self.name}: cannot encode {short(text, 80)} ({error})"
                ) from None
            raise DataError(
                f"tokenizer {self.name}: the character {missing!r} of {short(text, 80)} is not in "
                f"its vocabulary of {self.vocab_size} tokens; change the text or the tokenizer"
            ) from None
        return [*self._prefix, *ids] if add_special else ids

    def _ids(self, text: str) -> list[int]:
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=False).ids
        # The other lets no other thread run meanwhile, which for some MB is many seconds.
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return found.ids

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids (ints or an integer array); special tokens left out unless asked."""
        return self._backend.decode([int(t) for t in tokens], skip_special_tokens=skip_special)

    def decode_response(
        self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]
    ) -> str:
        """Text that `response_tokens` add after `prompt_tokens`, special tokens left out.

        SentencePiece-like tokenizers drop the first space of whatever they decode; here the
        prompt is decoded along, so a response that begins a new word keeps its space. Where the
        prompt's text is not a prefix of the whole (it ends inside a character's bytes), the
        response is decoded by itself.
        """
        before = self.decode(prompt_tokens)
        whole = self.decode([*prompt_tokens, *response_tokens])
        return whole[len(before):] if whole.startswith(before) else self.decode(response_tokens)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders chat messages with the tokenizer's Jinja template, in a sandbox with limits.

        Args:
          messages: dicts with `role` and `content`, as Hugging Face templates expect them.
          add_generation_prompt: end with the header of the assistant's turn.
          **variables: whatever else the template reads (`tools`, `enable_thinking`, ...).

        Returns the text, special tokens included: encode it with `add_special=False`.
        Raises DataError without a template, or when the template refuses the messages.
        """
        if not self.chat_template:
            raise DataError(
                f"tokenizer {self.name} has no chat template; give prompts as strings, or put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        if variables.get("continue_final_message"):
            raise DataError(
                f"tokenizer {self.name}: continue_final_message is not supported; render the turns "
                "before it with add_generation_prompt, and add the beginning of the last"
            )
        # As transformers does: templates have cases for keys that are missing, not for null.
        messages = [{k: v for k, v in each.items() if v is not None} for each in messages]
        special = {
            key: text for key in self._config
            if key.endswith("_token") and (text := _content(self._config[key])) is not None
        }
        values = {"tools": None, "documents": None, **special, **variables}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return render(self.chat_template, values)
        except DataError as error:
            shown = short(list(messages), 80)
            raise DataError(
                f"tokenizer {self.name}: given {shown}, the chat template {error}"
            ) from None

    def token_bytes(self) -> TokenBytes:
        """The bytes of each token, of which every text is made; DataError where they are unknown.

        A response is its tokens' bytes; after a prompt without text a SentencePiece-like tokenizer
        drops the first space of it.
        """
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        spelled = self._backend.get_vocab(with_added_tokens=True)
        tokens = {i: token for token, i in spelled.items() if i not in special}
        decoder = json.loads(self._backend.to_str())["decoder"]
        return TokenBytes.of(decoder, tokens, self.name)

    def check_fits(self, vocab_size: int, what: str | Path) -> None:
        """Raises ConfigError if a model of so many embedding rows lacks some of the ids."""
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"{what}: its tokenizer has ids up to {self.vocab_size - 1}, its embedding "
                f"{vocab_size} rows; give the tokenizer of these weights"
            )

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and, if there are any, the templates."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / "tokenizer.json", self._backend.to_str(pretty=True))
        config = {k: v for k, v in self._config.items() if k != "chat_template"}
        text = json.dumps(config, indent=1, ensure_ascii=False)
        replace_file(directory / "tokenizer_config.json", text + "\n")
        if self.chat_template:
            replace_file(directory / TEMPLATE, self.chat_template)
        for name, template in self.chat_templates.items():
            (directory / MORE_TEMPLATES).mkdir(exist_ok=True)
            replace_file(directory / MORE_TEMPLATES / f"{name}.jinja", template)

    def same_as(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in both, so that ids need no re-tokenising."""
        return self._backend.get_vocab(with_added_tokens=True) == other._backend.get_vocab(
            with_added_tokens=True
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def _special_id(self, key: str) -> int | None:
        text = _content(self._config.get(key))
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"tokenizer {self.name}: {key} is {short(self._config[key], 80)}; text, or null"
            )
        candidates = _CUSTOMARY[key] if not self._config else (text,) if text else ()
        ids = (self._backend.token_to_id(candidate) for candidate in candidates)
        return next((i for i in ids if i is not None), None)

    def _added_before(self) -> list[int]:
        """Ids that belong in front of a text; what a post-processor puts behind it is left out."""
        says = self._config.get("add_bos_token")
        if says is not None:
            return [self.bos_id] if says and self.bos_id is not None else []
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        for probe in ("a", *vocabulary):
            try:
                plain = self._backend.encode(probe, add_special_tokens=False).ids
            except Exception:  # the probe is outside the alphabet
                continue
            if plain:
                full = self._backend.encode(probe, add_special_tokens=True).ids
                starts = range(len(full) - len(plain) + 1)
                return full[: next(i for i in starts if full[i : i + len(plain)] == plain)]
        return []


def _read_json(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _templates(folder: Path, written: Any) -> dict[str, str]:
    """Chat templates by name: those that stand in files, or else in tokenizer_config.json."""
    files = {DEFAULT: folder / TEMPLATE}
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        files[file.name.removesuffix(".jinja")] = file
    found = {name: read_text(file) for name, file in files.items() if file.is_file()}
    return found or _written_templates(written)


def _written_templates(written: Any) -> dict[str, str]:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if written is None:
        return {}
    entries = written if isinstance(written, list) else [{"name": DEFAULT, "template": written}]
    named: dict[str, str] = {}
    for entry in entries:
        of = entry if isinstance(entry, dict) else {}
        name, template = of.get("name"), of.get("template")
        if not isinstance(name, str) or not isinstance(template, str) or not name:
            raise DataError(
                f"tokenizer_config.json: chat_template is {short(written, 80)}; text, or a list of "
                "named ones"
            )
        if Path(name).name != name:  # a file is called so where it is saved
            raise DataError(
                f"tokenizer_config.json: a chat_template is named {short(name, 80)}; a name "
                "without /"
            )
        named[name] = template
    return named


def _content(token: Any) -> Any:
    """A special token is written as a string, or as an object with a `content`."""
    return token.get("content") if isinstance(token, dict) else token
