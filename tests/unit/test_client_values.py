"""Tokens, KVSpec, errors, the reserve, and what importing the client costs."""

import subprocess
import sys
from array import array
from typing import Any

import numpy
import pytest

from radixkv import __version__
from radixkv.v1 import session_pb2 as pb
from radixkv_client import errors
from radixkv_client.attach import CLIENT_VERSION
from radixkv_client.errors import InvalidArgument
from radixkv_client.reserve import Reserve
from radixkv_client.spec import KVSpec
from radixkv_client.tokens import token_bytes

IDS = [0, 1, 70_000, 2**31 - 1]
ENCODED = array("i", IDS).tobytes()


def torch_ids() -> Any:
    return pytest.importorskip("torch").tensor(IDS)


@pytest.mark.parametrize(
    "form",
    [
        lambda: IDS,
        lambda: tuple(IDS),
        lambda: ENCODED,
        lambda: bytearray(ENCODED),
        lambda: array("i", IDS),
        lambda: array("q", IDS),
        lambda: numpy.array(IDS),
        lambda: numpy.array(IDS, dtype=numpy.int32),
        lambda: numpy.array(IDS, dtype=numpy.uint32),
        lambda: numpy.array([IDS, IDS]).T[:, 0],
        lambda: [numpy.int64(token) for token in IDS],
        torch_ids,
    ],
)
def test_every_form_of_tokens_gives_the_same_bytes(form: Any):
    assert token_bytes(form()) == ENCODED


@pytest.mark.parametrize(
    "bad",
    [
        [True], [1, True], [1.0], [1, 2.0], ["1"], "1", [None], [-1], [2**31], [2**61], [-2],
        b"123", array("d", [1.0]), array("q", [2**31]), array("h", [-1]),
        numpy.array([True]), numpy.array([1.0]), numpy.array([2**61]), numpy.array([[1]]),
        numpy.array([-1]), [numpy.bool_(True)], [numpy.float32(1)],
    ],
    ids=repr,
)  # fmt: skip
def test_a1_iii_what_is_no_token_id_is_refused(bad: Any):
    with pytest.raises(InvalidArgument, match="tokens"):
        token_bytes(bad)


def test_bool_tensors_are_refused():
    torch = pytest.importorskip("torch")
    for bad in (torch.tensor([True]), torch.tensor([1.0]), torch.tensor([[1]])):
        with pytest.raises(InvalidArgument):
            token_bytes(bad)


def test_block_bytes_counts_keys_values_and_scales():
    spec = KVSpec(30, 3, 64, 64, "bfloat16", scale_bytes=8)
    assert spec.block_bytes == 30 * 3 * 16 * 128 * 2 + 8
    assert spec.to_proto().block_bytes == spec.block_bytes
    assert KVSpec(2, 1, 576, 0, "float16").block_bytes == 2 * 16 * 576 * 2


def test_a_spec_is_read_back_from_its_message():
    spec = KVSpec(30, 3, 64, 64, "bfloat16", scale_bytes=8, backend="x")
    message = spec.to_proto()
    assert KVSpec.from_proto(message) == spec
    message.block_bytes += 1
    with pytest.raises(InvalidArgument, match="block_bytes"):
        KVSpec.from_proto(message)
    with pytest.raises(InvalidArgument):
        KVSpec.from_proto(pb.KVSpec())


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float8"), ("num_layers", 0), ("block_size", -1), ("value_head_dim", -1)],
)
def test_a_spec_names_the_field_that_is_wrong(field: str, value: Any):
    good = dict(num_layers=1, num_kv_heads=1, head_dim=8, value_head_dim=8, dtype="float32")
    with pytest.raises(InvalidArgument, match=field):
        KVSpec(**(good | {field: value}))


def test_a_spec_from_a_hugging_face_config():
    config = {
        "model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "hidden_size": 576, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert KVSpec.from_hf_config(config) == KVSpec(30, 3, 64, 64, "bfloat16")
    assert KVSpec.from_hf_config({"text_config": config}, dtype="float32").dtype == "float32"
    latent = config | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert KVSpec.from_hf_config(latent) == KVSpec(30, 1, 576, 0, "bfloat16")
    for change, name in [
        ({"model_type": "mamba2"}, "mamba2"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"torch_dtype": None}, "dtype"),
    ]:
        with pytest.raises(InvalidArgument, match=name):
            KVSpec.from_hf_config(config | change)


def test_every_code_of_the_wire_has_its_error():
    for name, _ in pb.Code.items():
        if name != "OK":
            error = errors.error_named(name, "why")
            assert error.code == name and str(error) == "why"
    assert isinstance(errors.error_named("NEW", "why"), errors.Internal)
    assert errors.Exhausted.retryable and not errors.TooLarge.retryable


def test_the_reserve_counts_drawn_blocks_until_they_are_named():
    reserve = Reserve(16)
    assert reserve.refill_size(1) == 4 and reserve.refill_size(9) == 9
    assert reserve.add(array("i", range(1, 13))) == 12
    drawn = reserve.draw(10)
    assert (reserve.num_free, reserve.num_drawn) == (2, 10)
    assert reserve.refill_size(6) == 4 and reserve.refill_size(7) == 0
    reserve.named(4)
    reserve.put_back(drawn[4:])
    assert (reserve.num_free, reserve.num_drawn) == (8, 0)
    assert len(reserve.withdraw(20)) == 8


def test_the_client_tells_this_projects_version():
    assert f"radixkv-client {__version__}" == CLIENT_VERSION


def test_importing_the_client_is_light():
    code = (
        "import sys, radixkv_client\n"
        "heavy = [m for m in ('torch', 'numpy', 'grpc', 'uvloop') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
