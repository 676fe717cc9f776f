"""What every matcher is built from and run by: the walk over trees, states, a pool of threads."""
