"""Flower as an engine between real sites: it carries bytes, with Flower's own SuperLink and SuperNodes underneath.

``connect.py`` has what a coordinator and a site call: ``flower_link`` and ``flower_site``. ``simulate.py`` runs the
same on Flower's simulation engine. Flower starts the ServerApp (``apps.py``) in a process of its own, where it only
relays (``relay.py``) to the coordinator's, which trains; at a site, ``executor.py`` answers in the site's own process,
so that no code from the network runs there. ``gate.py`` keeps the network away from what sites have no business with.
What is known of Flower beyond its public interface is in ``internals.py`` alone.
"""

from pathlib import Path

APP = Path(__file__).with_name("app")
"""The Flower app: what ``flwr run`` is given."""
