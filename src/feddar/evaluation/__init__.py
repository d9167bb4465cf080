"""How good a model is: metrics by domain and client, the same from sums, fairness gaps, intervals."""
