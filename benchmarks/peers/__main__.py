"""Inside a peer's environment: ``python -m benchmarks.peers SCRIPT WORK LEARNED`` trains and says how long it took.

Writes the weights that were learned, and prints one line of JSON with the seconds of each round.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from safetensors.torch import save_file

_, script, work, learned = sys.argv
# By its own name, so that processes that it starts import it and keep what it caches.
ran = import_module(f"benchmarks.peers.{script}").train(Path(work))
if os.environ.get("RANK", "0") == "0":  # the first of several processes says what all have done
    save_file({name: value.detach().contiguous() for name, value in ran.weights.items()}, learned)
    print(json.dumps({"seconds": ran.seconds}))
