"""The files of a model card: the card as Markdown or HTML, and the author's answers as TOML.

A card ends with a mark: a hash of what stands above it, and which questions are answered. By it a card that somebody
has changed by hand, or one with answers that are not given again, is known and kept.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from pathlib import Path

from feddar.errors import UserError
from feddar.report.cards.content import Block, Card, CardTable, Commands, Items, Paragraph, Question
from feddar.report.cards.model_card import read_card
from feddar.report.markdown import markdown
from feddar.report.page import rendered, require_packages, save_page
from feddar.settings import read_toml

MARKDOWN, HTML = (".md", ".markdown"), (".html", ".htm")
OPEN = "To be answered by the author:"
_MARK = re.compile(r"<!-- feddar card; answered: ([\w, ]*); sha256: ([0-9a-f]{64}) -->\n\Z", re.ASCII)


def write_card(folder: Path, out: Path, answers: Path | None = None) -> Card:
    """Write the model card of a run, as the name of ``out`` says, and return it; ``answers`` is a TOML file."""
    suffix = out.suffix.lower()
    if suffix not in (*MARKDOWN, *HTML):
        raise UserError(f"{out} is not the name of a card: let it end in .md or .html.")
    if suffix in HTML:
        require_packages("jinja2")
    card = read_card(folder).answered({} if answers is None else read_answers(answers))
    answered = [question.key for question in card.questions if question.answer]
    _require_replaceable(out, answered)
    text = as_html(card) if suffix in HTML else as_markdown(card)
    save_page(f"{text}<!-- feddar card; answered: {', '.join(answered)}; sha256: {_hash(text)} -->\n", out)
    return card


def _require_replaceable(out: Path, answered: list[str]) -> None:
    """Refuse to write over a file that is no card, or a card with words of the author that would be lost."""
    if not out.exists():
        return
    text = out.read_bytes().decode(errors="replace") if out.is_file() else ""
    mark = _MARK.search(text)
    if mark is None:
        raise UserError(f"{out} exists and is no card of feddar: choose another name with --out.")
    if _hash(text[: mark.start()]) != mark[2]:
        raise UserError(
            f"{out} was changed by hand since it was written: put what was added into a file for --answers, or choose "
            "another name with --out."
        )
    lost = [key for key in mark[1].split(", ") if key and key not in answered]
    if lost:
        raise UserError(
            f"{out} has an answer to {lost[0]}, which is not given now: give it with --answers, or choose another name "
            "with --out."
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_answers(path: Path) -> dict[str, str]:
    """Return the author's answers by the keys of questions; empty ones are left out."""
    answers = read_toml(path, f"the answers in {path}", "are")
    for key, answer in answers.items():
        if not isinstance(answer, str):
            raise UserError(f'{path}: the answer to {key} is not text: write it in quotes, as {key} = "...".')
    return {key: answer for key, answer in answers.items() if answer.strip()}


def write_questions(folder: Path, path: Path) -> None:
    """Write the questions of a run's card as a TOML file in which the author can answer them; none is written over."""
    if path.exists():
        raise UserError(f"{path} exists, and may hold answers: choose another name with --questions.")
    card = read_card(folder)
    lines = [
        "# Answers for a model card: feddar card RUN --answers THIS-FILE --out card.md",
        "# What is left empty stays a question on the card. Several paragraphs stand between three quotes.",
    ]
    for section in card.sections:
        asked = [block for block in section.blocks if isinstance(block, Question)]
        lines += ["", f"# {section.heading}"] if asked else []
        for question in asked:
            lines += ["", *(f"# {line}" for line in textwrap.wrap(question.text, 100)), f'{question.key} = ""']
    save_page("\n".join([*lines, ""]), path)


def as_html(card: Card) -> str:
    """Return the card as a page that needs no network and no script."""
    return rendered("card.html.jinja", title=card.title, card=card) + "\n"


def as_markdown(card: Card) -> str:
    """Return the card as Markdown; no name in it is taken for markup."""
    parts = [
        f"# {_heading(card.title)}",
        *([f"**{escaped(card.notice)}**"] if card.notice else []),
        _text(card.summary),
    ]
    for section in card.sections:
        parts += [f"## {_heading(section.heading)}", *map(_markdown_of, section.blocks)]
    return "\n\n".join(parts) + "\n\n"


def _markdown_of(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _text(text)
        case Items(texts):
            return "\n".join(f"- {_text(text)}" for text in texts)
        case CardTable(title, header, rows, words):
            cells = [[escaped(cell) for cell in row] for row in rows]
            return f"**{escaped(title)}**\n\n{markdown([*map(escaped, header)], cells, words=words)}"
        case Commands(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Question(_, text, ""):
            return f"**{OPEN}** {escaped(text)}"
        case Question(_, text):
            return "\n\n".join([f"**{escaped(text)}**", *map(_text, block.paragraphs)])


def _heading(text: str) -> str:
    """Return the text of a heading, whose last signs would end it if they were ``#`` after a blank."""
    return re.sub(r"#(?=#*\Z)", r"\\#", escaped(text))


def _text(text: str) -> str:
    """Return a text that begins a line: what would make a heading, a list or a rule of it is escaped, too."""
    return re.sub(r"^(\d*)([-+#=.)])", r"\1\\\2", escaped(text))


def escaped(text: str) -> str:
    r"""Return a text in one line, without meaning in Markdown, in a table or elsewhere.

    >>> print(escaped("<b> a|b *c* snake_case _d_"))
    &lt;b&gt; a&#124;b \*c\* snake_case \_d\_
    """
    line = " ".join(text.split())
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
        line = line.replace(sign, entity)
    # Between letters and digits an underscore is no markup.
    return re.sub(r"[\\`*\[\]~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
