"""The page: every number on it recomputed from the files it was made from, and the page itself in a browser."""

import itertools
import json

import numpy as np
import pandas as pd

from feddar.evaluation import LOWER_IS_BETTER, METRICS, summarise
from feddar.settings import DataSettings, Settings, write_config

PAPER = [
    "local", "fedavg", "fedavg-ft", "separate", "fedavg-separate-ft", "fedavg-mh", "fedavg-di", "fedprox", "fedprox-ft",
    "fedminmax", "fedrep", "fedper", "lg-fedavg", "feddar-wa", "feddar-sa",
]  # fmt: skip
RACES = {"White": 4385, "Black": 1015, "Asian": 770, "Latino": 195, "Other": 1320}


def write_comparison(
    folder, task="binary", methods=("fedavg", "fedrep", "feddar-sa"), domains=RACES, clients=6, folds=5, rounds=20,
    data="exam", reference="fedavg", seed=0,
):  # fmt: skip
    """Write a comparison folder with made-up scores; small cells of two classes are undefined."""
    rng = np.random.default_rng(seed)
    clients = [f"site {i + 1}" for i in range(clients)] if isinstance(clients, int) else list(clients)
    share = rng.dirichlet(np.full(len(clients), 0.8), len(domains))
    cells = {(c, d): int(n * share[j, i]) for j, (d, n) in enumerate(domains.items()) for i, c in enumerate(clients)}
    metric, lower = METRICS[task][0], METRICS[task][0] in LOWER_IS_BETTER
    skill = {m: 0.02 * i / len(methods) + (0.04 if m.startswith("feddar") else 0) for i, m in enumerate(methods)}
    base = {d: 0.86 + 0.03 * rng.normal() for d in domains}
    luck = {(f, d): rng.normal() for f in range(folds) for d in domains}

    def score(method, fold, domain, n, at=1.0):
        noise = (0.6 * luck[fold, domain] + 0.4 * rng.normal()) * 0.6 / np.sqrt(n + 20)
        value = min(base[domain] + skill[method] + noise - 0.25 * (1 - at), 0.999)
        return 2 * (1 - value) if lower else value

    results, curves = [], []
    for method, fold in itertools.product(methods, range(folds)):
        rows = []
        for (client, domain), total in cells.items():
            n = total // folds + (fold < total % folds)
            if not n:
                continue
            positives = min(n, int(rng.binomial(n, 0.12)))
            undefined = task == "binary" and positives in (0, n)
            value = np.nan if undefined else score(method, fold, domain, n)
            rows.append(("cell", f"{client} | {domain}", metric, value, n))
            if task == "binary":
                rows.append(("cell", f"{client} | {domain}", "positives", positives, n))
        for scope, names, part in (("domain", domains, 1), ("client", clients, 0)):
            for name in names:
                own = [row for row in rows if row[0] == "cell" and row[1].split(" | ")[part] == name]
                n = sum(row[4] for row in own if row[2] == metric)
                if not n:
                    continue
                domain = name if scope == "domain" else next(iter(domains))
                for each in METRICS[task]:
                    value = score(method, fold, domain, n) if each == metric else rng.uniform()
                    rows.append((scope, name, each, value, n))
                if task == "binary":
                    rows.append((scope, name, "positives", sum(row[3] for row in own if row[2] == "positives"), n))
        frame = pd.DataFrame(rows, columns=["scope", "name", "metric", "value", "count"])
        main = frame["metric"] == metric
        total = frame[main & (frame["scope"] == "domain")]["count"].sum()
        head = [("all", "all", metric, score(method, fold, next(iter(domains)), total), total)]
        gaps = [(metric, frame[main & (frame["scope"] == "domain")]["value"].agg(np.ptp))]
        if task == "binary":
            gaps += [
                (name, rng.uniform(0.05, 0.3) * (1 - 5 * skill[method])) for name in ("tpr", "fpr", "selection_rate")
            ]
        tail = [("summary", "domain_gap", name, value, len(domains)) for name, value in gaps]
        summary = summarise(frame[frame["metric"].isin(METRICS[task])])
        parts = [pd.DataFrame(head, columns=frame.columns), frame, summary, pd.DataFrame(tail, columns=frame.columns)]
        results.append(pd.concat(parts).assign(method=method, fold=fold, seed=0))
        for number in range(1, rounds + 1):
            at = 1 - np.exp(-number / 4)
            early = [("domain", name, metric, score(method, fold, name, n, at), n) for name, n in domains.items()]
            early = pd.DataFrame(early, columns=frame.columns)
            now = pd.concat([early, summarise(early)]).assign(method=method, fold=fold, seed=0, round=number)
            curves.append(now)
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["method", "fold", "seed", "scope", "name", "metric", "value", "count"]
    pd.concat(results)[columns].to_csv(folder / "results.csv", index=False)
    pd.concat(curves)[[*columns[:3], "round", *columns[3:7]]].to_csv(folder / "curves.csv", index=False)
    write_config(folder / "config.toml", data=DataSettings(data=data), training=Settings(rounds=rounds))
    compare = {"methods": list(methods), "folds": folds, "seeds": 1, "reference": reference, "tune": False}
    with (folder / "config.toml").open("a", encoding="utf-8") as file:
        file.write("[compare]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in compare.items()))
    return folder
