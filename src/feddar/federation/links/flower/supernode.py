"""Flower's SuperNode, less patient: run as ``python -m feddar.federation.links.flower.supernode ARGUMENT...``.

It takes the arguments of ``flower-supernode``, and is the same program but for how often it asks.
"""

from feddar.federation.links.flower import internals

if __name__ == "__main__":
    internals.run_supernode()
