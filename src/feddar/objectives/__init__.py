"""Objectives: what is predicted (two classes, several classes, a number, several outcomes), one file for each kind.

To add one, write a file with a subclass of ``Objective``, and add its name to ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feddar.errors import UserError
from feddar.objectives.labels import LabelColumns
from feddar.objectives.logistic import Binary
from feddar.objectives.multilabel import MultiLabel
from feddar.objectives.objective import Objective as Objective
from feddar.objectives.softmax import Multiclass
from feddar.objectives.squared import Regression

KINDS: tuple[type[Objective], ...] = (MultiLabel, Regression, Binary, Multiclass)
"""All kinds, in the order in which ``objective_for`` tries them."""


def objective_for(labels: LabelColumns) -> Objective:
    """Return the objective that fits the labels."""
    for kind in KINDS:
        found = kind.claim(labels)
        if found is not None:
            return found
    raise UserError("the labels are of no kind that can be learned.")


def from_facts(facts: Mapping[str, Any]) -> Objective:
    """Return the objective described by ``Objective.facts`` in a file."""
    kinds = {kind.task: kind for kind in KINDS}
    task = facts.get("task")
    if task not in kinds:
        raise UserError(f"the outcome {task!r} is not known: there are {', '.join(kinds)}.")
    return kinds[task].from_facts({name: value for name, value in facts.items() if name != "task"})


def with_classes(classes: tuple[Any, ...] | None) -> Objective:
    """Return the objective with these classes; None means a number to predict."""
    if classes is None:
        return Regression()
    return Binary(classes) if len(classes) == 2 else Multiclass(classes)
