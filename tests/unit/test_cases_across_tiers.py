"""Cases A2, A3, A5, B6 and E4 (i) across tiers: identity and holes, wherever a block lies."""

import pytest

from radixkv.core.namespace import namespace_key
from radixkv.core.results import ContentRange
from tests.tier_places import CPU, GPU, NVME
from tests.tier_rig import NAMESPACE, TierRig
from tests.unit.test_cases_c import END, B, hit, new_rig, push_out, text

PLACES = [dict(cpu_blocks=16), dict(nvme_blocks=16), dict(remote=True)]


# ---- A2: adapter identity -----------------------------------------------------------------


def adapter(name: str = "", version: str = "") -> bytes:
    """A namespace that differs in the adapter only."""
    return namespace_key(model="model", kv_spec=b"spec", adapter=name, adapter_version=version)


@pytest.mark.parametrize("below", PLACES)
def test_a2_adapters_are_kept_apart_in_every_place(below: dict[str, object]) -> None:
    rig = new_rig(8, **below)
    tokens = text(4)
    mine = adapter("x", "1")
    rig.cache_prompt(1, tokens, namespace=mine)
    push_out(rig)
    for other in (adapter(), adapter("x", "2"), adapter("y", "1")):
        assert rig.lookup(tokens + END, other) == 0
        assert hit(rig, tokens, namespace=other) == 0
    assert hit(rig, tokens, namespace=mine) == 4


def test_a2_adapters_are_kept_apart_after_a_restart() -> None:
    rig = new_rig(8, nvme_blocks=16)
    tokens = text(4)
    rig.cache_prompt(1, tokens, namespace=adapter("x", "1"))
    rig.finish_all()
    assert rig.crash() == 4
    rig.open(1)
    for other in (adapter(), adapter("x", "2"), adapter("y", "1")):
        assert hit(rig, tokens, namespace=other) == 0
    assert hit(rig, tokens, namespace=adapter("x", "1")) == 4


# ---- A3: multimodal placeholders ----------------------------------------------------------

IMAGE = 500
PROMPT = [1, 2, 3, 4] + [IMAGE] * 4 + [5, 6]


def picture(content_id: bytes, start: int = 4) -> tuple[ContentRange, ...]:
    """A picture of four tokens."""
    return (ContentRange(start, 4, content_id),)


@pytest.mark.parametrize("below", PLACES)
@pytest.mark.parametrize("restart", [False, True])
def test_a3_pictures_are_not_confused_in_any_place(below: dict[str, object], restart: bool) -> None:
    rig = new_rig(8, **below)
    options = dict(placeholder_tokens=frozenset({IMAGE}))
    rig.cache_prompt(1, PROMPT, contents=picture(b"aaa"), **options)
    push_out(rig)
    if restart:
        rig.crash()
        rig.open(1)
        rig.open(2)
    text_only = 0 if restart and "cpu_blocks" in below else 2
    whole = 5 if "nvme_blocks" in below or not restart and "cpu_blocks" in below else text_only
    assert hit(rig, PROMPT, contents=picture(b"bbb"), **options) == text_only
    shifted = [1, 2, 3, 4] * 2 + [IMAGE] * 4
    assert hit(rig, shifted, contents=picture(b"aaa", 8), **options) == text_only
    assert hit(rig, PROMPT, **options) <= 2, "without its id nothing behind the text"
    assert hit(rig, PROMPT, contents=picture(b"aaa"), **options) == whole


# ---- A5: a hole in the prefix -------------------------------------------------------------

SEVEN = text(7)


def spread() -> TierRig:
    """Seven blocks: three on gpu, the next two best on cpu, the last two on nvme only."""
    rig = new_rig(16, cpu_blocks=8, nvme_blocks=16)
    rig.cache_prompt(1, SEVEN)
    push_out(rig)
    rig.cache_prompt(1, text(3, start=900))  # takes the place of two on cpu
    rig.finish_all()
    rig.release(rig.lease(1, SEVEN[: 3 * B] + END))
    assert rig.on_gpu(NAMESPACE, SEVEN) == 3 and rig.lookup(SEVEN + END) == 7 * B
    return rig


