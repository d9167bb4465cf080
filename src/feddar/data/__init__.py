"""Data: cohorts (samples by client and domain), tables, images and the built-in data sources."""
