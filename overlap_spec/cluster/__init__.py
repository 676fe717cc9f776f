"""Several engines behind one address, on Ray Serve: one engine a replica.

- `settings`: how many, and how requests find them.
- `prefixes`: which replica has computed how much of a prompt; `router` tells Ray Serve.
- `calls`: a request on its way to a replica, and its answer on the way back.
- `front`: sends each request to a replica, and again; `merged`: answers of all replicas as one.
- `deployments`: the front and the engines as deployments of Ray Serve.
- `launch`: ``overlap-spec serve --replicas``.
"""

from __future__ import annotations

from typing import Any

from overlap_spec.errors import ConfigError

NEEDED = "replicas run on Ray Serve, which is not installed: pip install 'overlap-spec[cluster]'"


def app(arguments: dict[str, Any]) -> Any:
    """The application for ``serve run overlap_spec.cluster:app`` and for a file of Ray Serve.

    Args:
        arguments: Flags of ``overlap-spec serve`` by their names in Python (``max_total_tokens``),
            as values or as text. Host and port are Ray Serve's own.

    Returns:
        A `ray.serve.Application`.

    Raises:
        ConfigError: Ray is not installed, or an argument is unknown or wrong; says which.
    """
    require_ray()
    from overlap_spec.cluster.arguments import read_arguments
    from overlap_spec.cluster.deployments import build

    return build(*read_arguments(arguments))


def require_ray() -> None:
    """Raise ConfigError that says what to install if Ray Serve is not there."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{NEEDED} ({error})") from None
