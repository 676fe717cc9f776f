"""The manifest for Kubernetes: its structure, and that it asks for what there is."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from overlap_spec.cluster.arguments import read_arguments

HERE = Path(__file__).parent
FILES = HERE.parents[1] / "examples" / "deploy"
MANIFEST: dict[str, Any] = yaml.safe_load((FILES / "kuberay.yaml").read_text())
SCHEMA = json.loads((HERE / "rayservice.schema.json").read_text())
SERVE: dict[str, Any] = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
(APPLICATION,) = SERVE["applications"]
CLUSTER: dict[str, Any] = MANIFEST["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


def test_the_manifest_has_the_structure() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MANIFEST, SCHEMA)


def test_the_application_is_there_and_reads_its_arguments(tmp_path: Path) -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
    arguments = {n: v for n, v in APPLICATION["args"].items() if n != "model"}
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    plan, cluster = read_arguments({**arguments, "api_key_file": str(keys)})
    plan.config.check()
    # Every replica fits on a worker, and all of them on the workers that there may be.
    (container,) = pod(WORKERS)["containers"]
    limits = container["resources"]["limits"]
    assert cluster.cpus_per_replica <= float(limits["cpu"])
    assert cluster.gpus_per_replica == float(limits["nvidia.com/gpu"])
    assert (cluster.replicas, cluster.max_replicas) == (
        WORKERS["minReplicas"],
        WORKERS["maxReplicas"],
    )
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for file in (APPLICATION["args"]["model"], APPLICATION["args"]["api_key_file"]):
        assert any(file.startswith(f"{folder}/") for folder in mounted), file


def test_probes_and_drain_fit_each_other() -> None:
    port = SERVE["http_options"]["port"]
    for group in (CLUSTER["headGroupSpec"], WORKERS):
        (container,) = pod(group)["containers"]
        assert port in {entry["containerPort"] for entry in container["ports"]}
        names = {volume["name"] for volume in pod(group)["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= names
    (worker,) = pod(WORKERS)["containers"]
    ready, alive = worker["readinessProbe"], worker["livenessProbe"]
    assert ready["httpGet"] == {"path": "/-/healthz", "port": port}
    # A node that drains is no longer ready, and must go on living: liveness asks something else.
    assert "/-/healthz" not in json.dumps(alive)
    command, seconds = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    longest = APPLICATION["args"]["request_timeout_s"]
    gone_after = ready["periodSeconds"] * ready["failureThreshold"]
    assert longest + gone_after <= int(seconds) < pod(WORKERS)["terminationGracePeriodSeconds"]


def test_the_image_has_the_release_that_the_manifest_names() -> None:
    image = (FILES / "Dockerfile.ray").read_text()
    assert f'"ray[serve]=={CLUSTER["rayVersion"]}"' in image
    assert f"EXPOSE {SERVE['http_options']['port']}\n" in image
