"""Secure aggregation without a network: numbers, shares and masks, and every pattern of sites that drop out."""

import hashlib
import math
import re
from itertools import combinations

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from feddar.federation.privacy.secure import shamir
from feddar.federation.privacy.secure.collector import FewHoldersError, SharesError, UnmaskError, set_up, unmask
from feddar.federation.privacy.secure.fixed_point import LARGEST, Field, Layout, RangeError
from feddar.federation.privacy.secure.masking import (
    AHEAD,
    FEWEST,
    Announced,
    Identity,
    add_mask,
    add_pair_mask,
    derived,
    fingerprint_of,
    pair_seed,
    public_of,
    sum_of,
    threshold,
)
from feddar.federation.privacy.secure.member import Held, Member
from feddar.federation.refused import RefusedError
from feddar.federation.security.certificates import new_key

REQUEST = hashlib.sha256(b"a request").digest()
SITES = tuple("abcdef")


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.data())
def test_any_shares_from_the_threshold_on_give_the_secret_back(secret, holders, data):
    least = data.draw(st.integers(1, holders))
    shares = shamir.split(secret, holders, least)
    some = data.draw(st.lists(st.sampled_from(range(holders)), min_size=least, max_size=holders, unique=True))
    assert shamir.joined({x + 1: shares[x] for x in some}) == secret


def test_fewer_shares_say_nothing():
    """Any secret is as probable as any other: for each there is a polynomial through the shares that one has."""
    shares = shamir.split(bytes(32), 3, 3)
    with pytest.raises(ValueError, match="of no secret"):
        shamir.joined({1: shares[0], 2: shares[1]})
    with pytest.raises(ValueError, match="3 of 2"):
        shamir.split(bytes(32), 2, 3)


numbers = st.floats(-1e38, 1e38, allow_subnormal=False)


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6))
def test_sums_of_any_size_are_exact(rows):
    layout = Layout((Field("s", (3,), None),), len(rows))
    total = sum(layout.encode({"s": torch.tensor(row, dtype=torch.float64)}) for row in rows)
    found = layout.decode(total)["s"].tolist()
    for place in range(3):
        wanted = math.fsum(row[place] for row in rows)
        assert found[place] == pytest.approx(wanted, rel=1e-15, abs=1e-32)


def test_squares_of_large_numbers_fit_at_fifty_sites_and_keep_their_digits():
    """Such as 10^6 rows of 10^15 each; 1.7e12 are the milliseconds since 1970."""
    layout = Layout((Field("squares", (2,), None),), 50)
    squares = torch.tensor([1e6 * 1e30, 1e6 * 1.7e12**2], dtype=torch.float64)
    total = sum(layout.encode({"squares": squares}) for _ in range(50))
    assert layout.decode(total)["squares"].tolist() == pytest.approx((50 * squares).tolist(), rel=1e-15)


@given(st.integers(2, 50), st.floats(1e-6, 1e12), st.integers(0, 2**32))
def test_changes_up_to_the_limit_never_wrap(sites, limit, seed):
    layout = Layout((Field("w", (4,), limit),), sites)
    values = np.random.default_rng(seed).uniform(-limit, limit, (sites, 4))
    values[:, 0], values[:, 1] = limit, -limit
    total = sum(layout.encode({"w": torch.from_numpy(row)}) for row in values)
    error = (layout.decode(total)["w"].numpy() - values.sum(0)) / (limit * sites)
    assert np.abs(error).max() < 2**-52 * sites


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2 * LARGEST, -2 * LARGEST])
@pytest.mark.parametrize("limit", [None, 1e3])
def test_what_does_not_fit_is_refused(value, limit):
    layout = Layout((Field("w", (2,), limit),), 3)
    with pytest.raises(RangeError, match="'w' is larger than"):
        layout.encode({"w": torch.tensor([0.0, value], dtype=torch.float64)})


def test_tensors_that_a_site_lacks_are_zeros():
    layout = Layout((Field("a", (2,), None), Field("b", (3, 1), 8.0)), 3)
    found = layout.decode(layout.encode({"b": torch.tensor([[1.5], [-2.0], [0.0]])}))
    assert found["a"].tolist() == [0, 0]
    assert found["b"].tolist() == [[1.5], [-2.0], [0.0]]


def test_key_streams_are_those_of_the_standards():
    """Known answers, so that masks are the same on every machine: AES-256 of zeros under the key of zeros (NIST)."""
    words = np.zeros(2, dtype=np.uint64)
    add_mask(words, bytes(32))
    assert words.astype("<u8").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


