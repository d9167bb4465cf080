"""The log of what has left a site: what it says, and that no change of it goes unnoticed."""

import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.algorithm.wire import pack
from feddar.errors import UserError
from feddar.federation.privacy.answer_log import FIRST, LOG_FILE, AnswerLog, read_log
from helpers.command import feddar

ANSWER = pack({"kind": "reply"}, {"heads/0": torch.zeros(2, 3)})


def message(number):
    return pack({"kind": "ask", "run": "ab" * 8, "round": number, "step": 1, "phase": {"name": "heads"}})


@pytest.fixture
def folder(tmp_path):
    log = AnswerLog(tmp_path)
    for number in range(1, 6):
        log.write(message(number), ANSWER)
    return tmp_path


def lines_of(folder):
    return (folder / LOG_FILE).read_bytes().splitlines(keepends=True)


def test_each_line_says_what_was_asked_and_what_left(folder):
    log = read_log(folder)
    assert [entry.round for entry in log.entries] == [1, 2, 3, 4, 5]
    entry = log.entries[2]
    assert (entry.asked, entry.run, entry.step, entry.phase) == ("ask", "ab" * 8, 1, "heads")
    assert entry.request == hashlib.sha256(message(3)).hexdigest()
    assert entry.reply == hashlib.sha256(ANSWER).hexdigest()
    assert (entry.received, entry.sent) == (len(message(3)), len(ANSWER))
    assert entry.answer == "reply"
    assert entry.tensors == {"heads/0": [2, 3]}
    assert log.entries[0].before == FIRST
    assert log.end == hashlib.sha256(lines_of(folder)[-1]).hexdigest()


def test_a_changed_a_missing_and_an_added_line_are_noticed(folder):
    lines = lines_of(folder)
    for number in range(4):
        entry = json.loads(lines[number])
        changed = json.dumps(entry | {"sent": 7}, sort_keys=True).encode() + b"\n"
        wrong = json.dumps(entry | {"tensors": None}).encode() + b"\n"
        others = (b"nothing\n", b"[]\n", b"[" * 100_000 + b"\n", b"\r" + lines[number], wrong)
        for forged in ([changed], [], [lines[number]] * 2, *([line] for line in others)):
            (folder / LOG_FILE).write_bytes(b"".join([*lines[:number], *forged, *lines[number + 1 :]]))
            with pytest.raises(UserError, match="does not follow from the one before it"):
                read_log(folder)
    whole = read_log_of(folder, lines)
    cut = read_log_of(folder, lines[:-1])
    assert cut.end != whole.end  # cut off at the end: the hash is another
    assert whole.goes_on_from(cut.end)
    assert whole.goes_on_from(whole.end)
    assert not cut.goes_on_from(whole.end)


def read_log_of(folder, lines):
    (folder / LOG_FILE).write_bytes(b"".join(lines))
    return read_log(folder)


def test_a_line_that_a_kill_left_unfinished_is_none_and_the_next_one_replaces_it(folder):
    with (folder / LOG_FILE).open("ab") as file:
        file.write(b'{"answer": "reply", "asked": ' + b"x" * 9000)
    assert len(read_log(folder).entries) == 5
    AnswerLog(folder).write(message(6), ANSWER)
    assert [entry.round for entry in read_log(folder).entries] == [1, 2, 3, 4, 5, 6]
    (folder / LOG_FILE).write_bytes(b"unfinished")
    AnswerLog(folder).write(message(1), ANSWER)
    assert len(read_log(folder).entries) == 1


@given(
    st.binary(max_size=200)
    | st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists)).map(pack)
)
def test_whatever_is_asked_is_one_line(tmp_path_factory, asked):
    folder = tmp_path_factory.mktemp("log")
    for _ in range(2):
        AnswerLog(folder).write(asked, ANSWER)
    assert len(read_log(folder).entries) == 2
    assert max(map(len, lines_of(folder))) < 2000


def test_the_command_shows_it_and_names_what_is_wrong(folder):
    shown = feddar("client", "log", "--state", folder, cwd=folder)
    assert "heads" in shown
    assert "5 answers" in shown
    assert read_log(folder).end in shown
    end = read_log(folder).end
    assert "has all that it had" in feddar("client", "log", "--state", folder, "--noted", end, cwd=folder)
    AnswerLog(folder).write(pack({"kind": "[/x]", "run": "[bold]\nx"}), ANSWER)
    shown = feddar("client", "log", "--state", folder, "--noted", end, cwd=folder)
    assert "[/x]" in shown
    assert "[bold] x" in shown
    never = feddar("client", "log", "--state", folder, "--noted", "ab", cwd=folder, code=2)
    assert "the log never ended with ab" in never
    (folder / LOG_FILE).write_bytes(b"".join(lines_of(folder)[1:]))
    assert f"line 1 of {folder / LOG_FILE} does not follow" in feddar(
        "client", "log", "--state", folder, cwd=folder, code=2
    )
    assert "there is no log of answers in feddar-north" in feddar(
        "client", "log", "--name", "north", cwd=folder, code=2
    )
    assert "say whose log to show" in feddar("client", "log", cwd=folder, code=2)
    assert "'logs' is nothing that a client does" in feddar("client", "logs", cwd=folder, code=2)
    assert "say which table is this site's own: --data FILE." in feddar("client", cwd=folder, code=2)
    for option in (["--data", "x.csv"], ["--min-cell", "7"], ["--explain"]):
        refused = feddar("client", "log", "--state", folder, *option, cwd=folder, code=2)
        assert f"{option[0]} says nothing about a log" in refused
    assert "--noted is compared with a log" in feddar("client", "--noted", "ab", cwd=folder, code=2)
