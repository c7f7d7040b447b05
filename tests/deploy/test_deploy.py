"""The files under deploy/: valid for Kubernetes and systemd, and what the sidecar wants.

Needs kubernetes-validate, which is 100 MB of schemas: a step of its own in `.ci/run` has it.
"""

import configparser
import copy
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from kalos_ctx import cli
from kalos_ctx.sidecar.options import SidecarOptions

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "kalos-sidecar.service"
OLDEST, NEWEST = "1.29", "1.34"  # native sidecars are on by default from 1.29


def loaded(name):
    """Return the one document of a manifest."""
    import yaml

    return yaml.safe_load((DEPLOY / "k8s" / name).read_text(encoding="utf-8"))


def patched(document, operations):
    """Apply a JSON patch of add, replace and test (RFC 6902)."""
    document = copy.deepcopy(document)
    for one in operations:
        *way, last = (
            part.replace("~1", "/").replace("~0", "~") for part in one["path"].split("/")[1:]
        )
        owner = document
        for part in way:
            owner = owner[int(part) if isinstance(owner, list) else part]
        key = int(last) if isinstance(owner, list) else last
        if one["op"] == "test":
            assert owner[key] == one["value"], one["path"]
        else:
            assert one["op"] == "add" or (one["op"] == "replace" and owner[key] is not None)
            owner[key] = one["value"]
    return document


def deployments():
    base = loaded("base/deployment.yaml")
    return {"base": base, "gpu": patched(base, loaded("gpu/sidecar.yaml"))}


def pod_of(deployment):
    return deployment["spec"]["template"]["spec"]


def sidecar_of(deployment):
    (container,) = pod_of(deployment)["initContainers"]
    return container


def options_of(command):
    """Return the long options of a `kalos serve` command line, by name."""
    words = [word for word in command if word.startswith("--")]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def known_options(name):
    command = get_command(cli.app).commands[name]
    return {option for parameter in command.params for option in parameter.opts}


# ---- Kubernetes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_fit_the_schema(version):
    import kubernetes_validate

    for document in (*deployments().values(), loaded("base/claim.yaml")):
        kubernetes_validate.validate(document, version, strict=True)


def test_schema_refuses_a_misspelt_field():
    import kubernetes_validate

    broken = loaded("base/deployment.yaml")
    broken["spec"]["template"]["spec"]["shareProcessNamespaces"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


def test_kustomizations_name_files_that_are_there():
    for folder in ("base", "gpu"):
        said = loaded(f"{folder}/kustomization.yaml")
        patches = [patch["path"] for patch in said.get("patches", [])]
        for name in (*said["resources"], *patches):
            assert (DEPLOY / "k8s" / folder / name).exists()


def test_deployment_lets_the_sidecar_see_its_clients_and_write_alone():
    deployment = loaded("base/deployment.yaml")
    pod = pod_of(deployment)
    assert pod["shareProcessNamespace"] is True
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert loaded("base/claim.yaml")["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert sidecar_of(deployment)["restartPolicy"] == "Always"


def test_deployment_grace_period_is_longer_than_draining():
    deployment = loaded("base/deployment.yaml")
    options = options_of(sidecar_of(deployment)["args"])
    drain = float(options.get("drain-timeout", SidecarOptions().drain_timeout))
    assert pod_of(deployment)["terminationGracePeriodSeconds"] >= 2 * drain


def test_deployment_containers_are_confined():
    for deployment in deployments().values():
        pod = pod_of(deployment)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_deployment_socket_lies_in_a_folder_that_the_sidecar_makes():
    """The root of an emptyDir may be written to by everyone, which the sidecar refuses."""
    pod = pod_of(loaded("base/deployment.yaml"))
    socket = options_of(pod["initContainers"][0]["args"])["socket"]
    (mount,) = [
        one
        for one in pod["initContainers"][0]["volumeMounts"]
        if socket.startswith(one["mountPath"])
    ]
    assert Path(socket).parent != Path(mount["mountPath"])
    assert Path(socket).parent.parent == Path(mount["mountPath"])
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    assert "emptyDir" in volume
    (app,) = pod["containers"]
    assert {"name": "KALOS_SOCKET", "value": socket} in app["env"]
    assert mount["name"] in [one["name"] for one in app["volumeMounts"]]


def test_deployment_probes_ping_the_socket_that_is_served():
    for deployment in deployments().values():
        container = sidecar_of(deployment)
        socket = options_of(container["args"])["socket"]
        for probe in ("startupProbe", "readinessProbe"):
            command = container[probe]["exec"]["command"]
            assert command[:2] == ["kalos", "ping"]
            assert options_of(command)["socket"] == socket
            assert container[probe]["timeoutSeconds"] > float(options_of(command)["timeout"])
            assert {f"--{name}" for name in options_of(command)} <= known_options("ping")


def test_deployment_commands_take_the_options_that_they_are_given():
    for deployment in deployments().values():
        container = sidecar_of(deployment)
        assert container["command"] == ["kalos"]
        assert container["args"][0] == "serve"
        assert {f"--{name}" for name in options_of(container["args"])} <= known_options("serve")


def test_gpu_variant_differs_in_the_gpu_alone():
    found = deployments()
    base, gpu = sidecar_of(found["base"]), sidecar_of(found["gpu"])
    assert gpu["resources"]["limits"].pop("nvidia.com/gpu") == 1
    assert [
        pair for pair in zip(base["args"], gpu["args"], strict=True) if len(set(pair)) == 2
    ] == [("--device=cpu", "--device=cuda")]
    assert {key for key in gpu if gpu[key] != base.get(key)} == {"args", "env"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kustomize_builds(folder):
    made = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / "k8s" / folder],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert made.count("\nkind: ") == 2


# ---- systemd ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unit():
    """Return the unit's sections; of a key that stands several times, the last."""
    parser = configparser.RawConfigParser(strict=False, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str
    # A backslash joins lines for systemd, an indented line does for this parser.
    parser.read_string(re.sub(r"\\\n\s*", " ", UNIT.read_text(encoding="utf-8")))
    return parser


def test_unit_command_takes_the_options_that_it_is_given(unit):
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0].endswith("/bin/kalos")
    assert words[1:3] == ["serve", "${STATE_DIRECTORY}/chats.kalos"]
    assert words[3:5] == ["--socket", "%t/kalos/sidecar.sock"]
    assert {word for word in words if word.startswith("--")} <= known_options("serve")


def test_unit_folders_are_those_of_the_command_and_closed_to_others(unit):
    service = unit["Service"]
    assert service["StateDirectory"] == service["RuntimeDirectory"] == "kalos"
    assert not int(service["StateDirectoryMode"], 8) & 0o077
    assert not int(service["RuntimeDirectoryMode"], 8) & 0o022
    assert service["UMask"] == "0077"


def test_unit_restarts_and_lets_the_sidecar_drain(unit):
    service = unit["Service"]
    assert (service["Type"], service["Restart"]) == ("exec", "on-failure")
    assert float(service["TimeoutStopSec"]) > SidecarOptions().drain_timeout


def test_unit_does_not_hide_the_sidecars_clients(unit):
    service = unit["Service"]
    assert service["ProtectProc"] == "default"
    assert "PrivatePIDs" not in service
    assert "PrivateUsers" not in service  # users would read 65534


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_unit_is_taken_by_systemd(tmp_path):
    text = UNIT.read_text(encoding="utf-8")
    # It looks whether the program is there.
    text = text.replace("/opt/kalos/venv/bin/kalos", "/bin/true")
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / UNIT.name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
