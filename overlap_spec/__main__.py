"""``python -m overlap_spec`` is the command line."""

from overlap_spec.cli import main

main()
