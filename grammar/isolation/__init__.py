"""Compiling in processes that may hang, crash and eat memory, so that the engine does not.

- `limits`: what a compile may use, and how it fails.
- `executor`: the interface, and compiling in this process.
- `pool`: compiling in workers; `worker_set` and `template_link` are its two halves.
- `template`: the process that workers are forked from; `worker`: what each of them runs.
"""
