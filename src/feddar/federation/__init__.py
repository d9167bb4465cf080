"""Federated training between real sites: the study that all agree on, the coordinator (server), sites (clients)."""
