"""What the demo asks: a RAG and agent workload over one system prompt and a few documents.

Requests come in waves: those of one wave are sent at once, the next wave when all are answered.
A follow-up continues an earlier request's conversation, token by token what was generated.
"""

import random
from dataclasses import dataclass

from radixkv_worker.tokenizer import Tokenizer

ANSWER_TOKENS = 16
LONG_TOKENS = 2_048
SYSTEM = (
    "You answer questions of warehouse staff about the inventory below. Use only what the list "
    "says. Name bay, weight and inspector when you are asked about an item. If the list does not "
    "have an item, say so in one sentence. Answer in one short sentence and do not explain."
)
_GOODS = ("copper wire", "oak planks", "glass jars", "steel bolts", "wool cloth", "paper", "tea")
_PEOPLE = ("Mara", "Jonas", "Ilse", "Piet", "Anders", "Nadia", "Tomas", "Freya")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `topic` is the prefix it shares with others of the same topic; `follows` names
    the request whose conversation it continues."""

    name: str
    worker: int
    topic: str
    question: str
    follows: str = ""
    n: int = 1
    temperature: float = 0.0


def document(topic: str) -> str:
    """An inventory of its own for each topic."""
    chance = random.Random(topic)
    lines = [f"Inventory of {topic}:"]
    for number in range(1, 17):
        lines.append(
            f"Item {number}: {chance.randint(2, 90)} crates of {chance.choice(_GOODS)} in bay "
            f"{chance.choice('ABCDEF')}{chance.randint(1, 40)}, {chance.randint(50, 900)} kg, "
            f"inspected by {chance.choice(_PEOPLE)}."
        )
    return "\n".join(lines)


WAVES: tuple[tuple[Ask, ...], ...] = (
    (Ask("harbour-1", 0, "harbour", "Where is item 3?"),),
    (
        Ask("mill-1", 0, "mill", "How heavy is item 7?"),
        Ask("depot-1", 1, "depot", "Who inspected item 2?"),
    ),
    (
        Ask("harbour-2", 0, "harbour", "What is item 12?"),
        Ask("depot-2", 1, "depot", "Where is item 9?"),
    ),
    (
        Ask("depot-3", 0, "depot", "How heavy is item 5?"),
        Ask("harbour-3", 1, "harbour", "Who inspected item 8?"),
    ),
    (
        Ask("mill-2", 0, "mill", "Where is item 1?"),
        Ask("mill-3", 1, "mill", "What is item 14?"),
    ),
    (
        Ask("harbour-1b", 0, "harbour", "And item 4?", follows="harbour-1"),
        Ask("depot-1b", 1, "depot", "And item 6?", follows="depot-1"),
    ),
    (
        Ask("depot-1c", 0, "depot", "And item 11?", follows="depot-1b"),
        Ask("harbour-1c", 1, "harbour", "And item 10?", follows="harbour-1b"),
    ),
    (
        Ask("mill-4", 0, "mill", "Describe item 2.", n=4, temperature=0.8),
        Ask("harbour-4", 1, "harbour", "Describe item 16.", n=3, temperature=0.8),
    ),
)


def first_prompt(tokenizer: Tokenizer, ask: Ask) -> list[int]:
    """System prompt, document and question."""
    return tokenizer.encode_chat(
        [
            {"role": "system", "content": f"{SYSTEM}\n\n{document(ask.topic)}"},
            {"role": "user", "content": ask.question},
        ]
    )


def next_prompt(tokenizer: Tokenizer, before: list[int], ask: Ask, end_token: int) -> list[int]:
    """`before` (prompt and answer of the turn it follows), then the question (ChatML)."""
    turn = f"\n<|im_start|>user\n{ask.question}<|im_end|>\n<|im_start|>assistant\n"
    end = [] if before[-1] == end_token else [end_token]
    return before + end + tokenizer.encode(turn, special=False)


def long_prompt(tokenizer: Tokenizer) -> list[int]:
    """LONG_TOKENS tokens that share nothing with the rest."""
    text = "".join(document(f"warehouse {number}") + "\n" for number in range(12))
    tokens = tokenizer.encode(text)
    assert len(tokens) >= LONG_TOKENS, "the text is too short"
    return tokens[:LONG_TOKENS]
