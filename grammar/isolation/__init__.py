"""One pool of processes that compiles, checks and reads grammars, so that a hang, a crash or memory
exhaustion does not reach whoever asks.

- `limits`: resource limits of a job, and the error of one that fails.
- `jobs`: what is done, and how its answer is read, as data; `check` is one of them.
- `pool`: the face, for any thread. It starts a `server`, the process that forks workers, gives them
  jobs and ends them; `worker` is what each of them runs.
- `channel`: what they send each other; `import_stubs`: libraries without what they do not need.
"""
