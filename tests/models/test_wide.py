"""The encoder `wide`: a linear model is inside it, it takes every kind of column, and goes wherever others go."""

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

import feddar
from feddar.data.cohort import Cohort
from feddar.models.encoders import build_encoder
from feddar.models.encoders.tabular import CountedEmbedding, Ramps, Waves


def table(n=300, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 10, n),
            "ill": rng.choice(["yes", "no"], n),
            "ward": rng.choice([f"w{i}" for i in range(30)], n),
        }
    )
    frame.loc[::5, "age"] = np.nan
    return frame


def cohort_of(frame, seed=0):
    rng = np.random.default_rng(seed)
    n = len(frame)
    return Cohort.from_arrays(
        frame, rng.integers(0, 2, n), domain=rng.choice(["a", "b"], n), client=rng.choice(["x", "y", "z"], n)
    )


def wide(cohort):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_encoder("wide", cohort, None).eval()


def test_without_its_hidden_layers_waves_and_ramps_it_is_linear_in_small_numbers():
    x = torch.randn(50, 3)
    net = wide(Cohort.from_arrays(x, [0, 1] * 25))
    with torch.no_grad():
        net.layers[2].weight.zero_()
        net.layers[2].bias.fill_(-1)
        net.linear.weight[:, 3:] = 0
        small = 1e-3 * x
        torch.testing.assert_close(net(2 * small), 2 * net(small), rtol=1e-4, atol=1e-6)
        assert net(small).abs().max() > 0


def test_a_value_far_off_is_flattened_smoothly():
    net = wide(Cohort.from_arrays(torch.randn(20, 2), [0, 1] * 10))
    with torch.no_grad():
        near, far = net(torch.tensor([[1e4, 0.0]])), net(torch.tensor([[1e8, 0.0]]))
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)


def test_waves_by_hand():
    waves = Waves(2, waves=3, features=2)
    x = torch.randn(4, 2)
    found = waves(x).view(4, 2, 2)
    for place in range(2):
        angle = 2 * torch.pi * x[:, place, None] * waves.frequency[place] + waves.phase[place]
        expected = torch.relu(angle.cos() @ waves.mix[place] + waves.bias[place])
        torch.testing.assert_close(found[:, place], expected)


@pytest.mark.parametrize("columns", [["age", "ill", "ward"], ["ward"], ["ill"], ["age"], ["ill", "ward"]])
def test_every_kind_of_column_trains_and_is_exported(columns, tmp_path):
    cohort = cohort_of(table()[columns])
    train, test = cohort.split(0.3)
    run = feddar.train(train, encoder="wide", test=test, rounds=2, threads=1)
    assert all(value.isfinite().all() for value in run.state.encoders["all"].values())
    new = table(seed=1)[columns].head(9)
    run.export(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    parts = feddar.data.cohort.table_inputs(new, run.cohort.columns, torch.float32)
    given = {
        each.name: part.numpy() if part.is_floating_point() else part.long().numpy()
        for each, part in zip(session.get_inputs(), parts, strict=False)
    }
    found = session.run(None, given | {"domain": np.zeros(9, np.int64)})[0]
    np.testing.assert_allclose(found, run.predict_proba(new, domain=["a"] * 9), atol=1e-5)


def test_ramps_are_0_below_1_above_and_straight_between():
    ramps, knots = Ramps(2), torch.tensor(Ramps.KNOTS)
    count = len(knots) - 1
    at_knots = ramps(torch.stack([knots, knots.flip(0)], 1))
    assert at_knots.shape == (len(knots), ramps.features) == (len(knots), 2 * count)
    steps = torch.tril(torch.ones(len(knots), count), -1)  # at knot i the first i ramps are over, the others not begun
    torch.testing.assert_close(at_knots[:, :count], steps)
    torch.testing.assert_close(at_knots[:, count:], steps.flip(0))
    middle = ramps(((knots[1:] + knots[:-1]) / 2)[:, None].expand(-1, 2))[:, :count]
    torch.testing.assert_close(middle, steps[:-1] + 0.5 * torch.eye(count))
    assert ramps(torch.full((1, 2), -100.0)).eq(0).all() and ramps(torch.full((1, 2), 100.0)).eq(1).all()


def test_a_linear_model_of_ramps_is_any_curve_with_bends_at_the_knots():
    knots = torch.tensor(Ramps.KNOTS)
    heights = torch.randn(len(knots), generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-4, 4, 801)  # the curve is level outside of the knots
    found = heights[0] + Ramps(1)(x[:, None]) @ heights.diff()
    expected = np.interp(x.numpy(), knots.numpy(), heights.numpy())
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_a_level_counts_as_far_as_it_has_samples():
    embedding = CountedEmbedding(3, 2)
    codes = torch.tensor([0, 1, 2, 3, 3])
    assert not embedding(codes).any()  # before the census there are no samples
    embedding.counts.copy_(torch.tensor([40.0, 0.0, 10.0, 990.0]))
    with torch.no_grad():
        embedding.weight[0] = 3.0
    expected = embedding.weight[codes] * torch.tensor([0.8, 0.0, 0.5, 0.99, 0.99])[:, None]
    torch.testing.assert_close(embedding(codes), expected)
    embedding(codes).sum().backward()
    assert not embedding.weight.grad[1].any() and embedding.weight.grad[[0, 2, 3]].all()


def test_embeddings_start_small_and_a_missing_value_at_0():
    embedding = CountedEmbedding(500, 8)
    assert not embedding.weight[0].any()
    assert 0.05 < float(embedding.weight.detach()[1:].std()) < 0.2
    assert {name for name, _ in embedding.named_buffers()} == {"counts", "total"}  # they travel with the model


def test_truth_values_have_neither_waves_nor_ramps():
    net = wide(cohort_of(table()))
    waves, ramps = net.curves
    assert waves.frequency.shape[0] == 1
    assert ramps.features == len(Ramps.KNOTS) - 1
    assert [type(part) for part in net.inputs.levels] == [CountedEmbedding]
    assert not wide(cohort_of(table()[["ill", "ward"]])).curves


def test_clients_train_together_as_they_do_alone():
    train, _ = cohort_of(table(600)).split(0.3)
    options = {"rounds": 2, "dtype": "float64", "threads": 1}
    first, second = (feddar.train(train, batched=given, **options) for given in (True, False))
    assert first.settings.encoder == "wide"  # by default, for a table
    for name, value in first.state.encoders["all"].items():
        torch.testing.assert_close(value, second.state.encoders["all"][name], rtol=1e-6, atol=1e-7)
