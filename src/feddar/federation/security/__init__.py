"""Keys and certificates."""
