"""Flower as the link between real sites: bytes are carried by Flower's SuperLink and SuperNodes.

``connect.py`` has the two entry points: ``flower_link`` for a coordinator and ``flower_site`` for a site.
``simulate.py`` runs the same on Flower's simulation engine. The ServerApp (``apps.py``) has its own process, where it
only relays (``relay.py``) messages of the coordinator's process, which trains. At a site,
``executor.py`` answers in the site's own process, so that no code from the network runs there. ``gate.py`` is a proxy
that lets sites reach only those calls of the SuperLink that are meant for them, in a process that ``gatekeeper.py``
starts. Everything that relies on Flower's private interface is in ``internals.py``; ``superlink.py``, ``serverapp.py``
and ``supernode.py`` run Flower's programs with it.
"""

from pathlib import Path

APP = Path(__file__).with_name("app")
"""The folder of the Flower app, for ``flwr run``."""
