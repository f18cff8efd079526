from __future__ import annotations

from pathlib import Path

import pytest

from locustfiles.arms import ArmError, api_key, auth_headers, parse_arm, parse_arms


def test_a_full_spec() -> None:
    arm = parse_arm(
        "cache=http://127.0.0.1:8101;caching=on;drafts=0;device=sim0;log=results/servers/sim/cache.log"
    )
    assert (arm.name, arm.url) == ("cache", "http://127.0.0.1:8101")
    assert arm.metrics_urls == ("http://127.0.0.1:8101/metrics",)
    assert arm.declared == {"caching": "on", "drafts": "0", "device": "sim0"}
    assert arm.log == Path("results/servers/sim/cache.log")
    assert not arm.behind_proxy


def test_a_proxy_names_its_backends_metrics() -> None:
    arm = parse_arm("proxy=http://host:4000/;metrics=http://host:8001,http://host:8002/metrics")
    assert arm.url == "http://host:4000"
    assert arm.metrics_urls == ("http://host:8001/metrics", "http://host:8002/metrics")
    assert arm.behind_proxy


@pytest.mark.parametrize("url", ["http://host:1/v1", "http://host:1/v1/", "http://host:1/", "http://host:1"])
def test_the_base_url_is_without_v1(url: str) -> None:
    assert parse_arm(f"a={url}").url == "http://host:1"


def test_order_is_kept_and_the_first_is_the_base() -> None:
    assert [arm.name for arm in parse_arms("mtp=http://h:2 cache=http://h:1")] == ["mtp", "cache"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("Cache=http://h:1", "use only a-z"),
        ("=http://h:1", "use only a-z"),
        ("cache", "no URL"),
        ("cache=", "no URL"),
        ("cache=h:8001", "no http"),
        ("cache=ftp://h:1", "no http"),
        ("cache=http://", "no http"),
        ("cache=http://h:99999", "cannot be read"),
        ("cache=http://h:0", "no http"),
        ("cache=http://h:1;speed=9", "unknown option 'speed'"),
        ("cache=http://h:1;caching=yes", "on or off"),
        ("cache=http://h:1;drafts=-1", "number of draft tokens"),
        ("cache=http://h:1;device", "no value"),
        ("a=http://h:1 a=http://h:2", "named twice"),
    ],
)
def test_bad_specs_say_what_is_wrong(spec: str, says: str) -> None:
    with pytest.raises(ArmError, match=says):
        parse_arms(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "a-b=http://user:hunter2@h:1",
        "a-b=http://hunter2@h:1",
        "a-b=http://h:1?api_key=hunter2",
        "a-b=http://h:1;api_key=hunter2",
        "a-b=http://h:1;metrics=http://u:hunter2@h:2/metrics",
    ],
)
def test_credentials_are_refused_without_repeating_them(spec: str) -> None:
    with pytest.raises(ArmError) as caught:
        parse_arm(spec)
    assert "hunter2" not in str(caught.value)
    assert "environment" in str(caught.value)


def test_an_arms_own_key_comes_before_the_common_one() -> None:
    environ = {"FACEOFF_API_KEY": "common", "FACEOFF_API_KEY_MY_ARM": "own"}
    assert api_key("my-arm", environ) == "own"
    assert api_key("other", environ) == "common"
    assert auth_headers("other", environ) == {"Authorization": "Bearer common"}
    assert auth_headers("other", {"FACEOFF_API_KEY": ""}) == {}
