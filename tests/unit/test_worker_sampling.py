"""Choosing tokens, beam steps, text streams and HTTP bodies."""

import math

import pytest
import torch

from radixkv_worker import http_api
from radixkv_worker.request import BadRequest, Delta, SamplingParams
from radixkv_worker.sampling import Candidates, Sampler, beam_step, candidates
from radixkv_worker.tokenizer import BadMessages, BadText, TextStream, Tokenizer
from tests.worker_rig import tiny_tokenizer


def draws(params: SamplingParams, logits: torch.Tensor, count: int, index: int = 0) -> list[int]:
    sampler = Sampler(params, index)
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_takes_the_best() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -math.inf])
    assert draws(SamplingParams(temperature=0), logits, 3) == [1, 1, 1]


def test_a_tiny_temperature_is_greedy() -> None:
    for logits in (torch.tensor([0.0, 3.0, 2.9, -math.inf]), torch.randn(50) * 40):
        for top_p in (1.0, 0.5):
            params = SamplingParams(temperature=1e-310, top_p=top_p, seed=4)
            assert draws(params, logits, 5) == [int(logits.argmax())] * 5


def test_frequencies_follow_the_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    for temperature in (0.5, 1.0, 2.0):
        params = SamplingParams(temperature=temperature, seed=1)
        chosen = torch.tensor(draws(params, logits, 4000)).bincount(minlength=4) / 4000
        want = (logits / temperature).softmax(0)
        torch.testing.assert_close(chosen, want, atol=0.03, rtol=0)
        assert chosen[3] == 0


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in (
        (0.4, {0}),
        (0.5, {0}),
        (0.6, {0, 1}),
        (0.9, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
    ):
        assert set(draws(SamplingParams(top_p=top_p, seed=2), logits, 400)) == kept, top_p


def test_choices_depend_on_seed_and_index() -> None:
    logits = torch.zeros(1000)
    params = SamplingParams(seed=7)
    assert draws(params, logits, 9) == draws(params, logits, 9)
    assert draws(params, logits, 9) != draws(params, logits, 9, index=1)
    assert draws(params, logits, 9) != draws(SamplingParams(seed=8), logits, 9)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"n": 0},
        {"n": 17},
        {"n": 3, "beam_width": 2},
        {"beam_width": 17},
        {"seed": -1},
        {"stop": ("",)},
        {"stop": ("x",) * 9},
    ],
)
def test_parameters_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        SamplingParams(**change)


def test_beam_step_ranks_all_beams_together() -> None:
    first, second = Candidates((-0.1, -2.0), (10, 11)), Candidates((-0.2, -0.3), (12, 0))
    step = beam_step([-1.0, -1.5], [first, second], 2, stop_tokens={0})
    assert [(e.parent, e.token) for e in step.ended] == [(1, 0)]
    assert [(e.parent, e.token) for e in step.following] == [(0, 10), (1, 12)]
    assert step.following[0].total == pytest.approx(-1.1)
    assert candidates(torch.tensor([0.0, 1.0, 5.0]), 4).tokens == (2, 1, 0)


# ---- text -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_stream_holds_back_incomplete_characters(tokenizer: Tokenizer) -> None:
    text = "ä 日本 🎉!"
    stream = TextStream(tokenizer)
    parts = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == text
    assert "" in parts and not any("\ufffd" in part for part in parts)


def test_stream_gives_up_on_bytes_that_are_no_text(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("ä")[0]
    stream = TextStream(tokenizer)
    text = "".join(stream.push(token) for _ in range(40)) + stream.finish()
    assert set(text) == {"\ufffd"}


def test_stream_ends_at_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("END", "never"))
    seen = ""
    for token in tokenizer.encode("some ENtry, then END and more"):
        seen += stream.push(token)
        assert "END" not in seen
        if stream.stopped:
            break
    assert seen + stream.finish() == stream.text == "some ENtry, then "


def test_stream_copies_are_independent(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("zz",))
    for token in tokenizer.encode("az"):
        stream.push(token)
    twin = stream.copy()
    twin.push(tokenizer.encode("z")[0])
    stream.push(tokenizer.encode("b")[0])
    assert twin.stopped and twin.text == "a" and stream.text == "azb"


# ---- HTTP bodies ----------------------------------------------------------------------------


def parse(tokenizer: Tokenizer, body: object, chat: bool = False) -> http_api.Call:
    return http_api.parse(body, chat=chat, tokenizer=tokenizer, context=512, model="tiny")


