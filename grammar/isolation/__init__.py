"""Compiling and checking in processes that may hang, crash and eat memory instead of the engine.

- `limits`: what a compile may use, and how it fails.
- `check`: validating a finished best-effort output.
- `executor`: the interface, and compiling in this process.
- `pool`: compiling in workers; `supervisor` and `template_link` are its two halves.
- `template`: the process that workers are forked from; `worker`: what each of them runs.
"""
