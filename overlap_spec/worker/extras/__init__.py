"""Optional parts of a step, one file each; see :mod:`overlap_spec.worker.extras.base`."""
