"""Many trainings, compared fairly."""
