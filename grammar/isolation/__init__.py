"""One pool of processes that compiles, checks and reads grammars, so that a hang, a crash or memory
exhaustion does not reach whoever asks.

- `limits`: resource limits of a job, and the error of one that fails; `check`: a kind of job.
- `jobs`: what is done, and how its answer is read, as data.
- `pool`: the face, for any thread; `supervisor` does the jobs in workers, with their limits.
- `link` starts the `fork_server`, the process that forks workers; `worker`: what each of them runs.
- `channel`: what they send each other; `import_stubs`: libraries without what they do not need.
"""
