"""JSON Schemas as sources: their text, dialects and formats, and types as schemas."""
