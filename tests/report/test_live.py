"""The live page: what it is told, who may look at it, that it costs the training nothing, and the page in a browser."""

import http.client
import json
import re
import signal
import socket
import threading
from contextlib import ExitStack, closing, contextmanager
from urllib.parse import urlsplit

import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.errors import TrainingError, UserError
from feddar.federation.coordinator import CoordinatorEvents, coordinate
from feddar.federation.links.local import LocalLink
from feddar.report import live_server
from feddar.report.live import LiveView
from feddar.report.live_page import json_of
from feddar.report.live_server import LOOPBACK, MOST_CONNECTIONS, LiveServer, serving
from feddar.results.run_folder import METRICS_FILE, read_metrics
from feddar.settings import Settings
from helpers.browser import Opened
from helpers.cohorts import make_cohort
from helpers.command import feddar as command
from helpers.processes import Process
from helpers.sites import NAMES, make_sites, make_study, with_facts, write_tables

OPTIONS = {"rounds": 4, "last": 1, "jobs": 1, "threads": 1, "lr": 0.01}
HOSTILE = "</table><script>alert(1)</script>"


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=400).split(0.3)


def view_of(folder, unit="client", title="feddar on a cohort"):
    view = LiveView(title, "made up", unit, folder)
    view.begin(Settings(**OPTIONS), folder)
    return view


def watched(parts, view, folder, **options):
    """Train, and tell the view of it."""
    hooks = {"callbacks": [view.round_ended], "listeners": [view.heard]} if view else {}
    return feddar.train(parts[0], test=parts[1], out=folder, **hooks, **OPTIONS | options)


def told(view):
    """Return what the page shows, with the tables as rows of texts."""
    state = json.loads(json_of(view.known()))
    rows = {name: re.findall(r"<tr>.*?</tr>", html, re.DOTALL) for name, html in state["parts"].items()}
    cells = {
        name: [[*map(plain, re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL))] for row in each]
        for name, each in rows.items()
    }
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", state["parts"]["now"]))
    return state, cells, facts


def plain(html):
    return re.sub(r"<.*?>", "", html).strip()


def points(html):
    """Return how many points each line of each figure has."""
    return {
        name: [len(each.split()) for each in re.findall(r'points="(.*?)"', figure)]
        for name, figure in re.findall(r'<h3 id="(\S+)-title">(.*?)</figure>', html, re.DOTALL)
    }


# What the page is told.


def test_it_shows_what_the_run_folder_has(parts, tmp_path):
    view = view_of(tmp_path)
    state, cells, facts = told(view)
    assert (facts["Round"], facts["Now"], cells["seats"]) == ("0 of 4", "starting", [])
    run = watched(parts, view, tmp_path)
    state, cells, facts = told(view)
    metrics = read_metrics(tmp_path / METRICS_FILE)
    last = metrics[(metrics["round"] == 4) & (metrics["metric"] == "auc")]
    for part, scope in (("domains", "domain"), ("seats", "client")):
        rows = last[last["scope"] == scope]
        figures = {name: [f"{value:.3f}", str(count)] for name, value, count in rows[["name", "value", "count"]].values}
        assert {row[0]: row[-2:] for row in cells[part][1:]} == figures
    assert {row[1] for row in cells["seats"][1:]} == {"answered"}
    assert facts["Round"] == "4 of 4"
    assert facts["Round in use"] == f"{run.round}, by validation"
    assert (facts["Now"], facts["Answered"]) == ("evaluation", "4 of 4 clients")
    assert {"Time", "Left"} <= facts.keys()
    assert points(state["parts"]["figures"]) == {"metric-0": [4, 4, 4], "validation": [4], "train": [4]}
    assert state["title"] == "round 4 of 4: feddar on a cohort"
    assert not state["ended"]


def test_a_resumed_run_has_its_first_rounds_too(parts, tmp_path):
    first = {"rounds": 4, "schedule": "constant"}
    watched(parts, None, tmp_path, **first | {"rounds": 2})
    view = view_of(tmp_path)
    watched(parts, view, tmp_path, resume=True, **first)
    state, _, facts = told(view)
    assert points(state["parts"]["figures"]) == {"metric-0": [4, 4, 4], "validation": [4], "train": [4]}
    assert facts["Round"] == "4 of 4"


