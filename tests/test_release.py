"""The version is the same everywhere, and the commands of the release workflow exist."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import ecrl
from ecrl.cli.main import _NO_OVERRIDES, _WITH_OVERRIDES

ROOT = Path(__file__).resolve().parents[1]


def test_changelog_and_citation_have_the_version_of_the_package():
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == ecrl.__version__ and versions == sorted(versions, reverse=True)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == ecrl.__version__


def test_the_metadata_names_the_authors_and_the_versions_of_python_that_ci_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["authors"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">={versions[0]}"
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tested = {case["python"] for case in workflow["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert tested == {versions[0], versions[-1]}
    assert "Typing :: Typed" in project["classifiers"] and (ROOT / "ecrl" / "py.typed").exists()


def test_the_release_workflow_calls_commands_of_ecrl():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    commands = re.findall(r"ecrl (\S+)", "\n".join(steps))
    assert {"--version", "train", "eval", "plot", "export"} == set(commands)
    assert set(commands) - {"--version"} <= {*_WITH_OVERRIDES, *_NO_OVERRIDES}


def test_the_release_makes_the_links_of_the_readme_absolute(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    (command,) = [step for step in steps if "absolute_links.py" in step]
    assert steps.index(command) < min(i for i, step in enumerate(steps) if "-m build" in step)
    values = {"python": sys.executable, "README.md": str(tmp_path / "README.md")}
    values |= {'"$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"': "https://code.example/o/n", '"$GITHUB_REF_NAME"': "v1"}
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([values.get(word, word) for word in command.split()], cwd=ROOT, check=True)
    before = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    after = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text())
    assert all(link.startswith("https://code.example/o/n/") for link in after)
    paths = [re.sub(r"https://code.example/o/n/(raw|blob)/v1/", "", link) for link in after]
    assert paths == before and "https://code.example/o/n/raw/v1/docs/images/push_cube.gif" in after
