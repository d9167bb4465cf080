import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddar.report import plots


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8))
def test_spread_keeps_order_and_distance(positions):
    moved = plots.spread(positions, gap=1.0)
    order = sorted(range(len(positions)), key=positions.__getitem__)
    assert all(moved[b] - moved[a] >= 1 - 1e-9 for a, b in itertools.pairwise(order))


def test_spread_leaves_what_is_apart_and_centres_what_is_not():
    assert plots.spread([5.0, 0.0, 0.2], gap=1.0) == pytest.approx([5.0, -0.4, 0.6])


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.2e-8, "9.2·10⁻⁸"), (0.345, "0.34"), (650.4, "650"), (1e-3, "10⁻³"), (2.84e6, "2.8·10⁶"), (1.0, "1")],
)
def test_numbers_are_written_for_people(value, text):
    assert plots.power_of_ten(value) == text


def test_a_figure_is_saved_where_asked(tmp_path):
    path = tmp_path / "deep" / "figure.png"
    with plots.canvas(path, width=2, height=1, panels=2) as (_, axes):
        assert len(axes) == 2
    assert path.read_bytes().startswith(b"\x89PNG")
