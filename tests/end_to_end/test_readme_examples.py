"""Every ``curl`` command of README and docs runs as it is written there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "127.0.0.1:30000"

PRELUDE = """
set -euo pipefail
curl() { command curl --fail-with-body --max-time 120 "$@" | tee -a "$ANSWER"; }
"""
"""Errors count, and what the server answered is kept beside what is printed."""


def complete(command):
    """Say whether ``command`` has all its quotes and ends in this line."""
    if command.endswith("\\"):
        return False
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def curl_commands(text):
    """Return the commands of the ``bash`` blocks of ``text`` that start with curl."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        held = ""
        for line in block.splitlines():
            if held or line.startswith("curl "):
                held += line
                if complete(held):
                    commands.append(held)
                    held = ""
                else:
                    held += "\n"
        assert not held, f"a command without an end: {held}"
    return commands


COMMANDS = list(
    dict.fromkeys(
        command
        for page in PAGES
        for command in curl_commands(page.read_text(encoding="utf-8"))
    )
)


def test_the_readme_shows_how_to_ask():
    assert any("/v1/chat/completions" in command for command in COMMANDS)
    assert all(ADDRESS in command for command in COMMANDS)


def test_commands_are_found_whole():
    text = (
        "```bash\nls\ncurl -s x \\\n  -d '{\n \"a\": 1}' | cat\ncurl y\n```\ncurl z\n"
    )
    assert curl_commands(text) == [
        "curl -s x \\\n  -d '{\n \"a\": 1}' | cat",
        "curl y",
    ]


def parsed(answer):
    """Return the JSON objects of an answer: one, or one for each event of a stream."""
    if not answer.startswith("data: "):
        return [json.loads(answer)]
    events = re.findall(r"^data: (.*)$", answer, re.MULTILINE)
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_readme_command(servers, tmp_path, command):
    ours, _ = servers
    answer = tmp_path / "answer"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-c", PRELUDE + command.replace(ADDRESS, f"127.0.0.1:{ours.port}")],
        env={**os.environ, "PATH": path, "ANSWER": str(answer)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    told = answer.read_text() if answer.exists() else ""
    assert run.returncode == 0, f"{run.stderr}\n{told[-2000:]}"
    assert run.stdout.strip(), "the command prints nothing"
    if "/metrics" in command:
        assert re.search(r"^\S*vericache\S* [0-9.e+-]+$", told, re.MULTILINE)
    else:
        assert all(isinstance(each, dict) for each in parsed(told))
