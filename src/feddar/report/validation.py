"""Words on validation: which round's model is used, why training stopped, and whether it had gone on for too long."""

from __future__ import annotations

from collections.abc import Collection

from feddar.evaluation.validation import NOTABLE, Choice
from feddar.report.numbers import number
from feddar.settings import Settings


def results_of(settings: Settings) -> str:
    """Return a phrase that says which rounds a run's results are of, by the settings that it was trained with."""
    if settings.validation:
        return "the round with the lowest validation loss"
    rounds = min(settings.last, settings.rounds)
    return "the last round" if rounds == 1 else f"mean of the last {rounds} rounds"


def about_choice(choice: Choice) -> list[str]:
    """Return sentences on the round in use, on why training stopped, and on a loss that had risen or was falling."""
    end = f"all {choice.rounds} rounds were trained"
    if choice.stopped:
        waited = choice.last - choice.round
        rounds = "1 round" if waited == 1 else f"{waited} rounds"
        end = f"training stopped after {rounds} without a better one, of {choice.rounds} in all"
    elif choice.last < choice.rounds:
        end = f"{choice.rounds - choice.last} rounds of {choice.rounds} are not trained"
    which = f"Round {choice.round} of {choice.last} is in use, with the lowest validation loss ({number(choice.loss)})"
    said = [f"{which}; {end}."]
    if choice.rise >= NOTABLE:
        said.append(
            f"The validation loss was best in round {choice.round} and had risen by {100 * choice.rise:.0f} % in round "
            f"{choice.last}: the model of round {choice.round} is used."
        )
    if choice.fall >= NOTABLE:
        said.append(
            f"The validation loss was still falling, by {100 * choice.fall:.0f} % in the last quarter of the rounds: "
            "more of them may give a better model (--rounds)."
        )
    return said


def about_choices(choices: Collection[Choice]) -> list[str]:
    """Return ``about_choice`` of one training, or a sentence on several."""
    if len(choices) == 1:
        return about_choice(next(iter(choices)))
    marks = ((c.stopped, c.rise >= NOTABLE, c.fall >= NOTABLE) for c in choices)
    stopped, risen, falling = map(sum, zip(*marks, strict=True))
    used = {c.round for c in choices}
    which = f"Rounds {span(used)} are" if len(used) > 1 else f"Round {span(used)} is"
    said = [
        f"{which} in use; {stopped} of {len(choices)} trainings stopped early, "
        f"and in {risen} the validation loss had risen by 1 % or more by the end."
    ]
    if falling > len(choices) / 2:
        said.append(
            f"In {falling} of {len(choices)} trainings the validation loss was still falling by 1 % or more in the "
            "last quarter of the rounds: more of them may give better models (--rounds)."
        )
    return said


def span(rounds: Collection[int]) -> str:
    """Return the range of rounds as text.

    >>> span([7]), span([12, 7])
    ('7', '7 to 12')
    """
    low, high = min(rounds), max(rounds)
    return str(low) if low == high else f"{low} to {high}"
