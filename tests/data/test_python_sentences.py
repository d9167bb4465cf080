"""What is given wrongly in Python: each mistake gets one sentence that says what to give instead."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn

import feddar

ROWS = 80
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3))
Y = RNG.integers(0, 2, ROWS)
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])
GAPS = FRAME.where(np.arange(ROWS)[:, None] != [3, 3, 3])
DOMAIN, CLIENT = (np.array([*names])[np.arange(ROWS) // step % 2] for names, step in (("AB", 1), ("ns", 2)))
TEXT = FRAME.astype(object).where(np.arange(ROWS)[:, None] != [3, 3, 3], "low")


class Own(nn.Module):
    def __init__(self, fills=False, says="", rows=None):
        super().__init__()
        self.layer, self.fills, self.says, self.rows = nn.Linear(3, 4), fills, says, rows

    def forward(self, x):
        if self.says:
            raise ValueError(self.says)
        return self.layer(x.nan_to_num() if self.fills else x)[: self.rows]


def cohort(x=X, y=Y, domain=DOMAIN, client=CLIENT, **more):
    return feddar.Cohort.from_arrays(x, y, domain=domain, client=client, **more)


def train(data=None, **more):
    return feddar.train(cohort() if data is None else data, rounds=1, **more)


SENTENCES = {
    "class as encoder": (lambda: train(encoder=Own), r"Own is a class: give a module made of it, encoder=Own\(...\)"),
    "function as encoder": (lambda: train(encoder=len), "must be a torch.nn.Module or the name of one"),
    "class in a comparison": (lambda: feddar.compare(cohort(), ["fedavg"], Own), "Own is a class"),
    "encoder misspelt": (lambda: train(encoder="mpl"), "did you mean 'mlp'"),
    "gaps": (lambda: train(cohort(GAPS), encoder=Own()), "there are gaps in 'a', 'b', 'c': fill them in"),
    "categories": (lambda: train(cohort(FRAME.assign(d=DOMAIN)), encoder=Own()), "does not take inputs of shape"),
    "encoder of other width": (lambda: train(cohort(X[:, :2]), encoder=Own()), r"does not take inputs of shape \[\(2"),
    "features of other shape": (lambda: train(encoder=nn.Flatten(0)), r"must give \[batch, features\]"),
    "error of several lines": (lambda: train(encoder=Own(says="two\nlines")), "does not take inputs .*: two lines"),
    "one row of features": (lambda: train(encoder=Own(rows=1)), r"must give \[batch, features\], and gives \(1, 4\)"),
    "masked array": (lambda: cohort(np.ma.masked_greater(X, 1)), r"is a masked array: fill it in, x.filled\(...\)"),
    "truth values in two ways": (
        lambda: cohort(y=[*Y[:40].astype(str), *np.where(Y[40:], "yes", "no")]),
        "truth values in several ways",
    ),
    "text among numbers": (lambda: cohort(TEXT), "column 'a' holds 'low' among numbers in row 3: mend it"),
    "lists": (lambda: cohort(FRAME.assign(d=[[1]] * ROWS)), "column 'd' holds lists or records"),
    "name twice": (lambda: cohort(FRAME.set_axis(["a", "b", "a"], axis=1)), "column 'a' more than once: rename one"),
    "names of levels": (lambda: cohort(pd.concat({"a": FRAME}, axis=1)), "names of several levels"),
    "infinite column": (lambda: cohort(FRAME.assign(a=np.inf)), "column 'a' is infinite in row 0"),
    "missing label": (lambda: cohort(y=np.where(Y, Y, np.nan)), "the label is missing in .* fill it in or leave"),
    "missing domain": (lambda: cohort(domain=[None, *DOMAIN[1:]]), "the domain is missing in 1 row, first in row 0"),
    "missing client": (lambda: cohort(client=[None] * ROWS), "the client is missing in 80 rows"),
    "short label": (lambda: cohort(y=Y[1:]), "y has 79 entries, but x has 80 samples"),
    "short domain": (lambda: cohort(domain=DOMAIN[1:]), "domain has 79 entries, but x has 80 samples"),
    "short second input": (lambda: cohort((X, X[1:])), "input 2 of x has 79 entries"),
    "name of the domain": (lambda: cohort(domain="race"), r"is the text 'race': give the column itself"),
    "two domains": (lambda: cohort(domain=np.stack([DOMAIN, DOMAIN], 1)), "domain must be one column"),
    "dates as label": (lambda: cohort(y=pd.date_range("2020", periods=ROWS)), "a class must be text, a number or"),
    "complex": (lambda: cohort(torch.tensor(X + 1j)), "x holds complex numbers"),
    "missing number": (lambda: cohort(GAPS.to_numpy()), "or give a data frame, which may have gaps"),
    "texts": (lambda: cohort([["a", "b"]] * ROWS), "x must hold numbers"),
    "ragged": (lambda: cohort([[1, 2], [3]] * 40), "x must hold numbers"),
    "sparse": (lambda: cohort(csr_matrix(X)), r"x.toarray\(\)"),
    "nothing": (lambda: cohort(None), "x must be an array or a data frame of samples"),
    "records": (lambda: cohort({"a": X}), "x must be an array or a data frame of samples"),
    "no samples": (lambda: cohort(X[:0], Y[:0], DOMAIN[:0], CLIENT[:0]), "there are no samples"),
    "channels last": (lambda: cohort(np.zeros((ROWS, 8, 8, 3), np.uint8)), "move the last axis"),
    "task misspelt": (lambda: cohort(task="clasification"), "there are auto, regression, classification"),
    "frame to train on": (lambda: train(FRAME), r"must be a cohort.*: make one with feddar.Cohort.from_arrays"),
    "frame to test on": (lambda: train(test=FRAME), "test must be a cohort"),
    "frame to compare on": (lambda: feddar.compare(FRAME), "what is compared on must be a cohort"),
    "share of a split": (lambda: cohort().split("a"), "test must be between 0 and 1"),
    "one class": (lambda: train(cohort(y=Y * 0)), "only one class"),
    "option misspelt": (lambda: train(round=3), "did you mean 'rounds'"),
}


@pytest.mark.parametrize(("mistake", "said"), SENTENCES.values(), ids=SENTENCES.keys())
def test_a_mistake_gets_one_sentence(mistake, said):
    with pytest.raises(feddar.UserError, match=said) as caught:
        mistake()
    assert "\n" not in str(caught.value)


def test_mistakes_in_the_use_of_a_model():
    run = train(cohort(FRAME))
    with pytest.raises(feddar.UserError, match=r"x has no columns 'b', 'c', which the model needs; there are: a\."):
        run.predict(FRAME[["a"]], domain=DOMAIN)
    with pytest.raises(feddar.UserError, match=r"give the domain of each sample as domain=..."):
        run.predict(FRAME)
    with pytest.raises(feddar.UserError, match="what is evaluated must be a cohort"):
        run.evaluate(FRAME)


@pytest.mark.parametrize("x", [
    torch.tensor(X).half(), torch.tensor(X > 0), torch.tensor((10 * X).astype(int)), FRAME.astype(object),
    torch.tensor(X, requires_grad=True),
], ids=["half", "truth values", "whole numbers", "objects", "with gradient"])  # fmt: skip
def test_other_types_of_numbers_are_taken(x):
    assert cohort(x).x[0].dtype == torch.float32


def test_an_own_module_that_fills_gaps_is_taken():
    assert train(cohort(GAPS), encoder=Own(fills=True)).round == 1
