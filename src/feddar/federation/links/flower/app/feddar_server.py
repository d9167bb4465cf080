"""The ServerApp, which Flower starts at the coordinator."""

from feddar.federation.links.flower.apps import server_app

app = server_app()
