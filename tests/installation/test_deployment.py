"""The Dockerfile and the Kubernetes examples agree with the launcher and each other."""

import json
import re
from pathlib import Path

import pytest
import yaml

from vericache_sglang.serving.launch import split_arguments
from vericache_sglang.serving.refusals import SGLANG_VERSION

DEPLOY = Path(__file__).parents[2] / "configs/deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def manifests():
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture(scope="module")
def container(manifests):
    (found,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def test_the_image_is_the_pinned_sglang():
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == [
        f"lmsysorg/sglang:v{SGLANG_VERSION}"
    ]


def test_the_image_has_every_package_folder():
    copied = re.findall(r"^COPY (\S+) \S+$", DOCKERFILE, re.MULTILINE)
    assert copied == ["vericache_sglang", "kernels", "patches"]


def test_the_launcher_takes_the_arguments(container):
    entry = re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1]
    program, *host = json.loads(entry)[2:]
    assert program == "vericache_sglang.launch_server"
    config, rest = split_arguments([*host, *container["args"]])
    assert config.keep == 0.2
    assert {"--host", "0.0.0.0", "--port=30000", "--enable-metrics"} <= {*rest}


def test_ports_probes_and_scraping_meet_the_server(manifests, container):
    (port,) = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    template = manifests["Deployment"]["spec"]["template"]["metadata"]
    assert template["annotations"]["prometheus.io/path"] == "/metrics"
    assert template["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    service = manifests["Service"]["spec"]
    assert service["selector"].items() <= template["labels"].items()
    assert service["ports"][0]["targetPort"] == port["name"]


@pytest.fixture(scope="module")
def pools():
    documents = yaml.safe_load_all((DEPLOY / "two_pools.yaml").read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def container_of(workload):
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found


def names_of(workload, services):
    """Return the host names of a stateful set's pods, which its service gives them."""
    name = workload["spec"]["serviceName"]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert services["Service", name]["spec"]["selector"].items() <= labels.items()
    assert services["Service", name]["spec"]["clusterIP"] == "None"
    replicas = range(workload["spec"]["replicas"])
    return [f"{workload['metadata']['name']}-{i}.{name}" for i in replicas]


def test_drafters_find_every_verifier_and_the_router_every_drafter(pools):
    verifiers = pools["StatefulSet", "vericache-verifier"]
    drafters = pools["StatefulSet", "vericache-drafter"]
    verifier, rest = split_arguments(container_of(verifiers)["args"])
    assert {"--port=30000", "--hicache-storage-backend=file"} <= {*rest}
    (variable,) = container_of(drafters)["env"]
    words = [
        word.replace(f"$({variable['name']})", variable["value"])
        for word in container_of(drafters)["args"]
    ]
    drafter, _ = split_arguments(words)
    assert (verifier.role, drafter.role) == ("verifier", "drafter")
    assert verifier.peer_key == drafter.peer_key == "/run/peers/peer.key"
    port = verifier.peer_bind.rpartition(":")[2]
    wanted = [f"tcp://{name}:{port}" for name in names_of(verifiers, pools)]
    assert list(drafter.verifier_addresses) == wanted
    ports = {
        each["name"]: each["containerPort"] for each in container_of(verifiers)["ports"]
    }
    assert ports["peers"] == int(port)
    args = container_of(pools["Deployment", "vericache-router"])["args"]
    urls = args[args.index("--worker-urls") + 1 :]
    assert urls == [f"http://{name}:30000" for name in names_of(drafters, pools)]