class Net:
    """Sites, and a coordinator that passes on what they send; ``gone`` says who does not answer which message."""

    def __init__(self, folder, sites, known=None):
        self.members = {site: Member(folder / site, "run", site, Identity(new_key()), known) for site in sites}
        self.folder, self.gone = folder, {}
        self.refusals = []

    def ask(self, message, sites):
        answers = {}
        for site in sites:
            if site in self.gone.get(message["kind"], ()):
                continue
            try:
                answers[site] = self.answer(site, message)
            except RefusedError as error:
                self.refusals.append(str(error))
        return answers

    def answer(self, site, message):
        member = self.members[site]
        match message["kind"]:
            case "keys":
                return member.announce(message["setup"])
            case "shares":
                return member.share(message["setup"], message["roster"])
            case "reveal":
                return member.reveal(message)

    def masked(self, setup, replies, what=(1, "heads"), request=REQUEST, domains=()):
        """Return each reply as it leaves its site."""
        sent = {}
        for site in setup.sites:
            if site not in self.gone.get("ask", ()):
                words = replies[site].copy()
                self.members[site].mask(words, setup.about(), request, what, domains)
                sent[site] = words
        return sent


@pytest.fixture
def net(tmp_path):
    return lambda n, **more: Net(tmp_path, SITES[:n], **more)


def replies_of(sites, size=5):
    return {site: np.full(size, 10**place, dtype=np.uint64) for place, site in enumerate(sites)}


