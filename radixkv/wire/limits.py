"""Named maxima of the protocol. The server announces its own in `HelloReply.limits`; these bound
what either end ever accepts."""

PROTOCOL_VERSION = 1

# Messages. 2,097,152 tokens are 8 MiB, and a Commit of so many may come with as large a table.
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_HELLO_BYTES = 64 * 2**10  # of the first message on an attach connection
MAX_TOKENS = 2_097_152  # of one sequence
MAX_OPS_PER_STEP = 1024
MAX_UNACKNOWLEDGED_STEPS = 8  # Steps whose replies the client has not yet acknowledged
MAX_BLOCKS_PER_OP = 262_144  # named or asked for by one operation
MAX_CHILDREN_PER_FORK = 256

# Sessions.
MAX_SESSIONS = 1024
MAX_PROCESSES_PER_SESSION = 16
MAX_LEASES = 16_384  # of one session
MAX_WAITING_ACQUIRES = 1024  # of one session
MAX_WAIT_MS = 3_600_000  # capacity_wait_ms, wait_ms
MAX_BLOCK_SIZE = 1024  # tokens
MAX_POOLS = 64

# Values inside messages.
TOKEN_BYTES = 4  # a token or a block id: little-endian int32
SESSION_TOKEN_BYTES = 16
INCARNATION_BYTES = 16
MAX_CONTENT_RANGES = 4096  # of one sequence
MAX_CONTENT_ID_BYTES = 64
MAX_PLACEHOLDER_TOKENS = 64
MAX_NEAREST_TOKENS = 16  # of MissReason.nearest_tokens
MAX_SALT_BYTES = 256
MAX_ADAPTER_BYTES = 256  # of an adapter's name, and of its version
MAX_FINGERPRINT_BYTES = 256
MAX_CLIENT_NAME_BYTES = 256
MAX_CAPABILITIES = 64
MAX_CAPABILITY_BYTES = 64
MAX_KV_SPEC_STRING_BYTES = 256  # dtype, layout, backend
MAX_TAGS = 8  # of one Acquire
MAX_TAG_BYTES = 64
MAX_PRIORITY = 100  # of Retention: from minus this
MAX_TTL_MS = 366 * 24 * 3_600_000  # of Retention and of Pin
