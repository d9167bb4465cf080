"""Simulation of all clients on one machine: one by one, many small ones as one computation, or in processes."""
