"""The demo's page: what differs is marked, and the exit status says what was shown."""

import os
import time

import pytest

import serve_demo
from demo import servers
from demo.page import WRONG, Result, marked, table
from demo.question import Question
from demo.servers import Answer, DemoError, Server

GOOD = (
    '[{"n":1,"name":"verify_user","arguments":{"id":"1","city":"Oslo"}},'
    '{"n":2,"name":"ship_device","arguments":{"id":"2","device":"camera"}}]'
)
QUESTIONS = [Question("1. verify user 1\n2. ...", (1, 2), GOOD)]

MARKED = [
    (GOOD, []),
    (GOOD.replace("Oslo", "Rome"), ["Rome", " (not Oslo)"]),
    (GOOD.replace("verify_user", "reset_code"), ["reset_code"]),
    (GOOD.replace(',"city":"Oslo"', ""), ["missing", " (not Oslo)"]),
    (GOOD.replace('"id":"2",', '"id":"2","x":1,'), ["1", " (not None)"]),
    (GOOD[:40], ["..."]),
    (GOOD.replace("}}]", "}}"), ["..."]),
    ("nonsense", ["nonsense"]),
]


@pytest.mark.parametrize(("text", "wrong"), MARKED)
def test_only_what_differs_is_red(text, wrong):
    found = [
        line.plain[span.start : span.end]
        for line in marked(text, GOOD)
        for span in line.spans
        if span.style == WRONG
    ]
    assert found == wrong


def result(name, text, seconds=1.0):
    return Result(name, [Answer(text, tuple(text.encode()))], seconds)


def test_speed_and_sameness_are_of_the_first_system():
    full, other = result("full", GOOD, 2.0), result("other", GOOD[:-10], 1.0)
    assert other.rate == len(GOOD) - 10
    assert other.same_as(full) == [False]
    assert (full.right(QUESTIONS), other.right(QUESTIONS)) == (1, 0)
    shown = table([full, other], QUESTIONS)
    columns = [[str(cell) for cell in column.cells] for column in shown.columns]
    speed, same = columns[2], columns[3]
    assert speed == ["1.00x", f"{2 * (len(GOOD) - 10) / len(GOOD):.2f}x"]
    assert same == ["1 of 1", "0 of 1"]


def test_a_document_has_one_beginning_and_different_questions():
    document = serve_demo.Document(
        serve_demo.ROOT / "configs/demo-model-long", tokens=900, questions=3, calls=2
    )
    prompts = [question.prompt for question in document.questions]
    assert 700 < document.tokens <= 900
    assert len({prompt[:600] for prompt in prompts}) == 1
    assert len(set(prompts)) == 3


def test_the_picture_is_drawn(tmp_path):
    results = [result("full", GOOD), result("other", GOOD[:-1])]
    serve_demo.draw(results, "a title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


ECHO = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "300"])
print(os.environ["GREETING"], child.pid, flush=True)
class Echo(http.server.BaseHTTPRequestHandler):
    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        most = body["sampling_params"]["max_new_tokens"]
        self.answer([
            {"text": str(ids), "output_ids": ids[:most]} for ids in body["input_ids"]
        ])
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Echo).serve_forever()
"""


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """Fork programs in the launcher's place; they are stopped."""
    monkeypatch.setattr(servers, "LAUNCHER", "demo_program")
    started = []

    def start(program):
        (tmp_path / "demo_program.py").write_text(program)
        more = {"PYTHONPATH": str(tmp_path), "GREETING": "hello"}
        started.append(Server(["--flag"], more, tmp_path / "log"))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_server_answers_and_leaves_no_process(forked, tmp_path):
    server = forked(ECHO)
    server.wait_until_healthy()
    answers = server.generate([[1, 2, 3], [4]], most=2)
    assert [answer.tokens for answer in answers] == [(1, 2), (4,)]
    assert answers[0].text == "[1, 2, 3]"
    greeting, child = (tmp_path / "log").read_text().split()[:2]
    assert greeting == "hello"
    assert runs(child)
    server.stop()
    assert server.has_ended()
    deadline = time.monotonic() + 30
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(child)


def test_a_server_that_ends_tells_how_its_log_ends(forked):
    server = forked("raise SystemExit(print('no such model') or 3)")
    with pytest.raises(DemoError, match="no such model"):
        server.wait_until_healthy()
    assert os.waitstatus_to_exitcode(server._status) == 3