def patterns(n):
    """Yield every way in which up to a third of n sites drop out in a step."""
    for step in ("keys", "shares", "ask", "reveal"):
        for number in range(n // 3 + 1):
            yield from ((step, gone) for gone in combinations(SITES[:n], number))


@pytest.mark.parametrize(("n", "step", "gone"), [(n, *each) for n in (3, 4, 5, 6) for each in patterns(n)])
def test_every_pattern_of_drop_outs(net, n, step, gone):
    """The sum is that of those who answered; or too few are left, nothing can be read, and it can be asked again."""
    federation, replies = net(n), replies_of(SITES[:n])
    federation.gone = {step: gone}
    setup = set_up(federation.ask, SITES[:n], "run")
    left = [site for site in SITES[:n] if step == "reveal" or site not in gone]
    if len(setup.sites) < setup.least or len(left) < setup.least:
        federation.gone = {}
        setup = set_up(federation.ask, SITES[:n], "run")
        left = [*SITES[:n]]
    sent = federation.masked(setup, replies)
    total = sum(sent.values())
    if step == "reveal" and n - len(gone) < setup.least:
        with pytest.raises(UnmaskError, match="have revealed their shares"):
            unmask(federation.ask, setup, sorted(sent), total.copy(), REQUEST)
        federation.gone = {}
        setup = set_up(federation.ask, SITES[:n], "run")
        sent = federation.masked(setup, replies)
        total = sum(sent.values())
    unmask(federation.ask, setup, sorted(sent), total, REQUEST)
    assert sorted(sent) == left
    assert total.tolist() == sum(replies[site] for site in left).tolist()
    assert not federation.refusals


def test_masked_replies_are_like_noise(net):
    federation = net(3)
    setup = set_up(federation.ask, SITES[:3], "run")
    sent = federation.masked(setup, {site: np.zeros(1 << 16, dtype=np.uint64) for site in SITES[:3]})
    for words in sent.values():
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    together = sent["a"] + sent["b"]
    assert len(np.unique(together)) == len(together)


def test_sites_that_are_told_different_things_add_up_to_noise(net):
    federation, replies = net(4), replies_of(SITES[:4], 1000)
    setup = set_up(federation.ask, SITES[:4], "run")
    sent = federation.masked(setup, replies)
    words = replies["d"].copy()
    federation.members["d"]._write(federation.members["d"]._state(setup.name) | {"used": {}})
    federation.members["d"].mask(words, setup.about(), hashlib.sha256(b"another").digest(), (1, "heads"))
    total = sent["a"] + sent["b"] + sent["c"] + words
    unmask(federation.ask, setup, SITES[:4], total, REQUEST)
    assert not np.isin(total, [1111]).any()
    assert len(np.unique(total)) == len(total)


def test_keys_mask_one_reply_and_reveal_for_one_list(net):
    federation, replies = net(4), replies_of(SITES[:4])
    setup = set_up(federation.ask, SITES[:4], "run")
    sent = federation.masked(setup, replies)
    a = federation.members["a"]
    assert (federation.masked(setup, replies)["a"] == sent["a"]).all()
    with pytest.raises(RefusedError, match="masked another reply"):
        a.mask(replies["a"].copy(), setup.about(), hashlib.sha256(b"another").digest(), (1, "heads"))
    unmask(federation.ask, setup, SITES[:4], sum(sent.values()), REQUEST)
    about = {"setup": setup.name, "index": 0, "answered": ["a", "b", "c"], "sealed": {}}
    with pytest.raises(RefusedError, match="for others who have answered"):
        a.reveal(about)


@pytest.mark.parametrize("sites", [["a"], ["a", "b"], ["a", "b", "c"], ["b", "c", "d", "e"], ["b", "a", "c", "d"]])
def test_a_site_itself_refuses_sums_over_too_few(net, sites):
    """Of five sites four are needed, the site among them, each once and in order, whatever the coordinator says."""
    federation = net(5)
    replies, setup = replies_of(SITES[:5]), set_up(federation.ask, SITES[:5], "run")
    a, why = federation.members["a"], "too few for a secure sum|who takes part"
    with pytest.raises(RefusedError, match=why):
        a.mask(replies["a"].copy(), setup.about() | {"sites": sites}, REQUEST, (1, "heads"))
    federation.masked(setup, replies)
    with pytest.raises(RefusedError, match=why):
        a.reveal({"setup": setup.name, "index": 0, "answered": sites, "sealed": {}})


def test_a_site_gives_no_shares_to_fewer_than_three(net):
    federation, setup = net(2), "ab" * 16
    with pytest.raises(RefusedError, match="a secure sum is of at least 3 sites"):
        federation.members["a"].share(setup, roster_of(federation, setup))


@pytest.mark.parametrize("n", [3, 4, 6])
def test_seeds_of_sites_are_found_from_the_threshold_of_shares_on_and_not_before(net, n):
    """Else fewer sites than a sum must be of, together with the coordinator, could read each reply."""
    federation = net(n)
    setup = set_up(federation.ask, SITES[:n], "run")
    sent = federation.masked(setup, replies_of(SITES[:n]))
    sealed = {site: {peer: each[0] for peer, each in setup.sealed[site].items()} for site in setup.sites}
    about = {"kind": "reveal", "setup": setup.name, "index": 0, "answered": sorted(sent), "sealed": sealed}
    shares = {place: federation.answer(site, about)["shares"] for place, site in enumerate(setup.sites, 1)}
    for owner in setup.sites:
        for number in range(1, n + 1):
            some = {place: int(each[owner], 16) for place, each in shares.items() if place <= number}
            try:
                found = sum_of("seed", shamir.joined(some).hex()).hex() == setup.hashes[owner][0]
            except ValueError:
                found = False
            assert found == (number >= threshold(n))


def test_a_reply_that_comes_after_its_sites_key_was_revealed_stays_masked(net):
    """A coordinator that says a site has not answered learns its key, and so its masks of pairs; not its own one."""
    federation, replies = net(4), replies_of(SITES[:4], 1000)
    setup = set_up(federation.ask, SITES[:4], "run")
    words = federation.masked(setup, replies)["d"]
    sealed = {site: {peer: each[0] for peer, each in setup.sealed[site].items()} for site in setup.sites}
    about = {"kind": "reveal", "setup": setup.name, "index": 0, "answered": ["a", "b", "c"], "sealed": sealed}
    shares = {place: int(federation.answer(site, about)["shares"]["d"], 16) for place, site in enumerate("abc", 1)}
    key = X25519PrivateKey.from_private_bytes(shamir.joined(shares))
    assert public_of(key) == setup.keys["d"].keys[0]
    for peer in "abc":
        add_pair_mask(words, "d", peer, pair_seed(key, setup.keys[peer].keys[0], REQUEST), undo=True)
    assert len(np.unique(words)) == len(words)


def test_a_second_sum_of_the_same_phase_is_over_the_same_sites(net):
    """Else the difference of the two sums is one site's reply."""
    federation, replies = net(4), replies_of(SITES[:4])
    for left_out, allowed in (((), True), ((), True), (("d",), False)):
        federation.gone = {"keys": left_out}
        setup = set_up(federation.ask, SITES[:4], "run")
        total = sum(federation.masked(setup, replies).values())
        if allowed:
            unmask(federation.ask, setup, setup.sites, total, REQUEST)
        else:
            with pytest.raises(UnmaskError):
                unmask(federation.ask, setup, setup.sites, total, REQUEST)
    assert set(federation.refusals) == {"the heads phase of round 1 was summed over other sites before."}


@pytest.mark.parametrize(("late", "allowed"), [(1, False), (2, True)])
def test_a_census_with_one_more_site_is_not_revealed(net, late, allowed):
    federation, replies = net(6), replies_of(SITES)
    for sites in (SITES[:4], SITES[: 4 + late]):
        setup = set_up(federation.ask, sites, "run")
        total = sum(federation.masked(setup, replies, (0, "census")).values())
        if sites == SITES[:4] or allowed:
            unmask(federation.ask, setup, setup.sites, total, REQUEST)
        else:
            with pytest.raises(UnmaskError):
                unmask(federation.ask, setup, setup.sites, total, REQUEST)


def roster_of(federation, setup="ab" * 16):
    """Return what all sites announce, as a coordinator passes it on."""
    return {site: member.announce(setup) for site, member in federation.members.items()}


def forged_keys(federation):
    """Let d announce keys that somebody else has made."""
    other = Net(federation.folder / "forged", ["d"]).members["d"]
    return lambda entry, setup: entry | {"keys": other.announce(setup)["keys"]}


def keys_of_zeros(federation):
    """Let d announce keys with which everybody agrees on the same secret."""
    member, keys = federation.members["d"], [bytes(32)] * (AHEAD + 1)
    return lambda _, setup: Announced.by(member.identity, "run", setup, "d", keys).as_entry()


def another_identity(federation):
    """Let d sign with a key that the study does not list."""
    member = federation.members["d"]
    identity = Identity(new_key())
    public = [public_of(X25519PrivateKey.generate()) for _ in range(AHEAD + 1)]
    for each in federation.members.values():
        each.known = {site: fingerprint_of(member.identity.public) for site, member in federation.members.items()}
    return lambda _, setup: Announced.by(identity, "run", setup, member.name, public).as_entry()


def one_key_for_two(federation):
    """Let d sign with the key of c."""
    identity = federation.members["c"].identity
    public = [public_of(X25519PrivateKey.generate()) for _ in range(AHEAD + 1)]
    return lambda _, setup: Announced.by(identity, "run", setup, "d", public).as_entry()


BAD_KEYS = {
    forged_keys: "the keys of 'd' are not signed by that site.",
    keys_of_zeros: "the keys of 'd' hide nothing.",
    another_identity: "the study does not list the key of 'd'.",
    one_key_for_two: "two sites sign with one key.",
}


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_sites_refuse_keys_that_are_not_anothers(net, bad):
    federation, setup = net(4), "ab" * 16
    change = bad(federation)
    roster = roster_of(federation, setup)
    with pytest.raises(RefusedError, match=re.escape(BAD_KEYS[bad])):
        federation.members["a"].share(setup, roster | {"d": change(roster["d"], setup)})
    federation.members["b"].share(setup, roster)


def no_keys(_):
    """Let d announce something else."""
    return lambda *_: {"keys": 1}


def a_huge_identity(_):
    """Let d announce what would fill the memory of others."""
    return lambda entry, _: entry | {"identity": "x" * 3_000_000}


@pytest.mark.parametrize("bad", [*BAD_KEYS, no_keys, a_huge_identity])
def test_a_site_with_bad_keys_is_left_out_and_the_others_go_on(net, bad):
    federation = net(5)
    change = bad(federation)

    def ask(message, sites):
        answers = federation.ask(message, sites)
        if message["kind"] == "keys":
            answers["d"] = change(answers["d"], message["setup"])
        return answers

    setup = set_up(ask, SITES[:5], "run", federation.members["a"].known)
    left_out = {"c", "d"} if bad is one_key_for_two else {"d"}
    assert setup.refused.keys() == left_out
    assert setup.sites == sorted({*SITES[:5]} - left_out)
    total = sum(federation.masked(setup, replies_of(SITES[:5])).values())
    unmask(ask, setup, setup.sites, total, REQUEST)


def test_shares_that_do_not_fit_name_who_has_given_them(net):
    federation = net(5)

    def ask(message, sites):
        answers = federation.ask(message, sites)
        if message["kind"] == "shares":
            answers["d"]["hashes"] = ["0" * 64] * AHEAD
        return answers

    setup = set_up(ask, SITES[:5], "run")
    total = sum(federation.masked(setup, replies_of(SITES[:5])).values())
    with pytest.raises(SharesError) as error:
        unmask(ask, setup, setup.sites, total, REQUEST)
    assert error.value.site == "d"


def test_an_answer_that_is_lost_when_sites_reveal_is_asked_for_again(net):
    federation, lost = net(5), {"a": 1, "c": 2, "e": 1}

    def ask(message, sites):
        answers = federation.ask(message, sites)
        if message["kind"] == "reveal":
            for site in [site for site in answers if lost.get(site)]:
                lost[site] -= 1
                del answers[site]
        return answers

    setup = set_up(ask, SITES[:5], "run")
    total = sum(federation.masked(setup, replies_of(SITES[:5])).values())
    unmask(ask, setup, setup.sites, total, REQUEST)
    assert total.tolist() == [11111] * 5


@pytest.mark.parametrize(("rows", "answered", "few"), [
    ([(9, 4), (9, 4), (9, 4), (9, 0), (9, 0)], "abcde", []),  # three sites with twelve rows together
    ([(9, 4), (9, 4), (9, 4), (9, 0), (9, 0)], "acde", [1]),  # two of them are left
    ([(9, 4), (9, 4), (9, 3), (9, 0), (9, 0)], "abcde", [1]),  # eleven rows
    ([(9, 4), (9, 999), (9, 0), (9, 0), (9, 0)], "abcde", [1]),  # two sites hold it
    ([(9, 0), (9, 0), (9, 0), (9, 0), (9, 0)], "abcde", []),  # nobody holds it: nothing is said
])  # fmt: skip
def test_a_sum_of_few_holders_or_rows_is_not_revealed(net, rows, answered, few):
    federation = net(5)
    for member, held in zip(federation.members.values(), rows, strict=True):
        member.held = Held(held, 12)
    federation.gone = {"ask": {*SITES[:5]} - {*answered}}
    setup = set_up(federation.ask, SITES[:5], "run")
    sent = federation.masked(setup, replies_of(SITES[:5]), domains=[0, 1])
    if not few:
        unmask(federation.ask, setup, [*answered], sum(sent.values()), REQUEST)
        return
    with pytest.raises(FewHoldersError) as error:
        unmask(federation.ask, setup, [*answered], sum(sent.values()), REQUEST)
    assert error.value.domains == few


def test_how_many_rows_there_are_beyond_those_needed_is_not_told():
    assert Held((0, 3, 12, 5000), 12).told == [0, 3, 12, 12]
    assert Held((0, 3, 5000), 0).told == [0, 1, 1]


def test_censuses_over_other_sites_of_before_are_not_revealed(net):
    """From sums over {a, b, c}, {a, b, d}, ... each site's own could be solved for."""
    federation, replies = net(6), replies_of(SITES)
    for sites, allowed in (("abcd", True), ("abef", False), ("abcdef", True), ("abcd", False)):
        setup = set_up(federation.ask, [*sites], "run")
        total = sum(federation.masked(setup, replies, (0, "census")).values())
        if allowed:
            unmask(federation.ask, setup, setup.sites, total, REQUEST)
        else:
            with pytest.raises(UnmaskError):
                unmask(federation.ask, setup, setup.sites, total, REQUEST)


def test_after_new_keys_nothing_of_the_old_ones_is_revealed(net):
    federation, replies = net(3), replies_of(SITES[:3])
    setup = set_up(federation.ask, SITES[:3], "run")
    total = sum(federation.masked(setup, replies).values())
    set_up(federation.ask, SITES[:3], "run")
    with pytest.raises(UnmaskError):
        unmask(federation.ask, setup, SITES[:3], total, REQUEST)
    assert set(federation.refusals) == {"it has no such keys: they were replaced."}


def test_a_site_that_reveals_wrong_shares_is_left_out(net):
    federation, replies = net(4), replies_of(SITES[:4])
    setup = set_up(federation.ask, SITES[:4], "run")
    total = sum(federation.masked(setup, replies).values())

    def ask(message, sites):
        answers = federation.ask(message, sites)
        answers["b"] = {"shares": dict.fromkeys(SITES, "12345")}
        return answers

    unmask(ask, setup, SITES[:4], total, REQUEST)
    assert total.tolist() == [1111] * 5


@pytest.mark.parametrize("n", range(FEWEST, 51))
def test_nobody_gets_both_kinds_of_shares(n):
    """Not even if it tells each site something else, and fewer than a third of sites work together with it."""
    together = math.ceil(n / 3) - 1
    assert 2 * threshold(n) > n + together
    # Of how many sites can it get keys, so that these are not in the sum? The others are at least three.
    assert n - n * (n - threshold(n)) // threshold(n) >= FEWEST


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_seeds_of_pairs_agree_and_depend_on_the_context(context):
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    keys = [key.public_key().public_bytes_raw() for key in (one, other)]
    assert pair_seed(one, keys[1], context) == pair_seed(other, keys[0], context)
    assert pair_seed(one, keys[1], context) != pair_seed(one, keys[1], context + b"x")
    assert len(derived(bytes(32), context)) == 32
