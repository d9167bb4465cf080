"""Flower's SuperNode: run as ``python -m feddar.federation.links.flower.supernode CERTIFICATE KEY ARGUMENT...``.

It takes the arguments of ``flower-supernode``, and differs from it in how often it polls, and in that it shows the
site's certificate to the server; CERTIFICATE and KEY, which may be ``/dev/stdin``, are empty if there is none.
"""

import sys
from pathlib import Path

from feddar.federation.links.flower import internals

if __name__ == "__main__":
    certificate, key = sys.argv[1:3]
    del sys.argv[1:3]
    internals.run_supernode(*(Path(file) if file else None for file in (certificate, key)))
