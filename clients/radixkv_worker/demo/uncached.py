"""Answers without any cache: jobs as JSON lines in a file, answers as JSON lines on stdout.

    python -m radixkv_worker.demo.uncached MODEL_DIRECTORY JOBS_FILE

A job has prompt, max_tokens, temperature, seed and n; an answer is a list of n token lists.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from radixkv_worker import weights
from radixkv_worker.model import Model
from radixkv_worker.reference import ContiguousCache
from radixkv_worker.request import SamplingParams
from radixkv_worker.sampling import Sampler


def answer(model: Model, job: Mapping[str, Any]) -> list[list[int]]:
    """All samples of one job, each computed on its own behind the prompt."""
    params = SamplingParams(
        max_tokens=job["max_tokens"], temperature=job["temperature"], seed=job["seed"], n=job["n"]
    )
    prompt_cache = ContiguousCache(model, len(job["prompt"]) + params.max_tokens)
    logits = prompt_cache.append(job["prompt"])
    answers = []
    for index in range(params.n):
        sampler, cache = Sampler(params, index), prompt_cache.copy()
        tokens = [sampler.choose(logits)]
        while len(tokens) < params.max_tokens and tokens[-1] not in model.config.eos_tokens:
            tokens.append(sampler.choose(cache.append(tokens[-1:])))
        answers.append(tokens)
    return answers


def main() -> None:
    """Answer the jobs of a file in order, one line each."""
    torch.set_num_threads(1)
    directory, jobs = sys.argv[1:]
    model = weights.load(directory).model
    with open(jobs) as lines:
        for line in lines:
            print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
