"""OpenAI-style request bodies in, response bodies out. No I/O.

Fields that change what comes back and are not done here are refused by name, never ignored.
"""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from radixkv_worker.request import BadRequest, Delta, Request, RequestStats, SamplingParams
from radixkv_worker.tokenizer import BadMessages, Tokenizer

DEFAULT_CHAT_TOKENS = 256
MAX_ERROR_CHARS = 300
MAX_INTEGER = 1 << 63
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # accepted with these values only
    "echo": (False, None),
    "logprobs": (False, None),
    "suffix": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
}
_COMMON = {"model", "user", "stream", "radixkv", "max_tokens", "max_completion_tokens"} | {
    *("temperature", "top_p", "seed", "n", "best_of", "use_beam_search"),
    *("stop", "stop_token_ids", "ignore_eos"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: the engine's request, and how to answer it."""

    request: Request
    chat: bool
    stream: bool
    debug: bool
    model: str
    created: int


def decode(data: bytes, charset: str | None) -> Any:
    """The JSON value of a body; raises BadRequest."""
    try:
        return json.loads(data.decode(charset or "utf-8"))
    except (ValueError, RecursionError, LookupError) as error:
        # ValueError: JSON, text that is not in the charset, integers of thousands of digits
        raise BadRequest(f"the body is not JSON: {error}") from error


def parse(body: Any, *, chat: bool, tokenizer: Tokenizer, context: int, model: str) -> Call:
    """Read a body of /v1/completions or /v1/chat/completions; raises BadRequest.

    `context` is the most tokens the model takes; a chat's default max_tokens stays below it.
    """
    arrived_s = time.monotonic()
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    _refuse_unknown(body, _COMMON | {"messages" if chat else "prompt"})
    prompt = (_chat_prompt if chat else _prompt)(body, tokenizer, context)
    default_tokens = max(1, min(DEFAULT_CHAT_TOKENS, context - len(prompt))) if chat else 16
    debug = _typed(body, "radixkv", dict, {})
    if set(debug) - {"debug"}:
        raise BadRequest(f"radixkv has unknown fields {sorted(set(debug) - {'debug'})}")
    request = Request(
        request_id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        prompt=tuple(prompt),
        params=_params(body, default_tokens),
        arrived_s=arrived_s,
    )
    return Call(
        request=request,
        chat=chat,
        stream=_typed(body, "stream", bool, False),
        debug=_typed(debug, "debug", bool, False),
        model=_typed(body, "model", str, model),
        created=int(time.time()),
    )


def _refuse_unknown(body: Mapping[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise BadRequest(f"{name} = {value!r} is not supported")
        elif name not in known:
            raise BadRequest(f"unknown field {name!r}")


def _params(body: Mapping[str, Any], default_tokens: int) -> SamplingParams:
    n = _typed(body, "n", int, 1)
    best_of = _typed(body, "best_of", int, n)
    beams = _typed(body, "use_beam_search", bool, False)
    if not beams and best_of != n:
        raise BadRequest("best_of differs from n, which needs use_beam_search")
    if beams and _typed(body, "stream", bool, False):
        raise BadRequest("beam search cannot be streamed: the best beam is known at the end")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else _typed(body, "stop", list, [])
    if not all(isinstance(text, str) for text in stops):
        raise BadRequest("stop is neither a string nor a list of strings")
    limit = _typed(body, "max_tokens", int, _typed(body, "max_completion_tokens", int, None))
    return SamplingParams(
        max_tokens=default_tokens if limit is None else limit,
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        n=n,
        beam_width=best_of if beams else 0,
        seed=_typed(body, "seed", int, secrets.randbits(62)),
        stop=tuple(stops),
        stop_tokens=tuple(_tokens(body.get("stop_token_ids") or [], "stop_token_ids")),
        ignore_eos=_typed(body, "ignore_eos", bool, False),
    )


def _prompt(body: Mapping[str, Any], tokenizer: Tokenizer, context: int) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, context=context)
    if isinstance(prompt, list):
        return _tokens(prompt, "prompt")
    raise BadRequest("prompt is neither a string nor a list of token ids")


def _chat_prompt(body: Mapping[str, Any], tokenizer: Tokenizer, context: int) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of messages")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise BadRequest("a message is not an object with role and content, both strings")
    try:
        return tokenizer.encode_chat(messages, context=context)
    except BadMessages as error:
        raise BadRequest(str(error)) from error


def _tokens(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in values
    ):
        raise BadRequest(f"{name} is not a list of token ids")
    return values


def _typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{name} is {value!r}, expected {kind.__name__}")
    if kind is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise BadRequest(f"{name} is out of range")  # thousands of digits cannot be printed
    return value


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise BadRequest(f"{name} is out of range") from None


# ---- answers --------------------------------------------------------------------------------


def usage(stats: RequestStats) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def envelope(call: Call, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
    """A response or a chunk of one around its choices."""
    kind = "text_completion"
    if call.chat:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
    return {
        "id": call.request.request_id,
        "object": kind,
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }


def chunk_choice(call: Call, delta: Delta) -> dict[str, Any]:
    """One sample's news in a stream."""
    choice: dict[str, Any] = {"index": delta.index, "finish_reason": delta.finish_reason}
    if call.chat:
        choice["delta"] = {"content": delta.text}
    else:
        choice["text"] = delta.text
    if call.debug:
        choice["radixkv"] = {"tokens": delta.tokens}
    return choice


def full_choices(call: Call, deltas: list[Delta]) -> list[dict[str, Any]]:
    """All samples of an answer that is not streamed, by index."""
    choices = []
    for index in sorted({delta.index for delta in deltas}):
        parts = [delta for delta in deltas if delta.index == index]
        text = "".join(part.text for part in parts)
        choice: dict[str, Any] = {"index": index, "finish_reason": parts[-1].finish_reason}
        if call.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if call.debug:
            tokens = [token for part in parts for token in part.tokens]
            choice["radixkv"] = {"tokens": tokens, "score": parts[-1].score}
        choices.append(choice)
    return choices


def debug_stats(stats: RequestStats) -> dict[str, Any]:
    """The `radixkv` object of a call that asked for it."""
    return asdict(stats)


def error_body(message: str, kind: str) -> dict[str, Any]:
    """An error as OpenAI clients expect it; a message that echoes a long input loses its middle."""
    if len(message) > MAX_ERROR_CHARS:
        kept = MAX_ERROR_CHARS // 2
        message = f"{message[: kept - 1]}…{message[-kept:]}"
    return {"error": {"message": message, "type": kind}}
