"""Flower's SuperLink on a Unix socket.

Run as ``python -m feddar.federation.links.flower.superlink SOCKET SITES ARGUMENT...``. SITES is ``known`` if sites have
to prove that they have a registered key, and ``any`` if not. Further arguments are those of ``flower-superlink``.
"""

import sys
from pathlib import Path

from feddar.federation.links.flower import internals

if __name__ == "__main__":
    socket, sites = sys.argv[1:3]
    del sys.argv[1:3]
    internals.run_superlink(Path(socket), sites == "known")
