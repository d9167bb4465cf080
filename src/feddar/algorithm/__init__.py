"""The paper: what a client does, what the server does with replies, and the rounds in between."""
