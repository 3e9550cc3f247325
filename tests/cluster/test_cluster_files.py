"""The files that start clusters are what Ray and Kubernetes take, and agree with one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import ray
import yaml

from cluster.job_file import read_job

CLUSTER = Path(__file__).parents[2] / "cluster"


def test_the_cluster_launcher_takes_its_file() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    config = yaml.safe_load((CLUSTER / "ray-cluster.yaml").read_text())
    jsonschema.validate(config, schema)
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]


def test_the_kubernetes_job_has_a_gpu_for_every_stage_and_a_job_that_can_be_read(tmp_path: Path) -> None:
    job, config_map = yaml.safe_load_all((CLUSTER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    (tmp_path / "job.yaml").write_text(config_map["data"]["job.yaml"])
    read = read_job(tmp_path / "job.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    assert read.launch["stages"] == workers["replicas"] * gpus(workers)
    assert job["spec"]["entrypoint"].split()[1:] == ["/opt/memra_pp/cluster/job.py", "/job/job.yaml"]
    for group in (cluster["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert volumes[mounts["/job"]]["configMap"]["name"] == config_map["metadata"]["name"]
        for path in (read.model, read.prompts, str(read.answers)):
            assert any(path.startswith(f"{mount}/") for mount in mounts)


def test_all_name_one_version_of_ray() -> None:
    job = next(yaml.safe_load_all((CLUSTER / "rayjob.yaml").read_text()))
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"rayproject/ray:{version}-py311" in (CLUSTER / "Dockerfile").read_text()
    assert f"ray=={version}" in (CLUSTER.parent / "requirements.lock").read_text()


def gpus(group: dict[str, Any]) -> int:
    return int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