def test_it_says_who_is_working_and_who_was_not_drawn(parts, tmp_path):
    view, seen = view_of(tmp_path), []

    def look(request, reply):
        if request.phase.name == "heads" and request.round == 2:
            seen.append([row[1] for row in told(view)[1]["seats"][1:]])

    hooks = {"callbacks": [view.round_ended], "listeners": [view.heard, look]}
    options = OPTIONS | {"batched": False, "participation": 0.5}
    feddar.train(parts[0], test=parts[1], **hooks, **options)
    drawn = [sum(state == "answered" for state in each) for each in seen]
    assert drawn == [0, 1, 2]
    assert all(each.count("not drawn") == 2 for each in seen)
    assert seen[0].count("working") == 2


def test_few_samples_say_nothing(tmp_path):
    cohort = make_cohort(n=300, domains=2)
    rare = cohort.domain_names.copy()
    rare[:8] = "rare"
    names = {"domain": rare, "client": cohort.client_names}
    parts = feddar.Cohort.from_arrays(cohort.x[0].numpy(), cohort.y.numpy(), **names).split(0.3)
    counts = pd.Series(parts[1].domain_names).value_counts()
    assert 0 < counts["rare"] < 5
    view = view_of(tmp_path)
    watched(parts, view, tmp_path)
    assert "rare" not in json_of(view.known()).decode()
    assert "domain-1" in json_of(view.known()).decode()


# Sites.


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


def coordinated(tables, folder, study, **spoiled):
    view = view_of(folder / "out", "site")
    handlers = {name: site.answer for name, site in make_sites(tables, folder / "kept").items()}
    coordinate(study, LocalLink(handlers | spoiled), folder / "out", events=view.events)
    return view


def broken(_):
    raise OSError("the disk is full")


def test_sites_with_their_states_times_and_bytes(tables, tmp_path):
    study = make_study(tables, rounds=2)
    good = make_sites(tables, tmp_path / "kept")[NAMES[1]].answer
    calls = []

    def fails_later(message):
        calls.append(message)
        return good(message) if len(calls) < 6 else broken(message)

    view = coordinated(tables, tmp_path, study, **{NAMES[1]: fails_later})
    _, cells, _ = told(view)
    exchanges = pd.read_csv(tmp_path / "out" / "exchanges.csv")
    rows = {row[0]: row[1:] for row in cells["seats"][1:]}
    assert rows.keys() == {*NAMES}
    assert rows[NAMES[0]][0] == "answered"
    assert rows[NAMES[1]][0] == "left out OSError: the disk is full"
    for site, mine in exchanges.groupby("site"):
        kilobytes = [f"{mine[column].sum() / 1000:.0f} kB" for column in ("sent", "received")]
        assert rows[site][2:4] == kilobytes
    assert any("has joined" in note for note in view.known().notes)
    # A coordinator that is resumed goes on counting.
    assert {name: seat.sent for name, seat in view_of(tmp_path / "out", "site").known().seats.items()} == {
        name: seat.sent for name, seat in view.known().seats.items()
    }


def test_a_site_that_is_working_away_or_refused(tables, tmp_path):
    seen = {}
    study = make_study(tables, rounds=1)
    view = view_of(tmp_path / "out", "site")
    sites = make_sites(tables, tmp_path / "kept")

    class Link(LocalLink):
        def sites(self):
            return [name for name in super().sites() if name != NAMES[2] or not view.known().round]

        def ask(self, message, sites, timeout):
            seen.setdefault(view.known().phase, {name: seat.state for name, seat in view.known().seats.items()})
            return super().ask(message, sites, timeout)

    handlers = {name: site.answer for name, site in sites.items()}
    coordinate(study, Link(handlers), tmp_path / "out", events=view.events)
    assert seen["census"] == dict.fromkeys(NAMES, "working")
    assert seen["encoder"] == {NAMES[0]: "working", NAMES[1]: "working", NAMES[2]: "away"}
    view.events.came("late", "its table has no column age")
    assert told(view)[1]["seats"][-1][:2] == ["late", "refused its table has no column age"]


