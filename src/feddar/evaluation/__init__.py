"""Evaluation: metrics by domain and client, from scores or from sums, fairness gaps, and confidence intervals."""
