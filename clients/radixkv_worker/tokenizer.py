"""Text to tokens and back: a `tokenizers` tokenizer, a chat template, and streamed decoding."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from radixkv_worker.config import UnsupportedModel
from radixkv_worker.request import BadRequest

MAX_PARTIAL_TOKENS = 16  # an incomplete character at the end is held back for so many tokens


class BadMessages(ValueError):
    """The messages do not fit the chat template, or the model has none."""


class Tokenizer:
    """Encodes and decodes; not changed by use."""

    def __init__(
        self, tokenizer: FastTokenizer, chat_template: str | None, names: Mapping[str, str]
    ) -> None:
        """`names`: the texts of special tokens that the template may use (bos_token, …)."""
        self._tokenizer = tokenizer
        self._template_text = chat_template
        self._names = dict(names)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        self._template = environment.from_string(chat_template) if chat_template else None
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and, if there, tokenizer_config.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(f"{directory} has no tokenizer.json")
        config = {}
        if (directory / "tokenizer_config.json").is_file():
            config = json.loads((directory / "tokenizer_config.json").read_text())
        names = {}
        for name in ("bos_token", "eos_token"):
            value = config.get(name)
            names[name] = value.get("content", "") if isinstance(value, dict) else value or ""
        return cls(FastTokenizer.from_file(str(path)), config.get("chat_template"), names)

    def save(self, directory: Path) -> None:
        """Write what `from_directory` reads."""
        self._tokenizer.save(str(directory / "tokenizer.json"))
        config = {**self._names, "chat_template": self._template_text}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))

    def encode(self, text: str, *, special: bool = True, context: int | None = None) -> list[int]:
        """Token ids; raises BadText. `special`: add what the model wants at the start, if anything.

        Text that cannot be within `context` tokens, since no token is that long, is not encoded.
        """
        if context is not None and len(text) > context * self._longest:
            raise BadText(f"{len(text)} characters are more than {context} tokens can be")
        try:
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:  # lone surrogates, which JSON can carry
            raise BadText("the text is not valid Unicode") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; incomplete characters become U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, context: int | None = None
    ) -> list[int]:
        """Tokens of a conversation up to where the assistant speaks; raises BadMessages, BadText.

        `context` as in encode.
        """
        if self._template is None:
            raise BadMessages("this model has no chat template")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._names
            )
        except jinja2.TemplateError as error:
            raise BadMessages(f"chat template: {error}") from error
        return self.encode(text, special=False, context=context)


class BadText(BadRequest):
    """Text that has no UTF-8, or more of it than the model takes."""


class TextStream:
    """Decodes tokens one by one; ends at a stop string, which is not part of the text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []  # not yet decoded for good, and some before for context
        self._settled = ""  # the text of `_tokens` that is in `_text` already
        self._text = ""
        self._sent = 0  # characters of `_text` handed out
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything so far, also what is held back."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token; returns the text to hand out now, and sets `stopped` at a stop string."""
        assert not self.stopped, "the text has ended"
        self._tokens.append(token)
        whole = self._tokenizer.decode(self._tokens)
        if whole.endswith("\ufffd") and len(self._tokens) < MAX_PARTIAL_TOKENS:
            return ""
        self._text += whole[len(self._settled) :]
        # One token of context: decoders treat the first token's leading space differently.
        self._tokens = self._tokens[-1:]
        self._settled = self._tokenizer.decode(self._tokens)
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
            return self._hand_out(len(self._text))
        return self._hand_out(len(self._text) - self._held_back())

    def finish(self) -> str:
        """No more tokens: returns what was held back."""
        if not self.stopped:
            self._text += self._tokenizer.decode(self._tokens)[len(self._settled) :]
            self.stopped = True
        return self._hand_out(len(self._text))

    def copy(self) -> "TextStream":
        """An independent stream that goes on from here."""
        twin = TextStream(self._tokenizer, self._stops)
        twin._tokens, twin._settled = list(self._tokens), self._settled
        twin._text, twin._sent, twin.stopped = self._text, self._sent, self.stopped
        return twin

    def _hand_out(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start : self._sent]

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    *,
    single_digits: bool,
) -> FastTokenizer:
    """A byte-level BPE tokenizer; `single_digits`: every digit is a token of its own."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
