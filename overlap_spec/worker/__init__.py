"""The worker: owns the models, their caches and the rows' state on the device; runs a step."""