def test_bodies_become_requests(tokenizer: Tokenizer) -> None:
    call = parse(tokenizer, {"prompt": "hi", "max_tokens": 3, "temperature": 0, "stop": "x"})
    assert call.request.prompt == tuple(tokenizer.encode("hi"))
    params = call.request.params
    assert (params.max_tokens, params.temperature, params.stop) == (3, 0.0, ("x",))
    assert not call.stream and not call.debug and call.model == "tiny"
    call = parse(
        tokenizer, {"prompt": [5, 6], "best_of": 3, "use_beam_search": True, "echo": False}
    )
    assert call.request.prompt == (5, 6) and call.request.params.beam_width == 3
    messages = [{"role": "user", "content": "hi"}]
    call = parse(
        tokenizer, {"messages": messages, "stream": True, "radixkv": {"debug": True}}, True
    )
    assert call.stream and call.debug and call.chat and call.request.params.max_tokens == 256
    assert tokenizer.decode(call.request.prompt) == "hi"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "not a JSON object"),
        ({}, "prompt is neither"),
        ({"prompt": ["a"]}, "prompt is not a list of token ids"),
        ({"prompt": [True]}, "prompt is not a list of token ids"),
        ({"prompt": "a", "promt": 1}, "unknown field 'promt'"),
        ({"prompt": "a", "messages": []}, "unknown field 'messages'"),
        ({"prompt": "a", "logprobs": 5}, "logprobs = 5 is not supported"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens is '5'"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0 is below 1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "a", "n": True}, "n is True"),
        ({"prompt": "a", "best_of": 2}, "needs use_beam_search"),
        ({"prompt": "a", "use_beam_search": True, "stream": True}, "cannot be streamed"),
        ({"prompt": "a", "stop": [1]}, "stop is neither"),
        ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids is not"),
        ({"prompt": "a", "radixkv": {"debugg": True}}, "debugg"),
    ],
)
def test_bad_bodies_are_refused_by_name(tokenizer: Tokenizer, body: object, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse(tokenizer, body)


@pytest.mark.parametrize(
    "messages", [None, [], ["hi"], [{"role": "user"}], [{"role": "user", "content": 5}]]
)
def test_bad_messages_are_refused(tokenizer: Tokenizer, messages: object) -> None:
    with pytest.raises(BadRequest, match="message"):
        parse(tokenizer, {"messages": messages}, chat=True)


def test_a_prompt_that_no_context_takes_is_not_encoded(tokenizer: Tokenizer) -> None:
    longest = len("<|assistant|>")
    assert tokenizer.encode("<|assistant|>" * 9, context=9) == [3] * 9
    with pytest.raises(BadText, match=f"{9 * longest + 1} characters"):
        tokenizer.encode("<|assistant|>" * 9 + "x", context=9)
    with pytest.raises(BadText):
        tokenizer.encode_chat([{"role": "user", "content": "x" * 200}], context=9)


def test_errors_do_not_echo_long_input() -> None:
    message = http_api.error_body("n is " + "x" * 5_000_000 + "!", "kind")["error"]["message"]
    assert len(message) == http_api.MAX_ERROR_CHARS
    assert message.startswith("n is x") and "x…x" in message and message.endswith("x!")
    assert http_api.error_body("short", "kind")["error"]["message"] == "short"


def test_template_errors_are_the_callers(tokenizer: Tokenizer) -> None:
    fussy = Tokenizer(tokenizer._tokenizer, "{{ raise_exception('no system role') }}", {})
    with pytest.raises(BadMessages, match="no system role"):
        fussy.encode_chat([{"role": "system", "content": ""}])
    with pytest.raises(BadMessages, match="no chat template"):
        Tokenizer(tokenizer._tokenizer, None, {}).encode_chat([{"role": "user", "content": ""}])


def test_answers_gather_each_sample(tokenizer: Tokenizer) -> None:
    call = parse(tokenizer, {"prompt": "a", "n": 2, "radixkv": {"debug": True}})
    deltas = [Delta(0, (5,), "x"), Delta(1, (6,), "y"), Delta(0, (7,), "z", "stop")]
    first, second = http_api.full_choices(call, [*deltas, Delta(1, (8,), "", "length")])
    assert (first["text"], first["finish_reason"]) == ("xz", "stop")
    assert first["radixkv"]["tokens"] == [5, 7]
    assert (second["text"], second["finish_reason"]) == ("y", "length")
