"""Algorithm 2 over 500 rounds: a loop over clients in every round, as the paper writes it, beside ours.

The paper's synthetic samples: d = 20, k = 2, 5 domains, mixtures Dir(0.4 p), 20 samples of each client. In the loop,
every client computes A_im and a_im from its own samples for the heads, then its gradient by B, in every round, and the
server sums. Ours sums second moments by domain once, which is timed with it, and then runs the same rounds on the sums.
Both must end in the same representation. Rounds on the sums of 10,000 clients are timed beside those of 100.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.figures import Figure, paired, seconds
from feddar.algorithm import algorithm2 as linear
from feddar.data.moments import Floats, Ints, Moments
from feddar.data.sources import synthetic_samples as synthetic

D, K, DOMAINS, ALPHA, SAMPLES, ROUNDS, ETA = 20, 2, 5, 0.4, 20, 500, 5.0
SAME = 1e-8


@dataclass(frozen=True)
class LoopClient:
    """A client of the plain loop: its samples in order of domains, and which rows are whose."""

    x: Floats
    y: Floats
    domain: Ints
    held: list[tuple[int, slice]]

    @classmethod
    def of(cls, x: Floats, y: Floats, domain: Ints) -> "LoopClient":
        order = np.argsort(domain, kind="stable")
        ends = np.cumsum(np.bincount(domain, minlength=DOMAINS))
        spans = [(m, slice(first, last)) for m, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
        return cls(x[order], y[order], domain[order], [(m, span) for m, span in spans if span.start < span.stop])

    def systems(self, B: Floats) -> Iterator[tuple[int, Floats, Floats]]:
        """A_im = B'X'XB and a_im = B'X'y of each domain held."""
        features = self.x @ B
        for m, span in self.held:
            part = features[span]
            yield m, part.T @ part, part.T @ self.y[span]

    def gradient(self, B: Floats, W: Floats, share: Floats) -> Floats:
        """The gradient by B of its samples' squared errors, each with its domain's share of the objective."""
        heads = W[self.domain]
        error = np.einsum("nk,nk->n", self.x @ B, heads) - self.y
        return self.x.T @ ((error * share[self.domain])[:, None] * heads)


def loop(clients: list[LoopClient], counts: Ints, start: Floats) -> Floats:
    """Algorithm 2 as the paper writes it."""
    B, share = start, 1 / (DOMAINS * counts)
    for _ in range(ROUNDS):
        A, a = np.zeros((DOMAINS, K, K)), np.zeros((DOMAINS, K))
        for client in clients:
            for m, left, right in client.systems(B):
                A[m] += left
                a[m] += right
        W = np.linalg.solve(A, a[:, :, None])[:, :, 0]
        slope = np.zeros_like(B)
        for client in clients:
            slope += client.gradient(B, W, share)
        B = np.linalg.qr(B - ETA * slope).Q
    return B


def figures() -> Iterator[Figure]:
    with threadpool_limits(1):
        yield from measured()


def measured() -> Iterator[Figure]:
    few, many = draw(100), draw(10_000)
    start, of_few, of_many = linear.moment_start(few.x, few.y, K), summed(few), summed(many)
    clients = [LoopClient.of(*(part[few.client == i] for part in few[:3])) for i in range(100)]

    def by_hand() -> Floats:
        return loop(clients, of_few.count, start)

    def ours() -> Floats:
        return linear.fit(summed(few), start, ROUNDS, ETA).B

    gap = np.abs(by_hand() - ours()).max()
    assert gap < SAME, f"the representations differ by {gap}"
    both = paired(by_hand, ours, repeats=9, warm_up=0)
    note = f"{both.note}; with the time to sum moments; greatest difference in B {gap:.0e}"
    yield Figure("Algorithm 2, 500 rounds, n=100: loop over clients / ours", both.ratio, ">= 25", note)
    grown = paired(
        lambda: linear.fit(of_many, start, ROUNDS, ETA), lambda: linear.fit(of_few, start, ROUNDS, ETA), repeats=15
    )
    note = f"{grown.note}; moments of 10,000 clients are summed once, in {seconds(lambda: summed(many)):.2g} s"
    yield Figure("Algorithm 2, rounds after summing, 10,000 / 100 clients", grown.ratio, "<= 1.2", note)


def draw(clients: int) -> synthetic.Samples:
    rng = np.random.default_rng([0, clients])
    truth = synthetic.make_truth(rng, d=D, k=K, domains=DOMAINS, clients=clients, alpha=ALPHA)
    return synthetic.draw(truth, SAMPLES, rng)


def summed(samples: synthetic.Samples) -> Moments:
    return Moments.from_samples(samples.x, samples.y, samples.domain, DOMAINS)
