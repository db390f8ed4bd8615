"""gRPC settings, against real servers and channels."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv.wire import channel
from radixkv.wire.limits import MAX_MESSAGE_BYTES

SERVING = health_pb2.HealthCheckResponse.SERVING


class BigHealth(health_pb2_grpc.HealthServicer):
    """Answers any request; health's messages carry a string, so their size can be chosen."""

    def Check(self, request, context):
        return health_pb2.HealthCheckResponse(status=SERVING)


@pytest.fixture
def serve(request):
    def start(address: str) -> int:
        server = grpc.server(ThreadPoolExecutor(1), options=channel.server_options())
        health_pb2_grpc.add_HealthServicer_to_server(BigHealth(), server)
        port = server.add_insecure_port(address)
        server.start()
        request.addfinalizer(lambda: server.stop(0).wait())
        return port

    return start


def test_messages_of_nearly_the_maximum_pass_both_ends(serve, tmp_path):
    serve(f"unix:{tmp_path}/s")
    with grpc.insecure_channel(f"unix:{tmp_path}/s", options=channel.client_options()) as client:
        stub = health_pb2_grpc.HealthStub(client)
        large = health_pb2.HealthCheckRequest(service="x" * (MAX_MESSAGE_BYTES - 100))
        assert stub.Check(large, timeout=20).status == SERVING
        too_large = health_pb2.HealthCheckRequest(service="x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(too_large, timeout=20)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_second_server_on_the_same_port_fails(serve):
    port = serve("127.0.0.1:0")
    with pytest.raises(RuntimeError, match="bind"):
        serve(f"127.0.0.1:{port}")


def test_a_proxy_in_the_environment_is_not_asked(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = serve("127.0.0.1:0")
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel.client_options()) as client:
        stub = health_pb2_grpc.HealthStub(client)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status == SERVING


def test_missing_environment_names_what_is_not_set():
    assert channel.missing_environment({}) == channel.PROCESS_ENVIRONMENT
    assert channel.missing_environment(dict(channel.PROCESS_ENVIRONMENT)) == {}
    chosen = {"MALLOC_TRIM_THRESHOLD_": "1"}
    assert "MALLOC_TRIM_THRESHOLD_" not in channel.missing_environment(chosen)
