"""What maskbench runs over: schemas with instances in the order of the schema, and tokenizers."""
