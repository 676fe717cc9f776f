"""Compiles grammars and checks outputs in separate processes, so that a hang, a crash or memory
exhaustion does not reach the engine.

- `limits`: resource limits of a compile, and the error of one that fails.
- `check`: validates a finished best-effort output.
- `executor`: the interface, and compiling in this process.
- `pool`: compiles in workers; `supervisor` schedules them, `fork_server_link` starts them.
- `work_items`: what the supervisor schedules, and the workers that it schedules it on.
- `fork_server`: the process that forks workers; `worker`: what each of them runs.
- `answers`: what workers answer, as data.
"""
