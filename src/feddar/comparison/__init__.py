"""Comparison of methods: many trainings on the same splits and seeds, in parallel, with optional tuning."""
