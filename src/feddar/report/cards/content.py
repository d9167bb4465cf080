"""The content of a model card as plain data: sections with texts, tables and questions to the author."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from feddar.errors import UserError
from feddar.methods import nearest

MOST_ROWS = 40
QUESTIONS = {
    "intended_use": "What is the model for: which decision does it support, and when in the course of care?",
    "intended_users": "Who is to use it, and what do they need to know?",
    "population": "For which patients is it meant, and for whom must it not be used?",
    "background": "Which models exist for this purpose, and why is another one needed?",
    "inequalities": "Which inequalities in health between these domains are known?",
    "responsible": "Who is responsible for the model, how can they be reached, and what are its version and date?",
    "data_source": "How were the data collected (registry, routine care, trial), and how well do they stand for the "
    "patients the model is meant for?",
    "data_dates": "Between which dates were the patients included, and how long were they followed?",
    "setting": "What kind of sites are these, where are they, and how do they differ?",
    "eligibility": "Which patients were included and which were left out?",
    "treatments": "Which treatments did patients receive that bear on the outcome?",
    "preparation": "What was done with the data before feddar read them, and was it the same at every site and for "
    "every domain?",
    "outcome_definition": "How is the outcome defined, when and by whom was it assessed, and did they know the "
    "predictors?",
    "predictor_definition": "Why these predictors, how and when was each measured, and are all of them known at the "
    "time of prediction?",
    "sample_size": "How was the size of the study arrived at?",
    "missing_reasons": "Why are values missing, and is that the same at every site and for every domain?",
    "threshold_rationale": "Why this operating point: what does a false alarm cost, and what a missed case?",
    "fairness_judgement": "Which differences between domains are acceptable here, and who has decided that?",
    "limitations": "Which other limits are known?",
    "input_quality": "What is to be done when an input is missing, wrong, or not like those of training?",
    "monitoring": "How is the model watched in use, and what ends its use?",
    "ethics": "Which ethics committee has approved the study, and what have patients consented to?",
    "funding": "Who has paid for it, and what interests do the authors have?",
    "protocol": "Is there a protocol, and where is the study registered?",
    "sharing": "Where can the data and the model be had, and on what terms?",
    "involvement": "How were patients and the public involved?",
    "cohort_code": "Which code made the cohort that was trained on?",
}
"""What a run's folder does not know, by the key of its answer."""


@dataclass(frozen=True)
class Paragraph:
    """A text; it has no markup."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Items:
    """A list of texts."""

    kind: ClassVar[str] = "items"
    texts: tuple[str, ...]


@dataclass(frozen=True)
class CardTable:
    """A table with a title; its first column is text, and the others are numbers or, with ``words``, text too."""

    kind: ClassVar[str] = "table"
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False


@dataclass(frozen=True)
class Commands:
    """Lines to be typed as they stand."""

    kind: ClassVar[str] = "commands"
    text: str


@dataclass(frozen=True)
class Question:
    """A question to the author, and the answer if there is one."""

    kind: ClassVar[str] = "question"
    key: str
    text: str
    answer: str = ""

    @property
    def paragraphs(self) -> list[str]:
        """The answer, divided at empty lines."""
        return [text for part in re.split(r"\n\s*\n", self.answer) if (text := " ".join(part.split()))]


Block = Paragraph | Items | CardTable | Commands | Question


@dataclass(frozen=True)
class Section:
    """A part of the card, and the items of TRIPOD+AI that it belongs to (empty if none)."""

    title: str
    items: str
    blocks: tuple[Block, ...]

    @property
    def heading(self) -> str:
        """The title with the items."""
        return f"{self.title} (TRIPOD+AI {self.items})" if self.items else self.title

    def answered(self, answers: Mapping[str, str]) -> Section:
        """Return the section with these answers, by the keys of questions."""
        filled = (
            replace(block, answer=answers.get(block.key, "").strip()) if isinstance(block, Question) else block
            for block in self.blocks
        )
        return replace(self, blocks=tuple(filled))


@dataclass(frozen=True)
class Card:
    """The content of a model card."""

    title: str
    summary: str
    notice: str
    """A warning at the top; empty if there is none."""
    sections: tuple[Section, ...]

    @property
    def questions(self) -> list[Question]:
        """All questions, in their order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Question)]

    def answered(self, answers: Mapping[str, str]) -> Card:
        """Return the card with these answers, by the keys of questions; an answer to none of them is refused."""
        keys = [question.key for question in self.questions]
        for key in answers:
            if key not in keys:
                raise UserError(f"the card has no question '{key}': {nearest(key, keys)}")
        return replace(self, sections=tuple(section.answered(answers) for section in self.sections))


def section(title: str, items: str, *blocks: Block | str) -> Section:
    """Return a section; texts among the blocks are paragraphs, and empty ones are left out."""
    made = (Paragraph(block) if isinstance(block, str) else block for block in blocks if block)
    return Section(title, items, tuple(made))


def ask(*keys: str) -> tuple[Question, ...]:
    """Return the questions with these keys."""
    return tuple(Question(key, QUESTIONS[key]) for key in keys)


def words_table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[CardTable]:
    """Yield a table of texts, if it has rows."""
    found = tuple(rows)
    if found:
        yield CardTable(title, header, found, words=True)


def number_table(
    title: str, header: Iterable[str], rows: Sequence[tuple[str, ...]], file: str
) -> Iterator[CardTable | Paragraph]:
    """Yield a table of numbers, if it has rows; of many the first and the last one, and which file has the others."""
    if rows:
        shown = [*rows[: MOST_ROWS - 1], rows[-1]] if len(rows) > MOST_ROWS else rows
        yield CardTable(title, tuple(header), tuple(shown))
    if len(rows) > MOST_ROWS:
        yield Paragraph(f"{len(rows) - MOST_ROWS} more rows are left out; {file} has them.")


def listed(texts: Iterable[str]) -> str:
    """Return texts with commas and an "and".

    >>> listed("abc")
    'a, b and c'
    """
    every = list(texts)
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def capitalised(text: str) -> str:
    """Return a text with a capital at its beginning, and the rest as it is."""
    return text[:1].upper() + text[1:]
