"""What Flower starts at the coordinator."""

from feddar.engines.flower.apps import server_app

app = server_app()
