"""The pure core: which block holds which tokens' KV, and who may use it.

Knows tokens, blocks, leases and time as a number. Knows nothing of bytes, devices, sockets or
threads: methods take `now_ms`, return decisions, and name the copies that somebody has to perform.
"""
