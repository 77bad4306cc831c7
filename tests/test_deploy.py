"""Dockerfile and systemd unit refer to files, commands and options that exist."""

from __future__ import annotations

import configparser
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.commands import kvroute_command
from tests.dockerfile import of, stages

ROOT = Path(__file__).resolve().parents[1]
UNIT = ROOT / "deploy/systemd/kvroute.service"
PAGE = ROOT / "docs/deploy.md"


def _assert_command_exists(command: list[str]) -> None:
    """Check that the first argument is the command `kvroute` and that its subcommand has every option."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(command[0]).name in scripts
    shown = subprocess.run(
        kvroute_command(command[1], "--help"),
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": "/usr/bin"},
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for option in command[2:]:
        assert not option.startswith("--") or re.search(rf"{option}\b", shown.stdout), option


def test_every_file_copied_into_the_image_exists_and_is_not_ignored() -> None:
    """No other file is needed: everything that is not listed is ignored."""
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = [source for stage in stages() for step in of(stage, "COPY") for source in step.arguments[:-1]]
    from_context = {source for source in copied if not source.startswith("/")}
    assert {source.split("/")[0] for source in from_context} == {path.split("/")[0] for path in allowed}
    assert all((ROOT / path).exists() for path in allowed if "*" not in path)
    assert all((ROOT / source).exists() for source in from_context)
    assert {"requirements/kube.txt", "src", "engine"} <= from_context


def test_every_package_of_the_image_is_checked_against_its_hash() -> None:
    """The only installation without hashes is that of the wheel which the image builds itself, without an index."""
    steps = [part for stage in stages() for step in of(stage, "RUN") for part in step.rest.split("&&")]
    installs = [part for part in steps if re.search(r"pip\S* .*\binstall\b", part)]
    assert len(installs) == 3
    assert all("--require-hashes" in part or "--no-deps --no-index" in part for part in installs)


def test_the_final_stage_runs_the_gateway_as_an_unprivileged_user() -> None:
    """The user is given by number, so that Kubernetes can check it; that stage calls no compiler or package manager."""
    *_, final = stages()
    [user], [entry], [default] = of(final, "USER"), of(final, "ENTRYPOINT"), of(final, "CMD")
    uid, gid = map(int, user.rest.split(":"))
    assert uid > 0
    assert gid > 0
    assert of(final, "STOPSIGNAL")[0].rest == "SIGTERM"
    assert of(final, "HEALTHCHECK")
    _assert_command_exists(entry.arguments + default.arguments)
    volume = of(final, "VOLUME")[0].rest
    assert f"NUMBA_CACHE_DIR={volume}" in of(final, "ENV")[0].rest
    [made] = re.findall(r"install --directory --owner=(\d+) --group=(\d+) (\S+)", of(final, "RUN")[0].rest)
    assert made == (str(uid), str(gid), volume)
    assert not re.search(r"apt-get|gcc|hatchling", " ".join(step.rest for step in final))


def _unit(path: Path = UNIT) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit["Service"]


def test_the_unit_starts_the_command_that_the_docs_page_installs() -> None:
    service = _unit()
    command = service["ExecStart"].split()
    _assert_command_exists(command)
    installed = str(Path(command[0]).parents[1])
    page = PAGE.read_text()
    assert f"python3 -m venv {installed}" in page
    assert command[2] in page
    assert service["SupplementaryGroups"] in page
    assert service["EnvironmentFile"].removeprefix("-") in page


def test_the_unit_waits_longer_than_the_gateway_drains() -> None:
    """The drain time is the default of `gateway.timeouts.drain` in the cluster-file page."""
    [drain_s] = re.findall(r"timeouts: \{.*drain: (\d+) s\}", (ROOT / "docs/cluster-file.md").read_text())
    assert int(_unit()["TimeoutStopSec"]) > int(drain_s)


def test_the_unit_may_write_only_to_its_own_folders() -> None:
    """Everything else is read-only, and kernels may be compiled."""
    service = _unit()
    assert service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["Environment"] == f"NUMBA_CACHE_DIR=/var/cache/{service['CacheDirectory']}"
    assert "MemoryDenyWriteExecute" not in service, "numba writes machine code and runs it"


@pytest.mark.parametrize("name", ["scheduler", "agent"])
def test_the_units_of_scheduler_and_agents_start_what_their_page_installs(name: str) -> None:
    """Same protection as the gateway's unit; the command, its files and its variables are in docs/agents.md."""
    path = UNIT.with_name(f"kvroute-{name}.service")
    service, gateway = _unit(path), _unit()
    command = service["ExecStart"].split()
    _assert_command_exists(command)
    page = (ROOT / "docs/agents.md").read_text()
    assert f"deploy/systemd/{path.name}" in page
    variables = re.findall(r"\$\{(\w+)\}", service["ExecStart"])
    assert variables
    wanted = [*(f"{variable}=" for variable in variables), service["EnvironmentFile"], command[-1]]
    assert [line for line in wanted if line not in page] == []
    own = {"execstart", "execreload", "killmode", "timeoutstopsec", "limitnofile", "umask", "dynamicuser"}
    places = {"environmentfile", "environment", "cachedirectory", "logsdirectory", "logsdirectorymode"}
    shared = [key for key in gateway if key.lower() not in own | places]
    assert len(shared) > 20
    assert {key: service.get(key) for key in shared} == {key: gateway[key] for key in shared}


def test_the_docs_page_lists_every_alert_with_its_severity() -> None:
    """There is one row for each severity."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/kvroute-alerts.yml").read_text())["groups"]
    rules = {(rule["labels"]["severity"], rule["alert"]) for group in groups for rule in group["rules"]}
    rows = re.findall(r"^\| (critical|warning|info) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert {(severity, name) for severity, names in rows for name in re.findall(r"`(\w+)`", names)} == rules


def test_base_images_and_actions_are_pinned_by_digest() -> None:
    """A tag can be moved to other content; the tag or version stays beside the digest for readers."""
    images = [step.rest.split()[0] for stage in stages() for step in stage if step.keyword == "FROM"]
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"]
    for image in (*images, job["container"]["image"]):
        assert re.fullmatch(r"python:3\.11\S*@sha256:[0-9a-f]{64}", image), image
    assert len(set(images)) == 1
    for action in (step["uses"] for step in job["steps"] if "uses" in step):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
    assert "--privileged" not in job["container"]["options"]
