"""radixkv-server: reads the settings and runs one server."""

import logging
import os
import sys

from radixkv import __version__
from radixkv.server import config
from radixkv.server.environment import start_again_if_needed

EXIT_CANNOT_START = 1
EXIT_BAD_CONFIG = 2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code.

    0 drained; 1 cannot start; 2 bad configuration; 3 stopped while leases were held.
    """
    start_again_if_needed()
    try:
        namespace = config.parse_arguments(sys.argv[1:] if arguments is None else arguments)
        if namespace.version:
            print(f"radixkv-server {__version__}")
            return 0
        loaded = config.load(namespace, os.environ)
    except config.ConfigError as error:
        return _fail(str(error), EXIT_BAD_CONFIG)
    if namespace.print_config:
        print(config.format_config(loaded))
        return 0
    return _run(loaded)


def _run(loaded: config.Loaded) -> int:
    # Imported late: --help and configuration errors need none of it, and it takes a while.
    from radixkv.pools.arena import ArenaError
    from radixkv.pools.nvme_files import NvmeError
    from radixkv.server.admin import TokenError
    from radixkv.server.app import run
    from radixkv.server.pool_host import PoolTooLarge
    from radixkv.server.sockets import StartError
    from radixkv.server.specs import SpecError

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger(__name__).info("%s", loaded.settings)
    try:
        return run(loaded.settings)
    except (TokenError, SpecError) as error:
        return _fail(str(error), EXIT_BAD_CONFIG)
    except (StartError, PoolTooLarge, ArenaError, NvmeError) as error:
        return _fail(str(error), EXIT_CANNOT_START)


def _fail(message: str, code: int) -> int:
    print(f"radixkv-server: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
