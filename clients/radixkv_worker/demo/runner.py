"""Sends the workload to the two workers and keeps what came back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from radixkv_worker.demo.workload import ANSWER_TOKENS, WAVES, Ask, first_prompt, next_prompt
from radixkv_worker.tokenizer import Tokenizer

MAX_REQUEST_S = 600.0  # on a busy machine
SEED = 1


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, its prompt, the tokens of each sample, and the worker's statistics of it."""

    ask: Ask
    wave: int
    prompt: list[int]
    samples: list[list[int]]
    text: str
    stats: dict[str, Any]

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the request's arrival at the worker to its first token."""
        return float(self.stats["ttft_ms"])


class Workers:
    """HTTP to the workers, by number."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        timeout = aiohttp.ClientTimeout(total=MAX_REQUEST_S)
        self._http = aiohttp.ClientSession(timeout=timeout, raise_for_status=True)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def complete(self, worker: int, body: dict[str, Any]) -> dict[str, Any]:
        """POST /v1/completions with debugging on."""
        body = {**body, "radixkv": {"debug": True}}
        async with self._http.post(f"{self.urls[worker]}/v1/completions", json=body) as answer:
            return dict(await answer.json())

    async def digest(self, worker: int, block_id: int) -> str:
        """Digest of a block as the worker's own mapping shows it."""
        async with self._http.get(f"{self.urls[worker]}/debug/blocks/{block_id}") as answer:
            return str((await answer.json())["xxh3"])

    async def ask(self, ask: Ask, wave: int, prompt: list[int]) -> Answered:
        """One request of the workload."""
        body = {
            "prompt": prompt, "max_tokens": ANSWER_TOKENS, "n": ask.n,
            "temperature": ask.temperature, "seed": SEED,
        }  # fmt: skip
        answer = await self.complete(ask.worker, body)
        samples = [choice["radixkv"]["tokens"] for choice in answer["choices"]]
        text = answer["choices"][0]["text"]
        return Answered(ask, wave, prompt, samples, text, answer["radixkv"])


async def run_waves(
    workers: Workers, tokenizer: Tokenizer, end_token: int, say: Callable[[str], None]
) -> list[Answered]:
    """The whole workload; `say` shows progress. Returns answers in the order of their waves."""
    answered: dict[str, Answered] = {}
    total = sum(map(len, WAVES))
    started = time.monotonic()
    for number, wave in enumerate(WAVES):
        jobs = []
        for ask in wave:
            if ask.follows:
                before = answered[ask.follows]
                prompt = next_prompt(tokenizer, before.prompt + before.samples[0], ask, end_token)
            else:
                prompt = first_prompt(tokenizer, ask)
            jobs.append(asyncio.create_task(workers.ask(ask, number, prompt)))
        for job in asyncio.as_completed(jobs):
            result = await job
            answered[result.ask.name] = result
            say(
                f"[{len(answered):2}/{total}] {time.monotonic() - started:5.1f} s  "
                f"worker {result.ask.worker + 1}  {result.ask.name:<11} "
                f"{result.stats['cached_tokens']:4} of {len(result.prompt):4} cached  "
                f"TTFT {result.ttft_ms / 1e3:5.2f} s  {' '.join(result.text.split())[:40]}"
            )
    return list(answered.values())
