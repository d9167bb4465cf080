"""`python -m feddar.cli`."""

from feddar.cli import main

main()
