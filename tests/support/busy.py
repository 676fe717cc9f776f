"""Runs a command beside processes that compute and never wait.

``python -m tests.support.busy 6 COMMAND ...``
"""

import subprocess
import sys

# It ends with its parent, however that ends.
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"


def main(count: int, command: list[str]) -> int:
    """The command's exit status."""
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
