"""Values and gradients of dense layers in closed form are those of the encoder under autograd."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from feddar.models.encoders.tabular import MLP, TableInput
from feddar.models.model import Body
from feddar.simulation.dense import dense_layers

CLIENTS, BATCH, COLUMNS = 3, 5, 4


def body_of(levels=(), projection=None):
    torch.manual_seed(0)
    encoder = MLP(TableInput(COLUMNS, [1], levels), hidden=7, features=6)
    body = Body(encoder, nn.Identity(), projection or nn.Identity()).double()
    body.encoder.inputs.numbers.mean += 0.3
    body.encoder.inputs.numbers.scale *= 2
    return body


def shared_by_all(body):
    trained = dict(body.named_parameters())
    return {name: value for name, value in body.state_dict().items() if name not in trained}


def test_values_and_gradients_are_those_of_autograd():
    body = body_of()
    common = shared_by_all(body)
    own = {name: torch.randn(CLIENTS, *value.shape).double() for name, value in body.named_parameters()}
    x = torch.randn(CLIENTS, BATCH, COLUMNS).double()
    x[0, 0, 1] = torch.nan
    slope = torch.randn(CLIENTS, BATCH, 6).double()

    dense = dense_layers(body, common)
    values = dense.forward(own, dense.prepared(common, (x.flatten(0, 1),)).view(CLIENTS, BATCH, -1))
    found = dense.backward(own, values, slope)
    moved = {name: value.clone() for name, value in own.items()}
    dense.descend(moved, values, slope, lr=0.3)

    assert found.keys() == own.keys()
    for client in range(CLIENTS):
        mine = {name: value[client].clone().requires_grad_() for name, value in own.items()}
        features = functional_call(body, common | mine, (x[client],))
        torch.testing.assert_close(values[-1][client], features.detach())
        expected = torch.autograd.grad((features * slope[client]).sum(), list(mine.values()))
        for name, gradient in zip(mine, expected, strict=True):
            torch.testing.assert_close(found[name][client], gradient)
            torch.testing.assert_close(moved[name][client], own[name][client] - 0.3 * gradient)


@pytest.mark.parametrize(
    "body",
    [body_of(levels=(3,)), body_of(projection=nn.Linear(6, 2)), nn.Sequential(nn.Linear(COLUMNS, 2), nn.ReLU())],
    ids=["embeddings that are trained", "a projection", "an encoder of one's own"],
)
def test_other_encoders_are_left_to_autograd(body):
    assert dense_layers(body, shared_by_all(body)) is None


def test_encoders_of_which_clients_share_the_layers_or_not_the_inputs_are_left_to_autograd():
    body = body_of()
    assert dense_layers(body, dict(body.state_dict())) is None
    assert dense_layers(body, {}) is None
