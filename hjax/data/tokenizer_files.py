"""A tokenizer's directory, read as transformers reads it: tokenizer.json and the files beside it.

A directory without tokenizer.json (SentencePiece, tiktoken, vocabulary and merges) is converted by
transformers, which the extra `tokenizers` installs with the two libraries.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.data.tokenizer_backend import TokenizerBackend, without_panics
from hjax.errors import DataError, short_repr
from hjax.user_input import (
    check_directory,
    parse_json,
    read_file,
    read_object,
    read_text,
    user_path,
)

if TYPE_CHECKING:
    import tokenizers

JSON = "tokenizer.json"
# Vocabularies that transformers converts: pattern of the file's name.
CONVERTED = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")
# Files of the default chat template and of further ones (folder of NAME.jinja); the default's name.
TEMPLATE, MORE_TEMPLATES, DEFAULT = "chat_template.jinja", "additional_chat_templates", "default"

# Largest tokenizer.json, and most characters of the tokens that the files beside it add.
FILE_BYTES, ADDED_CHARACTERS = 256 * 2**20, 2**20
# Highest id that is taken: four times the largest vocabulary that is published. Most ids that end a
# response: published models have up to ten.
HIGHEST_ID, MOST_ENDS = 2**22, 256
# A line of a tiktoken vocabulary: the token's bytes in base64, and its rank.
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# Fields of an added token in a file.
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# The special tokens that every tokenizer of transformers has, in the order in which they are added.
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Classes of transformers that take the pre-tokenizer from tokenizer.json as it is.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer's directory holds.

    Attributes:
      backend: the tokenizer, with every token that the files add; without padding and truncation.
      config: tokenizer_config.json, or with it special_tokens_map.json, as transformers joins them.
      templates: chat templates by name.
      eos_ids: ids that end a sequence by generation_config.json or config.json.
      name: of the directory, or of a json file.
    """

    backend: TokenizerBackend
    config: dict[str, Any]
    templates: dict[str, str]
    eos_ids: list[int]
    name: str


def holds_tokenizer(directory: Path) -> bool:
    """Whether a directory has a tokenizer.json, or a vocabulary that can be converted."""
    return (directory / JSON).is_file() or _vocabulary(directory) is not None


