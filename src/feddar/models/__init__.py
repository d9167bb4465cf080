"""The model: encoders, linear heads, and the class that joins them."""
