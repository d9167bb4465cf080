"""FedDAR beside FedAvg on the synthetic exam cohort, where domains differ (1) and where they do not (0): 5 folds.

Where domains agree, separate heads and re-weighting can only cost; FedDAR must not lose to FedAvg by more than noise.
"""

import os
import sys

import numpy as np

import feddar
from feddar.datasets import BUILT_IN
from feddar.settings import DataSettings

FOLDS = 5
NOISE = 2.0  # standard errors of the paired difference


def main() -> None:
    source, met = BUILT_IN["exam"], True
    for difference in (1.0, 0.0):
        cohort = source.load(DataSettings(data="exam", difference=difference), 0)
        found: dict[tuple[str, str], list[float]] = {}
        for train, test in cohort.folds(FOLDS):
            for method in ("feddar-sa", "fedavg"):
                run = feddar.train(train, method, test=test, jobs=os.cpu_count() or 1, **source.settings)
                summary = run.results().query("scope == 'summary' and metric == 'auc'")
                for name, value in zip(summary["name"], summary["value"], strict=True):
                    found.setdefault((name, method), []).append(value)
        print(f"difference {difference:g}: AUC, mean of {FOLDS} folds, paired difference and its standard error")
        for name in ("domain_avg", "domain_min", "client_avg"):
            ours, theirs = (np.array(found[name, method]) for method in ("feddar-sa", "fedavg"))
            gap, error = (ours - theirs).mean(), (ours - theirs).std(ddof=1) / np.sqrt(FOLDS)
            print(f"  {name}: feddar-sa {ours.mean():.3f}, fedavg {theirs.mean():.3f}, {gap:+.4f} +- {error:.4f}")
            met &= gap > -NOISE * error or name == "client_avg"
    print(f"target: domain_avg and domain_min not below FedAvg by more than {NOISE:g} standard errors:", end=" ")
    print("met" if met else "NOT met")
    sys.exit(not met)


if __name__ == "__main__":
    main()
