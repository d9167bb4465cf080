"""The ServerApp of a SuperLink on a Unix socket.

Run as ``python -m feddar.federation.links.flower.serverapp SOCKET RELAY``: it relays (``relay.py``) to the Unix socket
RELAY.
"""

import sys
from pathlib import Path

from feddar.federation.links.flower import APP, internals

if __name__ == "__main__":
    superlink, relay = sys.argv[1:]
    internals.run_server_app(Path(superlink), APP, {"socket": relay})
