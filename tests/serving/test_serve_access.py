"""Access to `cspd serve`: pages of other sites, and clients without the API key, are refused."""

from __future__ import annotations

import json

import pytest
from serving import message_of, run_command, served, status_of
from stores import small_checkpoint

from cspd.cli import main

KEY = "a-key.of_16~bytes"
IMAGE = json.dumps({"model": "mar", "methods": []})  # status 400, and nothing is generated


@pytest.fixture(scope="module")
def site(engines):
    with served(engines) as site:
        yield site


def test_its_own_names(site):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1", f"127.0.0.1:{site.port}", "[::1]", "[::1]:8000"):
        assert site.ask("/api/status", Host=host).status == 200
        assert site.ask("/api/status", Host=host, Origin=f"http://{host.lower()}").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "localhost@evil.example", "::1", ""]
)
def test_other_hosts_are_refused(host, site):
    """For example a page of evil.example, whose name resolves to 127.0.0.1 (DNS rebinding)."""
    for path, body in (("/v1/models", None), ("/metrics", None), ("/api/models", None), ("/api/images", IMAGE)):
        answer = site.ask(path, body, Host=host)
        assert answer.status == 403 and repr(host) in message_of(answer)


def test_the_page_and_the_probes_are_public(site):
    """Also behind a proxy that was not announced: the page then shows why the API refuses."""
    for path in ("/", "/page.js", "/page.css", "/docs", "/openapi.json", "/health", "/ready"):
        assert site.ask(path, Host="demo.example.org", Origin="http://demo.example.org").status == 200


def test_visitors_behind_a_proxy(engines):
    """They are told apart by X-Forwarded-For, if the proxy is trusted."""
    long = json.dumps({"prompt": "three", "stream": True, "method": "ar", "num_iter": 64, "num_sampling_steps": 300})
    for proxies, statuses in ((["127.0.0.0/8"], [200] * 6), ((), [200] + [429] * 5)):
        with served(engines, proxies, most_each=1) as site:
            forwarded = [{"Cookie": None, "X-Forwarded-For": f"10.0.0.{visitor}"} for visitor in range(6)]
            answers = [site.ask("/v1/images/generations", long, **headers) for headers in forwarded]
            assert [answer.status for answer in answers] == statuses
            for answer in answers:
                answer.close()


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "file://", "http://127.0.0.1.evil.example"]
)
def test_other_sites_are_refused(origin, site):
    """A page of another site that a user has open."""
    for path, body in (("/api/status", None), ("/api/images", IMAGE)):
        answer = site.ask(path, body, Origin=origin)
        assert answer.status == 403 and repr(origin) in json.load(answer)["detail"]
        assert "access-control-allow-origin" not in answer.headers
    assert site.ask("/api/images", method="OPTIONS", Origin=origin).status == 403


def test_forms_of_other_sites_are_refused(site):
    """Browsers let every site send these content types without asking."""
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert site.ask("/api/images", IMAGE, **{"Content-Type": kind}).status == 415
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert site.ask("/api/images", IMAGE, **{"Content-Type": kind}).status == 400


def test_allowed_names(engines):
    access = {"hosts": ["gpu1", "demo.example.org"], "origins": ["demo.example.org"]}
    with served(engines, any_address=True, **access) as site:
        for host in ("gpu1:8000", "Demo.Example.org", "10.0.0.1:8000", "[2001:db8::1]:8000"):
            assert site.ask("/api/status", Host=host).status == 200
            assert site.ask("/api/status", Host=host, Origin="https://demo.example.org").status == 200  # of a proxy
            assert site.ask("/api/status", Host=host, Origin="http://gpu1").status == 403
        assert site.ask("/api/status", Host="evil.example").status == 403


def test_the_api_key(engines):
    with served(engines, key=KEY) as site:
        for path, body in (("/api/models", None), ("/api/images", IMAGE), ("/api/none", None)):
            for wrong in (None, KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xe9"):
                answer = site.ask(path, body, Authorization=wrong)
                assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                assert KEY not in answer.read().decode()
        for right in (f"Bearer {KEY}", f"bearer {KEY}"):
            assert site.ask("/api/models", Authorization=right).status == 200
            assert site.ask("/api/images", IMAGE, Authorization=right).status == 400
        for path in ("/", "/page.js"):  # the page asks for the key
            assert site.ask(path).status == 200


def test_headers_against_other_sites(site):
    """A page of another site may not show this one in a frame, and nothing is run that did not come from here."""
    for path, status in (("/", 200), ("/page.js", 200), ("/v1/models", 200), ("/api/none", 404), ("/docs", 200)):
        answer = site.ask(path)
        assert answer.status == status
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert ("default-src 'self'" in policy) == (path != "/docs")


def test_the_command_takes_the_key_from_the_environment(monkeypatch, capsys):
    """The key is not printed."""
    monkeypatch.setenv("CSPD_API_KEY", KEY)
    statuses = []

    def visit(address):
        for headers in ({"X-Forwarded-For": "10.0.0.9"}, {"Authorization": f"Bearer {KEY}"}):
            statuses.append(status_of(f"{address}/api/status", headers))

    options = ["--host", "0.0.0.0", "--trust-proxy", "10.0.0.0/29,127.0.0.1"]
    assert run_command(visit, "--checkpoint", small_checkpoint(), *options) == 130
    said = capsys.readouterr()
    assert statuses == [401, 200] and KEY not in said.out + said.err and "warning" not in said.err
    assert '"client": "10.0.0.9"' in said.err  # of the log


def test_the_command_without_a_key_warns(monkeypatch, capsys):
    monkeypatch.delenv("CSPD_API_KEY", raising=False)
    statuses = []

    def visit(address):
        for host in ("gpu1", "evil.example"):
            statuses.append(status_of(f"{address}/api/status", {"Host": host}))

    options = ["--host", "0.0.0.0", "--allowed-hosts", "gpu1,gpu1.example.org"]
    assert run_command(visit, "--checkpoint", small_checkpoint(), *options) == 130
    assert statuses == [200, 403]
    warning = capsys.readouterr().err
    assert "cspd: warning: " in warning and "--api-key" in warning and "CSPD_API_KEY" in warning


@pytest.mark.parametrize(
    "options, key",
    [
        (["--api-key", "a s\xe9cret"], None),
        ([], ""),
        (["--allowed-hosts", "http://demo.example.org"], None),
        (["--trust-proxy", "demo.example.org"], None),
        (["--trust-proxy", ""], None),
    ],
)
def test_bad_keys_and_names(options, key, monkeypatch, capsys):
    if key is not None:
        monkeypatch.setenv("CSPD_API_KEY", key)
    with pytest.raises(SystemExit) as end:
        main(["serve", *options])
    assert end.value.code == 2 and "cret" not in capsys.readouterr().err