def test_of_secure_sums_it_shows_nothing_of_a_site(tables, tmp_path):
    study = with_facts(make_study(tables, rounds=1), secure=True)
    view = coordinated(tables, tmp_path, study)
    _, cells, _ = told(view)
    assert cells["domains"][1:]
    assert [row[0] for row in cells["seats"]] == ["site", *NAMES]
    assert cells["seats"][0] == ["site", "state", "last answer after", "sent to it", "received"]
    assert {row[1] for row in cells["seats"][1:]} == {"answered"}
    assert any("no single site" in note for note in view.known().notes)


def test_two_listen_to_one_coordinator():
    heard = []
    first, second = (CoordinatorEvents(say=lambda what, who=who: heard.append((who, what))) for who in (1, 2))
    first.beside(second).say("something")
    assert heard == [(1, "something"), (2, "something")]


# Who may look at it.


@contextmanager
def served(view):
    with serving(view) as address:
        url = urlsplit(address)
        yield url.port, url.path


def asked(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": f"{LOOPBACK}:{port}"} | headers).items():
            for each in [value] if isinstance(value, str) else value:
                connection.putheader(name, each)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        connection.close()


def test_only_who_has_the_address_is_answered(tmp_path):
    with served(view_of(tmp_path)) as (port, path):
        for name, kind in (("", "text/html"), ("state", "application/json"), ("live.js", "text/javascript")):
            status, content, headers = asked(port, path + name)
            assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
            assert content
            assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
            assert headers["Cache-Control"] == "no-store"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Server"].strip() == "feddar"
        assert asked(port, path, Host=f"localhost:{port}")[0] == 200
        secret = path.strip("/")
        assert len(secret) >= 32
        others = ("/", "/state", path[:-1], f"/{secret[:-1]}/", f"/{secret[:-1]}?/state", f"/{secret}x/state")
        others += (
            f"{path}../{path}",
            f"{path}state?x",
            f"{path}live.py",
            f"{path}page.css",
            f"http://{LOOPBACK}{path}",
        )
        for other in others:
            status, content, headers = asked(port, other)
            assert (status, content) == (404, b"Not Found"), other
            assert "Content-Security-Policy" in headers
        for host in ("evil.example", f"evil.example:{port}", LOOPBACK, f"{LOOPBACK}:{port + 1}", "", ()):
            assert asked(port, path, Host=host)[:2] == (403, b"Forbidden"), host
        twice = [f"{LOOPBACK}:{port}", "evil.example"]
        assert asked(port, path, Host=twice)[0] == 403
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
            assert asked(port, path, method)[:2] == (501, b"Not Implemented"), method
        with socket.create_connection((LOOPBACK, port)) as line:
            line.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            assert line.recv(100)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((LOOPBACK, port), 5)


def test_two_pages_have_two_secrets_and_a_port_that_is_taken_is_refused(tmp_path):
    with served(view_of(tmp_path)) as (port, path), served(view_of(tmp_path)) as (_, other):
        assert path != other
        with pytest.raises(UserError, match=rf"port {port} of 127.0.0.1: .*choose another --watch-port"):
            serving(view_of(tmp_path), port).__enter__()


def test_it_listens_on_this_machine_only(tmp_path):
    with closing(LiveServer(view_of(tmp_path), 0).socket) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


# What it costs the training.


def test_the_bits_are_the_same_while_many_look_and_hang_on(parts, tmp_path):
    alone = watched(parts, None, tmp_path / "alone")
    view, stop, seen = view_of(tmp_path / "watched"), threading.Event(), []
    with served(view) as (port, path), ExitStack() as hanging:

        def look():
            while not stop.is_set():
                seen.append(asked(port, path)[0])

        looking = threading.Thread(target=look)
        looking.start()
        for _ in range(MOST_CONNECTIONS - 2):
            hanging.enter_context(socket.create_connection((LOOPBACK, port))).sendall(b"GET / HT")
        other = watched(parts, view, tmp_path / "watched")
        stop.set()
        looking.join()
    assert {*seen} == {200}
    first, second = named_state(alone.state), named_state(other.state)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    pd.testing.assert_frame_equal(alone.history, other.history)


def test_connections_without_end_neither_block_nor_end_anything(parts, tmp_path):
    view = view_of(tmp_path)
    with served(view) as (port, _), ExitStack() as hanging:
        lines = [hanging.enter_context(socket.create_connection((LOOPBACK, port))) for _ in range(3 * MOST_CONNECTIONS)]
        for line in lines:
            line.settimeout(20)
        # What is too much is closed at once; the others may keep silent for a while.
        assert lines[-1].recv(1) == b""
        watched(parts, view, tmp_path, rounds=2)
    assert view.ended.is_set()


def test_who_follows_hears_of_the_end_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(live_server, "BETWEEN_STATES", 3600)
    view, heard = view_of(tmp_path), []
    with served(view) as (port, path):
        follower = threading.Thread(target=lambda: heard.append(json.loads(asked(port, f"{path}state")[1])))
        follower.start()
        view.end("Finished.")
        follower.join()
        view.end("Something else.")
    assert heard[0]["ended"]
    assert heard[0]["parts"]["end"] == "Finished."
    assert view.known().ending == "Finished."


# The commands.


def test_the_command_prints_the_address_and_ends_as_always(tmp_path):
    more = ["--rounds", "2", "--jobs", "2", "--method", "feddar-wa"]
    plainly = command("run", "synthetic", *more, "--out", "plain", cwd=tmp_path)
    said = command("run", "synthetic", *more, "--versus", "fedavg", "--watch", "--out", "watched", cwd=tmp_path)
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", said)
    assert "http" not in plainly
    assert (tmp_path / "plain" / METRICS_FILE).read_bytes() == (tmp_path / "watched" / METRICS_FILE).read_bytes()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((LOOPBACK, urlsplit(address).port), 5)


def test_flare_cannot_be_watched(tables, tmp_path):
    make_study(tables).write(tmp_path / "study.toml")
    named = ["--config", "study.toml", "--data", tables, "--engine", "nvflare"]
    assert "leave out --watch" in command("simulate", *named, "--watch", cwd=tmp_path, code=2)


def test_a_rehearsal_can_be_watched(tables, tmp_path):
    make_study(tables, rounds=1).write(tmp_path / "study.toml")
    named = ["--config", "study.toml", "--data", tables, "--engine", "local"]
    assert "http://127.0.0.1:" in command("simulate", *named, "--watch", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_stopping_is_as_without_it(tmp_path, by):
    named = ["run", "synthetic", "--jobs", "2", "--out", "stopped"]
    process = Process(tmp_path, "log", *named, "--rounds", "5000", "--validation", "0", "--watch")
    process.wait_for(r"http://\S+/")
    address = urlsplit(re.search(r"http://\S+/", process.text())[0])
    with socket.create_connection((LOOPBACK, address.port)):
        while json.loads(asked(address.port, f"{address.path}state")[1])["title"].startswith(("round 0 ", "round 1 ")):
            pass
        process.running.send_signal(by)
        assert process.ends() == (1 if by == signal.SIGINT else -by)
    assert ("stopped; go on with: feddar run" in process.text()) == (by == signal.SIGINT)
    done = read_metrics(tmp_path / "stopped" / METRICS_FILE)["round"].max()
    assert done >= 1


# The page in a browser.


def until(page, expression):
    """Wait until an expression is true in the page; Playwright's own wait is forbidden by the page's policy."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


@pytest.fixture
def training(tmp_path, parts):
    """A training in a thread that goes on, round by round, when it is let."""
    view, gate = view_of(tmp_path, title=HOSTILE), threading.Semaphore(0)

    def wait(_):
        gate.acquire()

    def work():
        hooks = {"callbacks": [view.round_ended, wait], "listeners": [view.heard]}
        feddar.train(parts[0], test=parts[1], out=tmp_path / "run", **hooks, **OPTIONS)
        view.end(f"Finished. The results are in {tmp_path}.")

    thread = threading.Thread(target=work)
    thread.start()
    yield view, gate
    gate.release(10)
    thread.join()


def test_the_page_grows_in_both_themes(training, browser, tmp_path):
    view, gate = training
    with serving(view) as address:
        opened = Opened(browser, address, color_scheme="light")
        page = opened.page
        dark = Opened(browser, address, color_scheme="dark")

        def wait_for_round(number):
            for each in (page, dark.page):
                until(each, f"document.querySelector('[data-part=now]').innerText.includes('{number} of 4')")
                until(
                    each,
                    f"[...document.querySelectorAll('#metric-0 polyline')].every((line) => "
                    f"line.getAttribute('points').split(' ').length >= {number})",
                )

        wait_for_round(1)
        assert page.locator("h1").inner_text() == HOSTILE
        gate.release()
        wait_for_round(2)
        assert page.locator("#metric-0 polyline").count() == 3
        assert page.locator("[data-part=seats] tbody tr").count() == 4
        assert page.locator("[data-part=seats] tbody th").all_inner_texts() == [f"site-{i}" for i in range(4)]
        assert page.locator("section:has([data-part=notes])").is_hidden()
        assert page.title().startswith("round 2 of 4")
        for width in (1400, 360):
            opened.fits(width, 40)
            dark.fits(width, 40)
        page.set_viewport_size({"width": 1400, "height": 900})
        ground = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(ground) != dark.page.evaluate(ground)
        page.locator("#theme").click()
        assert page.evaluate(ground) == dark.page.evaluate(ground)
        page.locator("#metric-0 .field").hover()
        assert page.locator("#metric-0 .readout").inner_text().startswith("round ")
        page.mouse.move(0, 0)
        assert page.locator("#metric-0 .readout").is_hidden()
        gate.release(10)
        until(page, "document.querySelector('[data-part=end]').innerText.startsWith('Finished.')")
        until(dark.page, "document.querySelector('[data-part=end]').innerText.startsWith('Finished.')")
        assert page.title() == HOSTILE
        assert opened.wrong == dark.wrong == []
    for each in (opened, dark):
        each.page.wait_for_timeout(100)
        assert each.page.locator("[data-part=end]").inner_text() == f"Finished. The results are in {tmp_path}."
        assert each.wrong == []  # and nobody asked a server that is gone
        each.context.close()


def test_a_hidden_page_does_not_ask_and_one_without_server_says_so(training, browser):
    view, _ = training
    with serving(view) as address:
        opened = Opened(browser, address)
        page = opened.page
        until(page, "document.querySelector('[data-part=now]').innerText.includes('1 of 4')")
        hide = "(now) => { Object.defineProperty(document, 'hidden', { value: now, configurable: true });"
        hide += "document.dispatchEvent(new Event('visibilitychange')); }"
        page.evaluate(hide, True)
        until(page, "!following")
        asked_for = []
        page.on("request", lambda request: asked_for.append(request.url))
        page.wait_for_timeout(1500)
        assert asked_for == []
        page.evaluate(hide, False)
        with page.expect_response(lambda answer: answer.url.endswith("state")):
            pass
        page.evaluate(hide, True)
        until(page, "!following")
        assert opened.wrong == []
    page.evaluate(hide, False)
    until(page, "document.querySelector('[data-part=end]').innerText.startsWith('The run has ended')")
    assert str(view.known().folder) in page.locator("[data-part=end]").inner_text()
    opened.context.close()


def test_errors_are_said_on_the_page(tmp_path):
    from feddar.cli.watch import watching

    with (
        pytest.raises(TrainingError),
        watching(True, None, "client", "a title", "about", tmp_path) as view,
    ):
        raise TrainingError("too few sites answered.")
    assert view.known().ending == "Ended by an error: too few sites answered."
