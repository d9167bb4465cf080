import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddar.data.cohort import Cohort, domain_weights
from feddar.errors import UserError
from feddar.objectives import Binary
from helpers.cohorts import make_cohort


def random_cohort(sizes: list[int], seed: int, groups: bool = False) -> Cohort:
    """Cells (client, domain, label) of the given sizes, 2 labels x 2 domains per client."""
    rng = np.random.default_rng(seed)
    cells = [(i // 4, (i // 2) % 2, i % 2) for i, size in enumerate(sizes) for _ in range(size)]
    client, domain, label = np.array(cells).T
    group = rng.integers(0, max(2, len(cells) // 2), len(cells)) if groups else None
    x = np.arange(len(cells), dtype=float)
    return Cohort.from_arrays(x, label, domain=domain, client=client, group=group, task="classification")


def test_counting_in_pieces_is_counting(monkeypatch):
    cohort = make_cohort(n=300)
    whole = cohort.counts
    monkeypatch.setattr("feddar.data.cohort.COUNTED_AT_ONCE", 7)
    assert torch.equal(cohort.counts, whole)
    assert whole.sum() == 300


def test_counts_and_names():
    cohort = Cohort.from_arrays([[1.0], [2.0], [3.0]], ["b", "a", "b"], domain=["x", "y", "x"], client=[7, 7, 2])
    assert cohort.clients == ("2", "7")
    assert cohort.domains == ("x", "y")
    assert cohort.classes == ("a", "b")
    assert cohort.counts.tolist() == [[1, 0], [1, 1]]
    assert cohort.objective == Binary(("a", "b"))
    assert cohort.objective.task == "binary"
    assert cohort.objective.outputs == 1


def test_order_can_be_given():
    cohort = Cohort.from_arrays([[1.0], [2.0]], [0, 1], domain=["x", "y"], domains=("y", "x", "z"))
    assert cohort.domains == ("y", "x", "z")
    assert cohort.domain.tolist() == [1, 0]


def test_torch_and_pandas_inputs_agree_with_numpy():
    import pandas as pd

    x, y, z = np.arange(6.0).reshape(3, 2), np.array([0, 1, 0]), np.array(["a", "b", "a"])
    plain = Cohort.from_arrays(x, y, domain=z)
    other = Cohort.from_arrays(torch.tensor(x), pd.Series(y), domain=pd.Series(z))
    assert plain.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
    ("y", "task", "outputs"),
    [
        ([0.5, 1.5, 2.5], "regression", 1),
        ([0.0, 1.0, 1.0], "binary", 1),
        ([True, False, True], "binary", 1),
        (["a", "b", "c"], "multiclass", 3),
    ],
)
def test_task_is_found(y, task, outputs):
    cohort = Cohort.from_arrays(np.zeros((3, 1)), y)
    assert (cohort.objective.task, cohort.objective.outputs) == (task, outputs)


def test_many_whole_numbers_are_asked_about():
    with pytest.raises(UserError, match=r"--task regression\|classification"):
        Cohort.from_arrays(np.zeros((200, 1)), np.arange(200))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 0))
def test_reweighting_makes_every_domain_count_the_same(counts):
    counts = torch.tensor(counts)
    held = counts > 0
    totals = domain_weights(counts) * counts
    assert torch.allclose(totals[held], counts.sum().double() / held.sum())
    assert (totals[~held] == 0).all()


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=8, max_size=16).filter(lambda s: len(s) % 4 == 0),
    seed=st.integers(0, 99),
    test=st.sampled_from([0.1, 0.2, 0.5]),
)
def test_split_is_stratified_up_to_one_sample_in_every_cell(sizes, seed, test):
    cohort = random_cohort(sizes, seed)
    train, held_out = cohort.split(test, seed)
    together = torch.cat([train.x[0], held_out.x[0]]).flatten()
    assert sorted(together.tolist()) == cohort.x[0].flatten().tolist()
    for cell, size in enumerate(sizes):
        of_cell = (held_out.client == cell // 4) & (held_out.domain == (cell // 2) % 2) & (held_out.y == cell % 2)
        assert abs(int(of_cell.sum()) - size * test) <= 1
    for client in range(len(cohort.clients)):
        total = int((cohort.client == client).sum())
        assert abs(int((held_out.client == client).sum()) - total * test) <= 1


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=8, max_size=12).filter(lambda s: len(s) % 4 == 0),
    k=st.integers(2, 5),
)
def test_every_sample_is_tested_once(sizes, k):
    cohort = random_cohort([size + k for size in sizes], seed=1)
    tested = [test.x[0] for _, test in cohort.folds(k)]
    assert sorted(torch.cat(tested).flatten().tolist()) == cohort.x[0].flatten().tolist()
    for cell, size in enumerate(sizes):
        for _, test in cohort.folds(k):
            of_cell = (test.client == cell // 4) & (test.domain == (cell // 2) % 2) & (test.y == cell % 2)
            assert abs(int(of_cell.sum()) - (size + k) / k) < 1


@pytest.mark.parametrize("seed", range(5))
def test_groups_stay_together(seed):
    cohort = random_cohort([9] * 8, seed, groups=True)
    train, test = cohort.split(0.3, seed)
    assert not set(train.group.tolist()) & set(test.group.tolist())
    assert 0.15 < len(test) / len(cohort) < 0.45
    for fold_train, fold_test in cohort.folds(3, seed):
        assert not set(fold_train.group.tolist()) & set(fold_test.group.tolist())


def test_split_depends_on_the_seed_alone(cohort):
    assert cohort.split(0.2, 3)[1].fingerprint() == cohort.split(0.2, 3)[1].fingerprint()
    assert cohort.split(0.2, 3)[1].fingerprint() != cohort.split(0.2, 4)[1].fingerprint()


@pytest.mark.parametrize("kind", ["client", "domain"])
def test_one_sample_cannot_be_split(kind):
    names = {"client": ["a"] * 10, "domain": ["a"] * 10} | {kind: ["a"] * 9 + ["lonely"]}
    cohort = Cohort.from_arrays(np.zeros((10, 1)), [0, 1] * 5, **names)
    with pytest.raises(UserError, match=f"{kind} 'lonely' has 1 sample;"):
        cohort.split()


@pytest.mark.parametrize("alpha", [0.05, 1.0, 100.0])
def test_mixture_draws_without_duplication(alpha):
    pool = Cohort.from_arrays(np.arange(4000.0), np.arange(4000) % 2, domain=np.arange(4000) % 4)
    drawn = Cohort.mixture(pool, clients=5, samples=100, alpha=alpha, seed=1)
    assert drawn.counts.sum(1).tolist() == [100] * 5
    assert len(drawn.x[0].unique()) == 500
    assert torch.equal(drawn.x[0].flatten().long() % 4, drawn.domain)
    largest = drawn.counts.max(1).values.float().mean()
    assert largest > 80 if alpha == 0.05 else largest < 95


def test_mixture_says_when_a_domain_runs_out():
    pool = Cohort.from_arrays(np.arange(40.0), np.arange(40) % 2, domain=["rare"] * 5 + ["common"] * 35)
    with pytest.raises(UserError, match=r"domain 'rare' runs out.*it has 5"):
        Cohort.mixture(pool, clients=5, samples=8, alpha=100.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [[1.0], [np.nan]]}, "first in row 1"),
        ({"x": [[1.0], [np.inf]]}, "first in row 1"),
        ({"y": ["a", None]}, "label is missing in 1 row, first in row 1"),
        ({"domain": ["a", None]}, "domain is missing"),
        ({"client": ["a"]}, "client has 1 entries, but x has 2"),
        ({"y": ["a", "a"]}, "nothing to learn"),
        ({"x": np.zeros((0, 1)), "y": [], "domain": [], "client": []}, "no samples"),
        ({"clients": ["b", "c"]}, "is not among"),
    ],
)
def test_bad_arrays_are_named(change, message):
    good = {"x": [[1.0], [2.0]], "y": ["a", "b"], "domain": ["a", "b"], "client": ["a", "a"]}
    with pytest.raises(UserError, match=message):
        Cohort.from_arrays(**(good | change))


