"""The settings of a tensor-parallel group's all-reduces."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvroute_engine.all_reduce.settings import (
    Settings,
    local_ranks,
    reachable,
    read_settings,
    settings_from_environment,
)
from kvroute_engine.errors import InputError, InputErrors


def read(folder: Path, text: str, ranks: int = 4) -> Settings:
    path = folder / "all_reduce.yaml"
    path.write_text(text, encoding="utf-8")
    return read_settings(path, ranks)


def test_the_first_rule_that_fits_applies(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "switch: 10.0.0.1:7300\nranks_per_server: [2, 2]\n"
        "schemes: [{scheme: ina, up_to: 4 KiB}, {scheme: hierarchical-ring, up_to: 1 MiB}]\n",
    )
    assert [settings.rules.scheme_of(size) for size in (1, 4096, 4097, 2**20, 2**20 + 1)] == [
        *("ina", "ina"),
        *("hierarchical-ring", "hierarchical-ring"),
        "ring",
    ]
    assert settings.switch_address == ("10.0.0.1", 7300)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("schemes: [{scheme: ina}]\n", "the scheme ina needs a switch"),
        ("schemes: [{scheme: star}]\n", "star"),
        ("ranks_per_server: [1, 2]\n", "3 ranks on servers, but the group has 4"),
        ("ranks_per_server: [1, 3]\nschemes: [{scheme: hierarchical-ring}]\n", "equally many ranks"),
        ("schemes: [{scheme: hierarchical-ring}]\n", "equally many ranks"),
        ("switch: nowhere\n", "switch"),
        ("timeout: 0 s\n", "timeout"),
        ("slots: 0\n", "slots"),
        ("agent: /run/kvroute\n", "`agent` needs `group`"),
        ("group: decode-0\n", "`group` needs `agent`"),
        ("also: [hierarchical-ring]\n", "`also` needs `agent`"),
        ("agent: /run/kvroute\ngroup: decode-0\nalso: [ina]\n", "the scheme ina needs a switch"),
        ("agent: /run/kvroute\ngroup: decode-0\nalso: [hierarchical-ring]\n", "equally many ranks"),
        ("agent: /run/kvroute\ngroup: decode-0\nalso: [multi-rail-ring]\n", "multi-rail-ring"),
        ("rejoin: 0 s\n", "rejoin"),
        ("speed: 3\n", "speed"),
    ],
)
def test_what_cannot_be_is_one_sentence_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises((InputError, InputErrors), match=why) as raised:
        read(tmp_path, text)
    assert "all_reduce.yaml:" in str(raised.value)


def test_without_the_variable_there_are_no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVROUTE_ALL_REDUCE", raising=False)
    assert settings_from_environment(2) is None
    monkeypatch.setenv("KVROUTE_ALL_REDUCE", str(tmp_path / "missing.yaml"))
    with pytest.raises(InputError, match="cannot be read"):
        settings_from_environment(2)


def test_the_address_for_other_ranks() -> None:
    """`host`, else that of the path to the switch, else that of the process group."""
    given = Settings(host="10.1.1.1", switch="127.0.0.1:7300")
    assert reachable(given, "10.2.2.2").host == "10.1.1.1"
    assert reachable(Settings(switch="127.0.0.1:7300"), "10.2.2.2").host == "127.0.0.1"
    assert reachable(Settings(), "10.2.2.2").host == "10.2.2.2"


def test_what_a_table_may_use(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "switch: 10.0.0.1:7300\nagent: /run/kvroute\ngroup: decode-0\nalso: [ina]\n"
        "schemes: [{scheme: hierarchical-ring}]\nranks_per_server: [2, 2]\n",
    )
    assert settings.prepared == {"ring", "ina", "hierarchical-ring"}
    assert settings.rules.scheme_of(1) == "hierarchical-ring"


def test_ranks_of_a_server_and_of_a_position() -> None:
    assert [local_ranks([3, 3], rank) for rank in (0, 4)] == [(range(3), range(0, 6, 3)), (range(3, 6), range(1, 6, 3))]
