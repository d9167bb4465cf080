"""Flower as an engine between real sites: it carries bytes, with Flower's own SuperLink and SuperNodes underneath.

``deployment.py`` has what a coordinator and a site call: ``flower_link`` and ``flower_site``. ``simulate.py`` runs the
same on Flower's simulation engine. Flower starts the ServerApp and, for every message anew, the ClientApp in processes
of their own, so in a deployment both only relay (``apps.py``, ``relay.py``) to the long-lived processes behind these
calls, which hold data and model. ``gate.py`` keeps the network away from all that sites have no business with.
"""
