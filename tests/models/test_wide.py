"""The encoder `wide`: a linear model is inside it, it takes every kind of column, and goes wherever others go."""

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

import feddar
from feddar.data.cohort import Cohort
from feddar.models.encoders import build_encoder
from feddar.models.encoders.tabular import Waves


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


def test_without_its_hidden_layers_and_waves_it_is_linear_in_small_numbers():
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


def test_truth_values_have_no_waves_and_embeddings_start_small():
    net = wide(cohort_of(table()))
    assert net.waves.frequency.shape[0] == 1
    assert net.inputs.levels[0].weight.std() < 0.2


def test_clients_train_together_as_they_do_alone():
    train, _ = cohort_of(table(600)).split(0.3)
    options = {"rounds": 2, "encoder": "wide", "dtype": "float64", "threads": 1}
    first, second = (feddar.train(train, batched=given, **options) for given in (True, False))
    for name, value in first.state.encoders["all"].items():
        torch.testing.assert_close(value, second.state.encoders["all"][name], rtol=1e-6, atol=1e-7)