def remove(rig: TierRig, index: int) -> None:
    """Spoil one block wherever it lies below the gpu."""
    content = rig.truth.chain(NAMESPACE, SEVEN)[index].content
    for block, found in list(rig.places.cpu.items()):
        if found.content == content:
            rig.places.flip(CPU, block)
    for slot, record in list(rig.places.nvme.items()):
        if record.content == content:
            rig.places.lose(NVME, slot)


def test_a5_seven_blocks_of_three_places() -> None:
    rig = spread()
    lease = rig.acquire(1, SEVEN + END)
    loads = rig.traffic.pending(target=GPU)
    assert [(op.source, len(op.source_ids)) for op in loads] == [(CPU, 2), (NVME, 2)]
    rig.quiesce()
    assert rig.answer(lease).published == 7 * B


@pytest.mark.parametrize("index", range(7))
def test_a5_i_ii_nothing_counts_behind_a_removed_block(index: int) -> None:
    rig = spread()
    rig.invalidate(prefix=SEVEN[: index * B + 1])
    assert rig.lookup(SEVEN + END) == index * B
    assert hit(rig, SEVEN) == index
    rig.cache_prompt(1, SEVEN)
    push_out(rig)
    assert hit(rig, SEVEN) == 7


@pytest.mark.parametrize("index", [3, 4, 5, 6])
def test_a5_iii_a_block_goes_bad_between_lookup_and_acquire(index: int) -> None:
    rig = spread()
    assert rig.lookup(SEVEN + END) == 7 * B
    remove(rig, index)
    assert hit(rig, SEVEN) == index, "not what lies behind it"
    rig.quiesce()
    assert rig.books().leased == rig.books().in_flight == 0
    rig.cache_prompt(1, SEVEN)
    push_out(rig)
    assert hit(rig, SEVEN) == 7


# ---- B6: eviction takes the tail ----------------------------------------------------------


@pytest.mark.parametrize("below", [dict(cpu_blocks=8), dict(nvme_blocks=8)])
@pytest.mark.parametrize("chunk", [2, 8])
def test_b6_lower_places_lose_the_tail_first(below: dict[str, int], chunk: int) -> None:
    rig = new_rig(16, **below)
    p = text(8)
    lease = rig.lease(1, p)
    for end in range(chunk, 9, chunk):
        rig.compute(lease, end * B)
        rig.commit(lease)
    rig.release(lease)
    push_out(rig)
    rig.cache_prompt(1, text(3, start=300))
    push_out(rig)
    assert rig.lookup(p + END) == 5 * B
    assert rig.lookup(text(3, start=300) + END) == 3 * B
    if "nvme_blocks" in below:
        assert rig.crash() == 8
        assert rig.lookup(p + END) == 5 * B


# ---- E4 (i): scales travel with their block -----------------------------------------------


def test_e4_i_blocks_come_back_whole_into_other_ids() -> None:
    """Values and scales are one run of bytes to the core: a fingerprint per position here."""
    rig = new_rig(16, cpu_blocks=8, nvme_blocks=8)
    p = text(5)
    lease = rig.compute(rig.lease(1, p))
    rig.commit(lease)
    before = set(lease.table)
    rig.release(lease)
    rig.finish_all()
    rig.crash()
    rig.open(1)
    rig.open(2)
    blocker = rig.compute(rig.lease(2, text(8, start=700)))  # other bytes, under a lease
    again = rig.lease(1, p + END)
    assert again.published == 5 * B and not set(again.table) & set(blocker.table)
    rig.release(blocker)
    moved = rig.lease(2, p + [8])
    assert moved.table[:5] == again.table[:5] and set(again.table[:5]) != before
