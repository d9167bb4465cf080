"""A site's refusal of a message."""

from feddar.errors import UserError


class RefusedError(UserError):
    """This site refuses a message; the text may be sent to the coordinator."""
