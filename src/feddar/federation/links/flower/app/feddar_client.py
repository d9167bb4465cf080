"""The ClientApp, which Flower starts at a site for each message."""

from feddar.federation.links.flower.apps import client_app

app = client_app()
