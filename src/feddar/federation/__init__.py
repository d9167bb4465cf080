"""The same methods between real sites: a study that all agree on, a site that answers, a coordinator that asks."""
