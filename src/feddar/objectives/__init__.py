"""Outcomes: one file for each kind, and the list of them.

Adding an outcome is a file with a subclass of ``Objective``, and a name in ``KINDS``.
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
"""In the order in which they are asked whether labels are theirs."""


def objective_for(labels: LabelColumns) -> Objective:
    """Return the outcome that labels are of."""
    for kind in KINDS:
        found = kind.claim(labels)
        if found is not None:
            return found
    raise UserError("the labels are of no kind that can be learned.")


def from_facts(facts: Mapping[str, Any]) -> Objective:
    """Make an objective of what its ``facts`` say in a file."""
    kinds = {kind.task: kind for kind in KINDS}
    task = facts.get("task")
    if task not in kinds:
        raise UserError(f"the outcome {task!r} is not known: there are {', '.join(kinds)}.")
    return kinds[task].from_facts({name: value for name, value in facts.items() if name != "task"})


def with_classes(classes: tuple[Any, ...] | None) -> Objective:
    """Return the outcome with these classes, or of a number."""
    if classes is None:
        return Regression()
    return Binary(classes) if len(classes) == 2 else Multiclass(classes)
