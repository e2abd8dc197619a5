"""The version is the same everywhere, and the commands of the release workflow exist."""

import re
from pathlib import Path

import yaml

import ecrl
from ecrl.cli.main import _NO_OVERRIDES, _WITH_OVERRIDES

ROOT = Path(__file__).resolve().parents[1]


def test_changelog_and_citation_have_the_version_of_the_package():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == ecrl.__version__ and versions == sorted(versions, reverse=True)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == ecrl.__version__


def test_the_release_workflow_calls_commands_of_ecrl():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    commands = re.findall(r"ecrl (\S+)", "\n".join(steps))
    assert {"--version", "train", "eval", "plot", "export"} == set(commands)
    assert set(commands) - {"--version"} <= {*_WITH_OVERRIDES, *_NO_OVERRIDES}
