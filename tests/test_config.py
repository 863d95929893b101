"""`monarch.config` as users and their tests see it."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from monarch.config import (
    ChannelTransport,
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
)
from monarch.core import settings


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch):
    """Whatever a client of another test, which may still live in this process, has set."""
    before = get_runtime_config()
    monkeypatch.setattr(settings._process, "_test", {})
    clear_runtime_config()
    yield
    monkeypatch.undo()
    clear_runtime_config()
    configure(**before)


def test_configure_fills_the_runtime_layer_and_clear_drops_it():
    configure(cleanup_timeout="300s", message_ttl_default=9)
    assert get_runtime_config() == {"cleanup_timeout": "5m", "message_ttl_default": 9}
    assert get_global_config()["cleanup_timeout"] == "5m"
    clear_runtime_config()
    assert get_runtime_config() == {}
    assert get_global_config()["cleanup_timeout"] == "3s"


@pytest.mark.parametrize(("given", "shown"), [("300s", "5m"), ("90s", "1m 30s"), ("1h30m", "1h 30m"), ("1m 30s",) * 2])
def test_durations_print_normalised(given, shown):
    with configured(actor_spawn_max_idle=given) as config:
        assert config["actor_spawn_max_idle"] == shown


def test_configured_yields_the_merged_view_and_restores():
    configure(message_ttl_default=5)
    with configured(cleanup_timeout="1s", default_transport=ChannelTransport.TcpWithHostname) as config:
        assert config == get_global_config()
        assert config["cleanup_timeout"] == "1s"
        assert config["message_ttl_default"] == 5
        assert config["default_transport"] == ChannelTransport.TcpWithHostname
        configure(message_ttl_default=6)
    assert get_runtime_config() == {"message_ttl_default": 5}


def test_configured_restores_after_an_exception_and_when_nested():
    with pytest.raises(KeyError), configured(cleanup_timeout="1s"):
        with configured(cleanup_timeout="2s") as inner:
            assert inner["cleanup_timeout"] == "2s"
        assert get_global_config()["cleanup_timeout"] == "1s"
        raise KeyError
    assert get_runtime_config() == {}


def test_configured_without_arguments_yields_the_current_view():
    configure(message_ttl_default=5)
    with configured() as config:
        assert config == get_global_config()


def test_refusals_name_the_key():
    for values, error, text in (
        ({"no_such_key": 1}, ValueError, "no_such_key"),
        ({"cleanup_timeout": "tomorrow"}, TypeError, "Invalid duration format"),
        ({"message_ttl_default": "64"}, TypeError, "message_ttl_default"),
        ({"default_transport": "nonsense"}, ValueError, "nonsense"),
    ):
        with pytest.raises(error, match=text):
            configure(**values)
        with pytest.raises(error, match=text), configured(**values):
            pass
    assert get_runtime_config() == {}


def test_encoding_has_the_three_names():
    assert [member.name for member in Encoding] == ["Bincode", "Json", "Multipart"]


# pytest helpers

seen: list[tuple] = []


@parametrize_config(message_ttl_default=[3, 4], mixed_endpoints={True, False})
def test_a_test_runs_under_each_combination():
    config = get_global_config()
    seen.append((config["message_ttl_default"], config["mixed_endpoints"]))


def test_all_combinations_were_run():
    if not seen:
        pytest.skip("needs the test before it")
    assert seen == [(3, False), (3, True), (4, False), (4, True)]


@parametrize_config(message_ttl_default=[3, 4])
@pytest.mark.parametrize("other", ["x"])
def test_a_test_may_ask_for_the_value_beside_fixtures_and_parameters(message_ttl_default, other, tmp_path):
    assert get_global_config()["message_ttl_default"] == message_ttl_default
    assert other == "x" and tmp_path.exists()


@parametrize_config_pointwise(cleanup_timeout=["60s", "2s"], message_ttl_default=[60, 2])
@parametrize_config(mixed_endpoints=[False])
def test_pointwise_takes_values_in_pairs_and_stacks(cleanup_timeout, message_ttl_default):
    assert (cleanup_timeout, message_ttl_default) in [("1m", 60), ("2s", 2)]
    assert get_global_config()["mixed_endpoints"] is False


class TestInAClass:
    @parametrize_config(message_ttl_default=[3])
    def test_methods_can_be_parametrized(self, message_ttl_default):
        assert get_global_config()["message_ttl_default"] == message_ttl_default == 3


def test_a_coroutine_test_stays_one_and_runs_under_the_values():
    @parametrize_config(message_ttl_default=[3])
    async def body(message_ttl_default):
        await asyncio.sleep(0)
        return message_ttl_default, get_global_config()["message_ttl_default"]

    assert inspect.iscoroutinefunction(body)
    assert asyncio.run(body(config_message_ttl_default={"message_ttl_default": 3})) == (3, 3)


def test_helpers_refuse_at_once():
    with pytest.raises(ValueError, match="same number of values"):
        parametrize_config_pointwise(message_ttl_default=[1, 2], mixed_endpoints=[True])
    with pytest.raises(ValueError, match="no_such_key"):
        parametrize_config(no_such_key=[1])
