"""How much of an answer is still to come at least, and masks that leave room for it."""
