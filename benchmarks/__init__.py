"""Measured ratios: ``python -m benchmarks [NAME ...]`` from the repository's root."""
