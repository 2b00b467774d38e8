"""Logging in to the dashboard: roles and paths, cookies, other sites, guesses, and what is recorded."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http.cookies import Morsel, SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient as Http
from httpx2 import Response

from certificates.files import TlsDirectory
from certificates.identity import Role
from coordinator.config import CoordinatorConfig
from coordinator.dashboard import login, sessions
from coordinator.dashboard.auth import Access, DashboardAuth
from coordinator.dashboard.routes import Routes
from coordinator.dashboard.server import DashboardServer
from coordinator.dashboard.sessions import Sessions, User
from tests.issued import Certificates
from tests.unit.coordinator.dashboard.test_http import Coordinator
from tests.unit.web.test_headers import EXPECTED
from web.api_keys import KeysFile, changed_keys, new_key
from wire.audit import AuditLog
from wire.ids import id_text
from wire.peer_secrets import MAX_TRIES, WINDOW_S, RefusedPeers
from wire.transport import Transport, TransportSettings

TOKEN = "correct-horse-battery"
PLAIN_COOKIE = "stageline-session"
HTTPS_COOKIE = "__Host-stageline-session"
INSECURE, CERTIFIED = TransportSettings(insecure=True), TransportSettings(tls_directory=Path("head"))
HTML = {"Accept": "text/html,application/xhtml+xml"}


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Dashboard:
    """A served dashboard with three keys, its clock, its audit log, and all that it logged."""

    def __init__(self, folder: Path) -> None:
        self.coordinator, self.clock = Coordinator(), Clock()
        self.keys_file, self.audit_file = folder / "keys.toml", folder / "audit.jsonl"
        self.keys = {role: self.new_key(role) for role in ("viewer", "operator", "user")}
        self.audit = AuditLog(self.audit_file, "coordinator")
        self.refused = RefusedPeers(self.clock, audit=self.audit)
        self.url = ""

    def new_key(self, role: str, **limits: Any) -> str:
        text, key = new_key(tenant="acme", role=role, **limits)
        with changed_keys(self.keys_file) as keys:
            keys[key.id] = key
        return text

    def revoke(self, text: str) -> None:
        with changed_keys(self.keys_file) as keys:
            del keys[id_of(text)]

    def path(self, path: str) -> str:
        """A path of the table with the names of what there is."""
        request_id = "0199" if "traces" in path else id_text(self.coordinator.request.id)
        names = {"{name}": "main.js" if "static" in path else "worker-0", "{request_id}": request_id}
        for name, value in names.items():
            path = path.replace(name, value)
        return path

    @property
    def origin(self) -> dict[str, str]:
        """What a browser says of its own pages."""
        return {"Origin": self.url.rstrip("/"), "Sec-Fetch-Site": "same-origin"}

    def records(self) -> list[dict[str, Any]]:
        self.audit.close()
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


def id_of(text: str) -> str:
    return text.split("-")[2]


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    made = Dashboard(tmp_path)
    yield made
    made.audit.close()


@asynccontextmanager
async def served(
    dashboard: Dashboard, *, listen: str = "127.0.0.1:0", certificates: Path | None = None
) -> AsyncIterator[Http]:
    """A client that keeps no cookies of its own."""
    tls = None if certificates is None else Transport(TlsDirectory(certificates)).http_context()
    server = DashboardServer(
        dashboard.coordinator.sources,
        listen=listen,
        token=TOKEN,
        refused=dashboard.refused,
        tls=tls,
        keys=KeysFile(dashboard.keys_file),
        needs_login=True,
        clock=dashboard.clock,
    )
    await server.start()
    dashboard.url = server.url
    trusted: Any = True
    if certificates is not None:
        trusted = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    try:
        async with Http(base_url=server.url, verify=trusted) as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture
async def http(dashboard: Dashboard) -> AsyncIterator[Http]:
    async with served(dashboard) as client:
        yield client


async def post_login(http: Http, text: str, **headers: str) -> Response:
    response = await http.post("/login", json={"key": text}, headers=headers)
    http.cookies.clear()
    return response


def morsel(response: Response) -> Morsel[str]:
    (cookie,) = SimpleCookie(response.headers["Set-Cookie"]).values()
    return cookie


async def cookie_of(http: Http, text: str) -> dict[str, str]:
    """The header of a browser that logged in."""
    response = await post_login(http, text)
    assert response.status_code == 200, response.text
    cookie = morsel(response)
    return {"Cookie": f"{cookie.key}={cookie.value}"}


async def status_of(http: Http, headers: Mapping[str, str], path: str = "/api/status") -> int:
    return (await http.get(path, headers=headers)).status_code


# Roles and paths

VIEW, ACT, OPEN = "view", "act", "open"
NEEDS = {
    "GET /": VIEW,
    "GET /static/{name}": OPEN,
    "GET /favicon.ico": OPEN,
    "GET /api/status": VIEW,
    "GET /api/activity": VIEW,
    "GET /api/traces": VIEW,
    "GET /api/traces/{request_id}": VIEW,
    "GET /metrics": VIEW,
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "POST /api/token": ACT,
    "POST /api/requests/{request_id}/cancel": ACT,
    "POST /api/workers/{name}/drain": ACT,
    "GET /login": OPEN,
    "POST /login": OPEN,
    "POST /logout": VIEW,
}
"""Which users a path is for: a path of the dashboard that is not listed fails the test below."""
FILES = ("GET /", "GET /login", "GET /static/{name}", "GET /favicon.ico")


def table() -> list[str]:
    asks = login.Login(None, TOKEN, RefusedPeers(Clock()), is_tls=False)
    auth = DashboardAuth("127.0.0.1", TOKEN, RefusedPeers(Clock()), login=asks)
    routes = Routes(Coordinator().sources, auth).table()
    return [f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}" for route in routes]


@pytest.mark.parametrize("way", ["cookie", "bearer"])
@pytest.mark.parametrize("who", ["nobody", "user", "viewer", "operator", "token", "revoked"])
async def test_every_path_is_for_the_roles_of_the_table(
    dashboard: Dashboard, http: Http, way: str, who: str
) -> None:
    for path in table():
        headers = await headers_of(dashboard, http, way, who)
        method, _, template = path.partition(" ")
        body = {"key": TOKEN} if path == "POST /login" else None
        response = await http.request(method, dashboard.path(template), headers=headers, json=body)
        http.cookies.clear()
        may = {OPEN: True, VIEW: who in ("viewer", "operator", "token"), ACT: who in ("operator", "token")}
        is_permitted = may[NEEDS[path]]
        assert (response.status_code < 300) is is_permitted, (path, response.text)
        if not is_permitted:
            is_known = who == "viewer" or (who, way) == ("user", "bearer")
            assert response.status_code == (403 if is_known else 401), path
            assert (dashboard.coordinator.cancelled, dashboard.coordinator.drained) == ([], [])
        is_file = is_permitted and path in FILES
        expected = {**EXPECTED, "Cache-Control": "no-cache" if is_file else "no-store"}
        assert {name: response.headers.get(name) for name in EXPECTED} == expected, path
        dashboard.clock.now_s += WINDOW_S  # its refusals are not those of someone who guesses


async def headers_of(dashboard: Dashboard, http: Http, way: str, who: str) -> dict[str, str]:
    """Headers of a program with a key, or of a browser that logged in with it."""
    if who == "nobody" or (who, way) == ("user", "cookie"):  # whose login is refused
        return {}
    text = TOKEN if who == "token" else dashboard.keys.get(who) or dashboard.new_key("operator")
    if way == "bearer":
        headers = {"Authorization": f"Bearer {text}"}
    else:
        headers = await cookie_of(http, text) | dashboard.origin
    if who == "revoked":
        dashboard.revoke(text)
    return headers


def test_every_access_has_a_meaning() -> None:
    assert {access.value for access in Access} == set(NEEDS.values())


async def test_a_browser_is_sent_to_the_login_page_and_scripts_are_not(http: Http) -> None:
    for path in ("/", "/api/status"):
        response = await http.get(path, headers=HTML)
        assert (response.status_code, response.headers["Location"]) == (303, "/login")
        assert (await http.get(path)).status_code == 401
    page = (await http.get("/login", headers=HTML)).text
    for name in ("login.js", "login.css", "theme.js"):
        assert f"/static/{name}" in page
        assert await status_of(http, {}, f"/static/{name}") == 200
    assert (await http.post("/api/token", headers=HTML)).status_code == 401


async def test_the_status_says_who_one_is(dashboard: Dashboard, http: Http) -> None:
    key = dashboard.keys["viewer"]
    status = (await http.get("/api/status", headers=await cookie_of(http, key))).json()
    assert status["user"] == {"name": f"key {id_of(key)} of tenant acme", "role": "viewer"}
    assert not status["can_act"]
    status = (await http.get("/api/status", headers=await cookie_of(http, TOKEN))).json()
    assert status["user"] == {"name": "operator token", "role": "operator"}
    assert status["can_act"]


# Sessions


async def test_the_cookie_of_plain_text(dashboard: Dashboard, http: Http) -> None:
    response = await post_login(http, dashboard.keys["viewer"])
    cookie = morsel(response)
    assert cookie.key == PLAIN_COOKIE
    assert (cookie["httponly"], cookie["secure"], cookie["path"]) == (True, "", "/")
    assert (cookie["samesite"].lower(), cookie["domain"], cookie["max-age"]) == ("strict", "", "")


async def test_the_cookie_of_https(dashboard: Dashboard, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path).of("head", Role.COORDINATOR)
    async with served(dashboard, listen="0.0.0.0:0", certificates=certificates) as http:
        response = await post_login(http, dashboard.keys["viewer"], **dashboard.origin)
        cookie = morsel(response)
        assert cookie.key == HTTPS_COOKIE
        assert (cookie["httponly"], cookie["secure"], cookie["path"]) == (True, True, "/")
        assert (cookie["samesite"].lower(), cookie["domain"], cookie["max-age"]) == ("strict", "", "")
        assert response.headers["Strict-Transport-Security"]
        assert await status_of(http, {"Cookie": f"{HTTPS_COOKIE}={cookie.value}"}) == 200
        assert await status_of(http, {"Cookie": f"{PLAIN_COOKIE}={cookie.value}"}) == 401
        assert await status_of(http, {}) == 401


async def test_a_session_is_random_and_tells_nothing_of_the_key(dashboard: Dashboard, http: Http) -> None:
    key = dashboard.keys["viewer"]
    values = [morsel(await post_login(http, key)).value for _ in range(4)]
    assert len(set(values)) == 4
    for value in values:
        assert len(value) == 43
        assert id_of(key) not in value and key[-20:] not in value


async def test_a_given_cookie_is_never_adopted(dashboard: Dashboard, http: Http) -> None:
    planted = "A" * 43
    response = await post_login(http, dashboard.keys["viewer"], Cookie=f"{PLAIN_COOKIE}={planted}")
    assert morsel(response).value != planted
    assert await status_of(http, {"Cookie": f"{PLAIN_COOKIE}={planted}"}) == 401


async def test_another_login_ends_the_former_session(dashboard: Dashboard, http: Http) -> None:
    first = await cookie_of(http, dashboard.keys["viewer"])
    second = morsel(await post_login(http, dashboard.keys["operator"], **first))
    assert await status_of(http, first) == 401
    assert await status_of(http, {"Cookie": f"{PLAIN_COOKIE}={second.value}"}) == 200


async def test_logging_out_ends_the_session(dashboard: Dashboard, http: Http) -> None:
    cookie = await cookie_of(http, dashboard.keys["viewer"])
    response = await http.post("/logout", headers=cookie | dashboard.origin)
    assert (response.status_code, morsel(response).value, morsel(response)["max-age"]) == (200, "", "0")
    assert await status_of(http, cookie) == 401
    assert (await http.post("/logout", headers=cookie | dashboard.origin)).status_code == 401


async def test_a_session_ends_after_an_hour_without_use(dashboard: Dashboard, http: Http) -> None:
    cookie = await cookie_of(http, dashboard.keys["viewer"])
    for _ in range(3):
        dashboard.clock.now_s += sessions.MAX_IDLE_S - 1
        assert await status_of(http, cookie) == 200
    dashboard.clock.now_s += sessions.MAX_IDLE_S
    assert await status_of(http, cookie) == 401


async def test_a_session_ends_after_twelve_hours_of_use(dashboard: Dashboard, http: Http) -> None:
    cookie = await cookie_of(http, dashboard.keys["viewer"])
    for _ in range(23):
        dashboard.clock.now_s += sessions.MAX_LIFE_S / 24
        assert await status_of(http, cookie) == 200
    dashboard.clock.now_s += sessions.MAX_LIFE_S / 24
    assert await status_of(http, cookie) == 401


async def test_sessions_end_with_their_key(dashboard: Dashboard, http: Http) -> None:
    revoked, other = await cookie_of(http, dashboard.keys["operator"]), await cookie_of(http, TOKEN)
    dashboard.revoke(dashboard.keys["operator"])
    assert await status_of(http, revoked) == 401
    assert await status_of(http, other) == 200
    assert await status_of(http, {"Authorization": f"Bearer {dashboard.keys['operator']}"}) == 401


async def test_a_key_that_ends_ends_its_sessions(
    dashboard: Dashboard, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = dashboard.new_key("viewer", expires=datetime.now(UTC) + timedelta(hours=1))
    cookie = await cookie_of(http, key)
    assert await status_of(http, cookie) == 200
    late = datetime.now(UTC) + timedelta(hours=2)
    monkeypatch.setattr(KeysFile, "_now", lambda self: late)
    assert await status_of(http, cookie) == 401
    response = await post_login(http, key)
    assert response.status_code == 401
    assert "the API key ended at" in response.json()["error"]


async def test_a_session_has_the_present_role_of_its_key(dashboard: Dashboard, http: Http) -> None:
    cookie = await cookie_of(http, dashboard.keys["operator"])
    for role, expected in (("viewer", {"role": "viewer"}), ("user", None)):
        with changed_keys(dashboard.keys_file) as keys:
            entry = keys[id_of(dashboard.keys["operator"])]
            object.__setattr__(entry, "role", role)
        response = await http.get("/api/status", headers=cookie)
        assert response.status_code == (200 if expected else 401)
        if expected:
            assert response.json()["user"]["role"] == expected["role"]


def test_sessions_are_bounded_in_all_and_per_user() -> None:
    clock = Clock()
    kept = Sessions(clock)
    first = kept.begin(User("first", is_operator=False))
    own = [kept.begin(User("own", is_operator=False)) for _ in range(sessions.MAX_USER_SESSIONS + 1)]
    assert kept.find(own[0]) is None
    assert kept.find(own[1]) is not None and kept.find(first) is not None
    for number in range(sessions.MAX_SESSIONS):
        kept.begin(User(str(number), is_operator=False))
    assert len(kept) == sessions.MAX_SESSIONS
    assert kept.find(first) is None


# Other sites

OTHERS = [
    {},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"},
]


@pytest.mark.parametrize("path", ["/api/workers/worker-0/drain", "/api/token", "/logout"])
async def test_pages_of_other_sites_do_nothing_with_the_cookie(
    dashboard: Dashboard, http: Http, path: str
) -> None:
    cookie = await cookie_of(http, dashboard.keys["operator"])
    for others in OTHERS:
        response = await http.post(path, headers=cookie | others)
        assert response.status_code == 403, others
        assert "does not come from a page of this dashboard" in response.json()["error"]
        assert dashboard.coordinator.drained == []
        assert await status_of(http, cookie) == 200
    assert (await http.post(path, headers=cookie | dashboard.origin)).status_code < 300


async def test_the_scheme_belongs_to_the_origin(dashboard: Dashboard, http: Http) -> None:
    cookie = await cookie_of(http, dashboard.keys["operator"])
    origin = {"Origin": dashboard.origin["Origin"].replace("http:", "https:")}
    assert (await http.post("/api/token", headers=cookie | origin)).status_code == 403


async def test_pages_of_other_sites_log_nobody_in(dashboard: Dashboard, http: Http) -> None:
    for others in OTHERS[1:]:
        response = await post_login(http, dashboard.keys["viewer"], **others)
        assert response.status_code == 403, others
        assert "Set-Cookie" not in response.headers
    assert (await post_login(http, dashboard.keys["viewer"])).status_code == 200


# Bodies

JSON, FORM = "application/json", "application/x-www-form-urlencoded"


async def test_a_form_logs_in_as_json_does(dashboard: Dashboard, http: Http) -> None:
    response = await http.post("/login", data={"key": dashboard.keys["viewer"]})
    assert (response.status_code, response.json()["role"]) == (200, "viewer")


@pytest.mark.parametrize(
    ("kind", "status", "contents"),
    [
        (JSON, 400, (b"{", b"[" * 4000, b'{"key": 7}', b'{"key": "a", "role": "operator"}', b'["key"]')),
        (FORM, 400, (b"", b"key=a&key=b", b"key=a&b=c&d=e", b"\xff", b"key")),
        ("text/plain", 415, (b'{"key": "a"}',)),
        (JSON, 413, (b"x" * 5000,)),
    ],
)
async def test_other_bodies_are_refused(
    http: Http, kind: str, status: int, contents: tuple[bytes, ...]
) -> None:
    for content in contents:
        response = await http.post("/login", content=content, headers={"Content-Type": kind})
        assert response.status_code == status, content
        assert "Set-Cookie" not in response.headers


# Guesses


@pytest.mark.parametrize("way", ["login", "bearer"])
async def test_guesses_are_limited_and_keys_still_pass(dashboard: Dashboard, http: Http, way: str) -> None:
    async def tried(text: str) -> Response:
        if way == "login":
            return await post_login(http, text)
        return await http.get("/api/status", headers={"Authorization": f"Bearer {text}"})

    for number in range(MAX_TRIES):
        assert (await tried(f"wrong-{number}")).status_code == 401
    for text in ("wrong", TOKEN):
        response = await tried(text)
        assert response.status_code == 429
        assert 0 < int(response.headers["Retry-After"]) <= WINDOW_S
        assert f"{MAX_TRIES} attempts" in response.json()["error"]
    assert (await tried(dashboard.keys["viewer"])).status_code == 200
    dashboard.clock.now_s += WINDOW_S
    assert (await tried(TOKEN)).status_code == 200


# Records


async def test_logins_and_deeds_are_audited_without_secrets(
    dashboard: Dashboard, http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    operator, viewer, user = (dashboard.keys[role] for role in ("operator", "viewer", "user"))
    cookie = await cookie_of(http, operator) | dashboard.origin
    cancel = dashboard.path("/api/requests/{request_id}/cancel")
    assert (await http.post(cancel, headers=cookie)).status_code == 200
    drain = "/api/workers/worker-0/drain"
    assert (await http.post(drain, headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 202
    assert (await http.post(drain, headers={"Authorization": f"Bearer {viewer}"})).status_code == 403
    assert (await post_login(http, user)).status_code == 403
    assert (await post_login(http, "a wrong secret of someone")).status_code == 401
    other = cookie | {"Origin": "https://evil.example"}
    assert (await http.post(drain, headers=other)).status_code == 403
    assert (await post_login(http, viewer, Origin="https://evil.example")).status_code == 403
    assert (await http.post("/logout", headers=cookie)).status_code == 200
    records = dashboard.records()
    who = {role: f"key {id_of(text)} of tenant acme" for role, text in dashboard.keys.items()}
    assert [(record["action"], record["outcome"], record["who"]) for record in records] == [
        ("dashboard.login", "ok", who["operator"]),
        ("request.cancel", "ok", who["operator"]),
        ("worker.drain", "ok", "operator token"),
        ("access.denied", "refused", who["viewer"]),
        ("dashboard.login", "refused", who["user"]),
        ("dashboard.login", "refused", "host 127.0.0.1"),
        ("access.denied", "refused", who["operator"]),
        ("dashboard.login", "refused", "host 127.0.0.1"),
        ("dashboard.logout", "ok", who["operator"]),
    ]
    assert {record["host"] for record in records} == {"127.0.0.1"}
    assert records[1]["request_id"] == id_text(dashboard.coordinator.request.id)
    assert records[2]["worker"] == "worker-0"
    assert records[5]["problem"] == "the API key is wrong, or was revoked"
    own = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert len([text for text in own if text.startswith("refused ")]) == 5
    texts = "".join(own) + dashboard.audit_file.read_text()
    for secret in (operator, viewer, user, TOKEN, "a wrong secret", cookie["Cookie"].partition("=")[2]):
        assert secret not in texts
        assert secret[-20:] not in texts


async def test_without_keys_on_loopback_there_is_no_login() -> None:
    server = DashboardServer(Coordinator().sources, listen="127.0.0.1:0", token=TOKEN)
    await server.start()
    try:
        async with Http(base_url=server.url) as http:
            assert (await http.get("/api/status")).json()["user"] is None
            for method, path in (("GET", "/login"), ("POST", "/login"), ("POST", "/logout")):
                assert (await http.request(method, path)).status_code == 404
            assert (await http.get("/", headers=HTML)).status_code == 200
    finally:
        await server.stop()


# Settings


@pytest.mark.parametrize(
    ("settings", "needs_login"),
    [
        ({}, False),
        ({"keys_file": Path("keys.toml")}, True),
        ({"http": None}, False),
        ({"http": "0.0.0.0:7481", "transport": INSECURE}, False),
        ({"http": "0.0.0.0:7481", "transport": INSECURE, "keys_file": Path("keys.toml")}, True),
        ({"http": "0.0.0.0:7481", "transport": CERTIFIED, "keys_file": Path("keys.toml")}, True),
        ({"http": "0.0.0.0:7481", "transport": CERTIFIED, "token": TOKEN}, True),
        ({"transport": CERTIFIED}, False),
    ],
)
def test_keys_and_other_hosts_need_a_login(settings: dict[str, Any], needs_login: bool) -> None:
    assert CoordinatorConfig(num_stages=1, **settings).needs_login is needs_login


def test_a_dashboard_that_nobody_could_use_is_refused_at_the_start() -> None:
    expected = (
        r"--http 0\.0\.0\.0:7481 can be reached from other hosts, and nobody could log in: give "
        "--keys-file FILE with keys of role viewer or operator, or --token-file FILE, or --no-http"
    )
    with pytest.raises(ValueError, match=expected):
        CoordinatorConfig(num_stages=1, http="0.0.0.0:7481", transport=CERTIFIED)
    with pytest.raises(
        ValueError, match="--keys-file is for the dashboard: it cannot be used with --no-http"
    ):
        CoordinatorConfig(num_stages=1, http=None, keys_file=Path("keys.toml"))
