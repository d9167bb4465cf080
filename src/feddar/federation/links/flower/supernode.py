"""Flower's SuperNode with shorter waits: run as ``python -m feddar.federation.links.flower.supernode ARGUMENT...``.

It takes the arguments of ``flower-supernode``, and differs from it only in how often it polls.
"""

from feddar.federation.links.flower import internals

if __name__ == "__main__":
    internals.run_supernode()
