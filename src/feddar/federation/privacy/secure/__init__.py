"""Secure aggregation: the coordinator learns sums over sites, and nothing of a single one.

The protocol is that of Bonawitz et al. (2017) on the complete graph, below the engines, so that every link carries it.

    keys     each site makes X25519 keys, one for each of the next sums, and signs them with the key it is known by
    shares   it checks the signatures of all; of each key, and of a seed of its own, every site gets an encrypted share
    ask      its reply, as whole numbers modulo 2^64, leaves with a mask for each pair of sites and one of its own
    reveal   told who has answered, it reveals its shares: of the seeds of those who have, of the keys of the others

Masks of pairs cancel in the sum over all who have answered; what is left is found from the shares. More than two thirds
of the sites must reveal the same kind of share of a site, so that nobody gets both kinds, with which a single reply
could be read. Masks depend on every byte of the request: sites that were told different things add up to noise.
"""

from importlib.util import find_spec

from feddar.errors import UserError


def require_cryptography() -> None:
    """Refuse secure sums where the package that they need is not installed."""
    if find_spec("cryptography") is None:
        raise UserError(
            "secure sums over sites need the package cryptography: install feddar[flower] or feddar[nvflare], or make "
            "the study with --no-secure."
        )
