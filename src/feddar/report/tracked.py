"""What commands give to a tracker that keeps files, beside the files of the run: its model card and its page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from feddar.errors import UserError
from feddar.results.tracking import keeps_files, log_files
from feddar.settings import Settings


def track_pages(settings: Settings, folder: Path) -> None:
    """Give the tracker of a run its model card and its page, which stay out of the folder."""
    if not keeps_files(settings):
        return
    from feddar.report.cards.files import write_card
    from feddar.report.page import write_page

    with TemporaryDirectory(prefix="feddar-") as place:
        card, page = Path(place) / "card.md", Path(place) / "report.html"
        with suppress(UserError):
            write_card(folder, card)
        with suppress(UserError):  # it needs packages that training does not
            write_page([folder], page)
        log_files(settings, folder, [card, page])