def test_at_gives_what_one_client_holds(cohort):
    parts = [cohort.at(name) for name in cohort.clients]
    assert sum(map(len, parts)) == len(cohort)
    assert all((part.client == index).all() for index, part in enumerate(parts))


def test_multi_class_helper_has_all_classes():
    assert make_cohort(classes=4).objective.task == "multiclass"


def test_one_and_the_text_one_are_the_same_name():
    cohort = Cohort.from_arrays(np.zeros((4, 1)), [0, 1, 0, 1], domain=np.array([1, "1", 10, 2], dtype=object))
    assert cohort.domains == ("1", "2", "10")
    assert Cohort.from_arrays(np.zeros((3, 1)), [0, 1, 0], domain=[10, 2, 1]).domains == ("1", "2", "10")


def test_aligning_goes_by_name():
    cohort = make_cohort(classes=3)
    names = {"domain": cohort.domain_names, "client": cohort.client_names}
    labels = np.array(cohort.classes)[cohort.y]
    other = Cohort.from_arrays(cohort.x[0], labels, domains=cohort.domains[::-1], classes=[2, 0, 1], **names)
    back = other.aligned_to(cohort)
    assert back.fingerprint() == cohort.fingerprint() != other.fingerprint()
    with pytest.raises(UserError, match="domain 'elsewhere' was not in training"):
        Cohort.from_arrays(cohort.x[0], labels, domain=["elsewhere"] * len(labels)).aligned_to(cohort)
    with pytest.raises(UserError, match="class '7' was not in training"):
        Cohort.from_arrays(cohort.x[0], [0, 7] * (len(labels) // 2), **names).aligned_to(cohort)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [["a"], ["b"]]}, "x must hold numbers"),
        ({"x": 1.0}, "an array of samples"),
        ({"x": 1.7e9 + np.arange(2.0)}, "varies less than float32 can tell"),
        ({"x": (np.zeros((2, 1)), np.zeros((3, 1)), np.zeros((2, 1)))}, "input 2 of x has 3 entries"),
        ({"y": np.zeros((2, 2, 2))}, "label must be one column"),
        ({"domain": "ab"}, "give the column itself, such as frame"),
        ({"y": np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]")}, "a class must be text, a number"),
        ({"y": ["a", "b"], "classes": ["a", "a", "b"]}, "named twice"),
    ],
)
def test_odd_arrays_are_named(change, message):
    with pytest.raises(UserError, match=message):
        Cohort.from_arrays(**({"x": [[1.0], [2.0]], "y": ["a", "b"]} | change))


def test_numpy_classes_become_plain_and_input_is_copied():
    x = torch.ones(4, 2)
    cohort = Cohort.from_arrays(x, np.array([3, 5, 3, 5]), classes=np.array([3, 5]))
    x[0] = 9
    assert [type(name) for name in cohort.classes] == [int, int]
    assert (cohort.x[0] == 1).all()


def test_a_test_part_must_hold_something(cohort):
    with pytest.raises(UserError, match="test part is empty"):
        for seed in range(9):
            cohort.split(1e-5, seed)


def test_levels_and_gaps_that_only_the_test_part_has_are_unknown_to_training():
    table = pd.DataFrame({"age": [1.0, 2.0, np.nan, 4.0], "ward": ["b", "c", "a", "b"], "icu": ["x", "y", "x", "y"]})
    cohort = Cohort.from_arrays(table, [0, 1, 0, 1])
    held_out = np.array([False, False, True, False])
    train, test = cohort._divide(held_out)
    assert train.columns == test.columns
    assert [(column.levels, column.gaps) for column in train.columns] == [
        ((), False),
        (("b", "c"), False),
        (("x", "y"), False),
    ]
    assert train.x[1].tolist() == [[1, 1], [2, 2], [1, 2]]
    assert test.x[1].tolist() == [[0, 1]]


def test_without_values_tells_no_sample_from_another():
    cohort = Cohort.from_arrays(np.eye(4), [0, 1, 1, 0], domain=list("abab"), client=list("yyxx"), group=[1, 2, 3, 4])
    hollow = cohort.without_values()
    assert hollow.counts.tolist() == cohort.counts.tolist()
    assert hollow.client_names.tolist() == ["x", "x", "y", "y"]  # in order of cells, not of samples
    assert not any(part.any() for part in (*hollow.x, hollow.y))
    assert hollow.group is None
