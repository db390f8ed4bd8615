"""Client of radixkv-server: leases on cached prefixes, in a pool of KV blocks mapped zero-copy.

    client = Client.connect(model="…", kv_spec=KVSpec(…))
    with client.acquire(tokens) as lease:
        …                                   # compute what is behind lease.cached_tokens
        lease.commit(len(tokens))

Importing this imports neither torch nor numpy nor grpc.
"""

from radixkv_client.aio import AsyncClient, AsyncLease
from radixkv_client.client import Client
from radixkv_client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RadixKVError,
    TooLarge,
    Unavailable,
    Unimplemented,
    WrongProcess,
)
from radixkv_client.pool import PoolMapping
from radixkv_client.spec import KVSpec
from radixkv_client.sync_lease import Lease, Pending
from radixkv_client.values import Committed, ContentRange, Miss, Onboarding, Retention, Scope

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncLease",
    "Cancelled",
    "Client",
    "Committed",
    "ContentRange",
    "DeadlineExceeded",
    "Exhausted",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "KVSpec",
    "Lease",
    "Miss",
    "NotFound",
    "Onboarding",
    "Pending",
    "PermissionDenied",
    "PoolMapping",
    "RadixKVError",
    "Retention",
    "Scope",
    "TooLarge",
    "Unavailable",
    "Unimplemented",
    "WrongProcess",
]
