"""Drafters: one file each, named as on the command line; see :mod:`overlap_spec.drafters.base`."""
