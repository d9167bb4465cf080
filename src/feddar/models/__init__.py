"""What is learned: encoders, linear heads, and the model that joins them."""
