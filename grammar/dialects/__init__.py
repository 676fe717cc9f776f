"""A grammar written in the input languages of the backends' libraries."""
