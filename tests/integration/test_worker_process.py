"""radixkv-worker as a process: HTTP, streaming, crashes, bad options, and the real model."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv_worker import cli, http_api, reference, weights
from radixkv_worker.demo.processes import Child
from radixkv_worker.weights import LoadedModel
from tests.server_process import ServerProcess
from tests.worker_rig import Worker, random_prompt, tiny_directory, tiny_model

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    torch.set_num_threads(1)
    return tiny_model()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--check-invariants", gpu_blocks=400) as process:
        yield process


class WorkerProcess:
    """A radixkv-worker with its HTTP address."""

    def __init__(self, server: ServerProcess, model: Path | str, *options: str) -> None:
        arguments = ["--model", str(model), "--socket-dir", str(server.socket_dir), *options]
        name = f"worker-{time.monotonic_ns()}"
        self.child = Child(name, server.directory, "radixkv_worker.cli", arguments)

    def __enter__(self) -> "WorkerProcess":
        try:
            self.url = self.child.wait_ready()["http"]
        except BaseException:
            self.child.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.child.stop()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> Any:
        """The answer of a POST, read when it is iterated or loaded."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def complete(self, prompt: tuple[int, ...] | str, **fields: Any) -> Any:
        debug = {"radixkv": {"debug": True}}
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **debug, **fields}
        with self.post("/v1/completions", body) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def worker(server: ServerProcess, model_directory: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(server, model_directory) as process:
        yield process


def test_completions(worker: WorkerProcess, tiny: LoadedModel) -> None:
    prompt = random_prompt(60, seed=1)
    for cached in (0, 48):
        answer = worker.complete(prompt, max_tokens=9)
        choice = answer["choices"][0]
        assert choice["radixkv"]["tokens"] == reference.greedy(tiny.model, prompt, 9)
        assert choice["text"] == tiny.tokenizer.decode(choice["radixkv"]["tokens"])
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 60,
            "completion_tokens": 9,
            "total_tokens": 69,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        stats = answer["radixkv"]
        assert stats["ttft_ms"] > 0 and len(stats["block_ids"]) == 4
    assert "radixkv" not in worker.complete("hi", radixkv=None)["choices"][0]


def test_samples_beams_and_chat(worker: WorkerProcess, tiny: LoadedModel) -> None:
    answer = worker.complete("hello", n=3, temperature=1, seed=5, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    answer = worker.complete("hello", use_beam_search=True, best_of=3, n=2, max_tokens=6)
    want = reference.beam_search(tiny.model, tiny.tokenizer.encode("hello"), 6, 3, ())
    assert [c["radixkv"]["tokens"] for c in answer["choices"]] == [t for _, t in want[:2]]
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    with worker.post("/v1/chat/completions", body) as answer:
        answer = json.load(answer)
    assert answer["object"] == "chat.completion"
    tokens = reference.greedy(tiny.model, tiny.tokenizer.encode_chat(messages), 5)
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": tiny.tokenizer.decode(tokens)}


def stream(worker: WorkerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with worker.post(path, {**body, "stream": True}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        lines = [line.decode().strip() for line in answer]
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(chunk) for chunk in data]


def test_streaming(worker: WorkerProcess) -> None:
    body = {"prompt": "stream this", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = worker.complete("stream this", max_tokens=12)
    chunks = stream(worker, "/v1/completions", body)
    assert len(chunks) == 13 and chunks[-1]["usage"]["completion_tokens"] == 12
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 11 + ["length"]
    messages = [{"role": "user", "content": "stream this"}]
    body = {"messages": messages, "max_tokens": 4, "n": 2, "seed": 1}
    chunks = stream(worker, "/v1/chat/completions", body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == {0, 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", {"prompt": "a", "tempreture": 0}, 400, "tempreture"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": [999]}, 400, "outside"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "the model takes 4096"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/nothing", {}, 404, ""),
        ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400, "not JSON"),
        ("/v1/completions", b"[" * 200_000, 400, "not JSON"),
        ("/v1/completions", b'{"prompt":"a","n":' + b"9" * 5000 + b"}", 400, "not JSON"),
        ("/v1/completions", b'{"prompt":"a","max_tokens":' + b"9" * 4300 + b"}", 400, "range"),
        ("/v1/completions", b'{"prompt":"a","top_p":' + b"9" * 400 + b"}", 400, "range"),
        ("/v1/completions", b'{"prompt":"a","temperature":NaN}', 400, "temperature"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "Unicode"),
        ("/v1/completions", {"prompt": [2**70]}, 400, "outside"),
        ("/v1/completions", {"prompt": "ab c" * 1_000_000}, 400, "4000000 characters"),
        ("/v1/completions", {"prompt": "a", "n": "x" * 1_000_000}, 400, "expected int"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "\ud800"}]},
            400,
            "Unicode",
        ),
    ],
)
def test_http_errors(
    worker: WorkerProcess, path: str, body: object, status: int, message: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        worker.post(path, body)
    assert caught.value.code == status
    text = caught.value.read().decode()
    if message:
        told = json.loads(text)["error"]["message"]
        assert message in told and len(told) <= http_api.MAX_ERROR_CHARS


def test_an_unknown_charset_is_the_callers_error(worker: WorkerProcess) -> None:
    for charset, status in (("foo", 400), ("hex", 400), ("utf-16", 200)):
        data = json.dumps({"prompt": "a", "max_tokens": 1}).encode("utf-16")
        kind = {"Content-Type": f"application/json; charset={charset}"}
        request = urllib.request.Request(worker.url + "/v1/completions", data, kind)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                assert answer.status == status
        except urllib.error.HTTPError as refused:
            assert refused.code == status, charset


def test_health_stats_and_models(worker: WorkerProcess, model_directory: Path) -> None:
    worker.complete("counted")
    assert worker.get("/healthz") == {"status": "ok", "connected": True}
    stats = worker.get("/stats")
    assert stats["num_running"] == 0 and stats["computed_tokens"] > 0
    assert stats["recent"][-1]["prompt_tokens"] == 7 and stats["recent"][-1]["ttft_ms"] > 0
    assert worker.get("/v1/models")["data"][0]["id"] == str(model_directory)


def test_caller_that_leaves_costs_no_blocks(worker: WorkerProcess) -> None:
    body = {"prompt": "a long story", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    for streamed in (True, False):
        answer = socket.create_connection(worker.url.removeprefix("http://").split(":"))
        data = json.dumps({**body, "stream": streamed}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        answer.sendall(head.encode() + data)
        wait_until(lambda: worker.get("/stats")["num_running"] == 1)
        answer.close()
        wait_until(lambda: worker.get("/stats")["num_running"] == 0)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_byte_changed_through_one_mapping_shows_in_another(
    server: ServerProcess, worker: WorkerProcess, tiny: LoadedModel
) -> None:
    with Worker(server.socket_dir, tiny) as here:
        client = here.engine.client
        with client.acquire([1] * 16) as lease:
            block_id = lease.block_table[0]
            digests = []
            for _ in range(2):
                client.pool.as_numpy()[block_id, -1] ^= 1
                digests.append(worker.get(f"/debug/blocks/{block_id}")["xxh3"])
            client.pool.as_numpy()[block_id, -1] ^= 1
            digests.append(worker.get(f"/debug/blocks/{block_id}")["xxh3"])
    assert digests[0] == digests[2] != digests[1]
    for bad in (0, 401, "9" * 5000):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            worker.get(f"/debug/blocks/{bad}")


def test_worker_killed_loses_nothing_but_its_own_work(
    server: ServerProcess, tiny: LoadedModel, model_directory: Path
) -> None:
    prompt = random_prompt(200, seed=40)
    with Worker(server.socket_dir, tiny) as survivor:
        beside = survivor.submit(random_prompt(70, seed=41), max_tokens=300)
        with WorkerProcess(server, model_directory) as victim:
            body = {"prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": True}
            with victim.post("/v1/completions", {**body, "temperature": 0}) as answer:
                for _ in range(20):
                    answer.readline()
                victim.child.process.kill()
                victim.child.process.wait(TIMEOUT_S)
        result = survivor.run(prompt, max_tokens=12)
        assert result.tokens() == reference.greedy(tiny.model, prompt, 12)
        assert result.stats.cached_tokens == 192
        want = reference.greedy(tiny.model, random_prompt(70, seed=41), 300)
        assert beside.wait().tokens() == want
        client = survivor.engine.client
        wait_until(lambda: client.stats().num_leases == 0)
        books = client.stats().books
        assert books.leased == books.in_flight == 0


def test_bad_options_end_the_worker_before_it_serves(
    server: ServerProcess,
    worker: WorkerProcess,
    model_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ("--model", str(model_directory))
    here = ("--socket-dir", str(server.socket_dir))
    port = worker.url.rsplit(":", 1)[1]
    for options, message in (
        ((*model, *here, "--listen", "0.0.0.0:80"), "not a loopback address"),
        ((*model, *here, "--modle", "x"), "unrecognized arguments: --modle"),
        ((*model, *here, "--token-budget", "0"), "0 is not positive"),
        (("--model", str(tmp_path), *here), "has no config.json"),
        ((*model, "--socket-dir", str(tmp_path)), str(tmp_path)),
        ((*model, *here, "--block-size", "32"), "block_size"),
        ((*model, *here, "--listen", f"127.0.0.1:{port}"), f"--listen 127.0.0.1:{port}"),
    ):
        try:
            code = cli.main(options)
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert code in (1, 2) and not printed.out, options
        assert message in printed.err, options


def test_smollm2_answers_from_the_shared_pool() -> None:
    torch.set_num_threads(1)
    loaded = weights.load(weights.SMOLLM2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tuple(loaded.tokenizer.encode_chat(messages))
    with ServerProcess(gpu_blocks=16) as server:
        texts, cached = [], []
        for transport in ("local", "grpc"):
            with Worker(server.socket_dir, loaded, transport=transport) as worker:
                result = worker.run(prompt, max_tokens=12, ignore_eos=False)
                texts.append(result.text())
                cached.append(result.stats.cached_tokens)
                assert result.deltas[-1].finish_reason == "stop"
    assert texts == ["The capital of France is Paris."] * 2
    assert cached == [0, (len(prompt) - 1) // 16 * 16]