def read_tokenizer_files(path: str | Path, model: Path | None = None) -> TokenizerFiles:
    """Read a tokenizer's directory, or a tokenizer.json with what stands beside it.

    Args:
      path: of the directory or file.
      model: directory of a model whose generation_config.json is read too.

    Raises:
      DataError: no usable tokenizer there, or a file that cannot be read.
    """
    path = user_path(path, "tokenizer ")
    file = path if path.is_file() else path / JSON
    folder = file.parent
    check_directory(folder)
    check_directory(folder / MORE_TEMPLATES)
    config = _config(folder)
    if file.is_file() and file.suffix == ".json":
        backend = _read_backend(file, config)
        _add_tokens(backend.library, config, folder)
    else:
        library, specials = _convert(path)
        backend = TokenizerBackend.from_library(library)
        config |= specials
    return TokenizerFiles(
        backend=backend,
        config=config,
        templates=_templates(folder, config.get("chat_template")),
        eos_ids=_eos_ids(folder, model),
        name=file.stem if path.is_file() and file.name != JSON else folder.resolve().name,
    )


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens, as chat templates get them (`bos_token`, ...)."""
    more = config.get("extra_special_tokens")
    keys = [*_NAMED, *(key for key in config if key.endswith("_token"))]
    named = {key: config[key] for key in keys if key in config}
    named |= more if isinstance(more, dict) else {}
    texts = {key: content(value) for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def content(token: Any) -> Any:
    """The text of a special token: a string, or an object with a `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; one of before `added_tokens_decoder` yields to special_tokens_map."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        for key, value in _read_json(folder / "special_tokens_map.json").items():
            config[key] = [_typed(v) for v in value] if isinstance(value, list) else _typed(value)
    return config


def _typed(value: Any) -> Any:
    """A token of special_tokens_map.json, as tokenizer_config.json has it."""
    typed = {"special": True, "__type": "AddedToken"}
    return {**value, **typed} if isinstance(value, dict) and "content" in value else value


def _read_backend(file: Path, config: Mapping[str, Any]) -> TokenizerBackend:
    if file.stat().st_size > FILE_BYTES:
        raise DataError(f"tokenizer {file}: larger than {FILE_BYTES} bytes, which none is")
    data = read_file(file)
    try:
        content = parse_json(data, unique_keys=True)
        if not isinstance(content, dict):
            raise DataError(f"it must be a JSON object, not {type(content).__name__}")
        changed = _with_prefix_space(content, config)
        text = data.decode("utf-8-sig") if changed == content else json.dumps(changed)
        return TokenizerBackend.from_json(text, changed)
    except RecursionError:
        raise DataError(f"tokenizer {file}: too deeply nested") from None
    except DataError as error:
        raise type(error)(f"tokenizer {file}: not a readable tokenizer.json ({error})") from None


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Add tokens that the files beside tokenizer.json name and it lacks, in transformers' order.

    Raises:
      DataError: malformed entries, or a token whose id is not the next free one.
    """
    where = folder / "tokenizer_config.json"
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(more, list | dict):
        raise DataError(f"{where}: additional_special_tokens is {short_repr(more, 80)}; a list")
    named = special_tokens(config)
    extra = [_added_token(each, where) for each in (more if isinstance(more, list) else [])]
    numbered = _numbered_tokens(config, folder, {*named.values(), *(t.content for t in extra)})
    held = backend.get_added_tokens_decoder()
    if "added_tokens_decoder" not in config:
        numbered = {i: token for i, token in numbered.items() if i not in held}
    known = {repr(token) for token in held.values()}
    wanted = [token for _, token in sorted(numbered.items()) if repr(token) not in known]
    texts = {token.content for token in [*held.values(), *wanted]}
    tokens = [_added_token(config.get(key, text), where) for key, text in named.items()]
    for token in [*tokens, *extra]:
        if token.content not in texts:
            wanted.append(token)
    for token in wanted:
        token.special = token.special or token.content in named.values()
    if sum(len(token.content) for token in wanted) > ADDED_CHARACTERS:
        raise DataError(f"{where}: the added tokens have more than {ADDED_CHARACTERS} characters")
    backend.add_tokens(wanted)
    own = {token.content for token in held.values()}
    for i, token in sorted(numbered.items()):
        found = backend.token_to_id(token.content)
        if token.content and token.content not in own and found != i:
            raise DataError(
                f"tokenizer {folder}: the added token {token.content!r} has id {i}, and the next "
                f"free id of its tokenizer.json is {found}; name the tokens between them too"
            )


def _numbered_tokens(
    config: dict[str, Any], folder: Path, specials: set[str]
) -> dict[int, tokenizers.AddedToken]:
    """Added tokens by id: of added_tokens_decoder, or where there is none, of added_tokens.json."""
    import tokenizers

    file, key = folder / "tokenizer_config.json", "added_tokens_decoder"
    given: Any = config.get(key)
    try:
        if key in config:
            return {int(i): _added_token(token, file, special=False) for i, token in given.items()}
        file, key = folder / "added_tokens.json", "the file"
        given = _read_json(file)
        return {
            operator.index(i): tokenizers.AddedToken(
                text, special=text in specials, normalized=text not in specials
            )
            for text, i in given.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise DataError(
            f"{file}: {key} is {short_repr(given, 80)}; tokens with their ids"
        ) from None


def _added_token(value: Any, file: Path, special: bool = True) -> tokenizers.AddedToken:
    """A token to add: a text, which is `special`, or an object with a `content` and flags."""
    import tokenizers

    fields = {"content": value, "special": special} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise DataError(f"{file}: an added token is {short_repr(value, 80)}; text, or an object")
    flags = {key: fields[key] for key in _TOKEN_FLAGS if isinstance(fields.get(key), bool)}
    return tokenizers.AddedToken(fields["content"], **flags)


def _with_prefix_space(content: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that puts a space before a text, or none, where `add_prefix_space` says
    which.

    As in transformers, the generic class leaves that to tokenizer.json.
    """
    adds, kind = config.get("add_prefix_space"), config.get("tokenizer_class")
    if not isinstance(adds, bool) or str(kind).removesuffix("Fast") in ("None", *_GENERIC):
        return content
    scheme = "never" if not adds else "always" if config.get("legacy") else "first"
    names = ("normalizer", "pre_tokenizer", "decoder")
    return content | {name: _prefix_scheme(content.get(name), scheme) for name in names}


def _prefix_scheme(part: Any, scheme: str) -> Any:
    """A part of a tokenizer.json with a leading space by `scheme`; None: it is left out."""
    if not isinstance(part, dict):
        return part
    kind, adds = part.get("type"), scheme != "never"
    if kind == "Sequence":
        steps = {key: value for key, value in part.items() if isinstance(value, list)}
        made = {key: [_prefix_scheme(step, scheme) for step in steps[key]] for key in steps}
        return {**part, **{key: [s for s in made[key] if s is not None] for key in made}}
    if kind == "ByteLevel":
        return {**part, "add_prefix_space": adds}
    # Older files have `add_prefix_space` there.
    older = "always" if part.get("add_prefix_space", True) else "never"
    if kind == "Metaspace" and (part.get("prepend_scheme", older) != "never") != adds:
        return {**part, "add_prefix_space": adds, "prepend_scheme": scheme}
    # SentencePiece-like ones put the space in front, and drop the first one of what they decode.
    first = kind == "Prepend" or (kind, part.get("start")) == ("Strip", 1)
    return None if first and not adds else part


def _vocabulary(directory: Path) -> Path | None:
    """The file that transformers would convert, if there is one."""
    found = (file for pattern in CONVERTED for file in sorted(directory.glob(pattern)))
    return next((file for file in found if file.is_file()), None)


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Convert a directory without tokenizer.json; also its special tokens.

    Raises:
      DataError: there is no vocabulary, a library is missing, or transformers cannot convert it.
    """
    folder = path.parent if path.is_file() else path
    file = path if path.is_file() else _vocabulary(path)
    if file is None:
        problem = f"holds no {JSON}" if path.exists() else "no such file or directory"
        raise DataError(f"tokenizer {path}: {problem}")
    kind, packages = _kind(file)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"tokenizer {file}: {kind} without a {JSON}; converting it needs "
            f"{' and '.join(missing)}: pip install 'hjax[tokenizers]'"
        )
    import transformers

    try:
        read = functools.partial(
            transformers.AutoTokenizer.from_pretrained,
            local_files_only=True,
            trust_remote_code=False,
        )
        theirs: Any = without_panics(read, folder)
        backend = theirs.backend_tokenizer
    except Exception as error:  # transformers raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"tokenizer {file}: transformers cannot convert this {kind} ({short_repr(reason, 160)})"
        ) from None
    return backend, theirs.special_tokens_map


def _kind(file: Path) -> tuple[str, tuple[str, ...]]:
    """What a vocabulary is, in words, and the packages that convert it."""
    if file.name == "tekken.json":
        return "Mistral's tekken vocabulary", ("transformers", "tiktoken")
    if file.suffix not in (".model", ".tiktoken"):
        return "vocabulary of a tokenizer in Python", ("transformers",)
    with file.open("rb") as lines:
        tiktoken = _TIKTOKEN_LINE.fullmatch(lines.readline(512)) is not None
    if tiktoken:
        return "tiktoken vocabulary", ("transformers", "tiktoken")
    return "SentencePiece model", ("transformers", "sentencepiece", "google.protobuf")


def _eos_ids(folder: Path, model: Path | None) -> list[int]:
    files = [folder / "generation_config.json", folder / "config.json"]
    files += [model / "generation_config.json"] if model else []
    return [i for file in files for i in read_eos_ids(file)]


def read_eos_ids(file: Path) -> list[int]:
    """The ids that end a response by a generation_config.json or config.json; none without one.

    Raises:
      DataError: something else is there.
    """
    ids = _read_json(file).get("eos_token_id")
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    known = all(type(i) is int and 0 <= i <= HIGHEST_ID for i in several)
    if not known or len(several) > MOST_ENDS:
        raise DataError(
            f"{file}: eos_token_id is {short_repr(ids, 80)}; a token id of 0 to {HIGHEST_ID}, or a "
            f"list of at most {MOST_ENDS} of them"
        )
    return several


def _templates(folder: Path, in_config: Any) -> dict[str, str]:
    """Chat templates by name, from files if there are any, else from tokenizer_config.json."""
    files = {DEFAULT: folder / TEMPLATE}
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        files[file.name.removesuffix(".jinja")] = file
    found = {name: read_text(file) for name, file in files.items() if file.is_file()}
    return found or _config_templates(in_config)


def _config_templates(in_config: Any) -> dict[str, str]:
    """Templates in tokenizer_config.json: one, or a list of named ones."""
    if in_config is None:
        return {}
    one = {"name": DEFAULT, "template": in_config}
    entries = in_config if isinstance(in_config, list) else [one]
    named: dict[str, str] = {}
    for entry in entries:
        of = entry if isinstance(entry, dict) else {}
        name, template = of.get("name"), of.get("template")
        if not isinstance(name, str) or not isinstance(template, str) or not name:
            raise DataError(
                f"tokenizer_config.json: chat_template is {short_repr(in_config, 80)}; text, or a "
                "list of named ones"
            )
        if Path(name).name != name:  # `save` names a file after it
            raise DataError(
                f"tokenizer_config.json: a chat_template is named {short_repr(name, 80)}; a name "
                "without /"
            )
        named[name] = template
    return named
