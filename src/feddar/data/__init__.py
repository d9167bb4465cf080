"""Who holds what: cohorts, their columns, labels and images, tables and the built-in sources."""
