"""`kvroute plan`: one JSON document or one page, and exit code 2 with one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvroute.cli.app import main

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "prfaas-case-study.yaml")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command; it returns exit code, stdout and stderr."""

    def started(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvroute", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return started


def document(run: Run, *arguments: str) -> Any:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json_contains_only_the_deployments(run: Run) -> None:
    deployments = document(run, "prfaas", EXAMPLE)
    assert list(deployments) == ["prfaas", "homogeneous", "naive", "home"]
    for deployment in deployments.values():
        assert set(deployment) == {
            "threshold_tokens",
            "n_prfaas",
            "n_prefill",
            "n_decode",
            "offloaded_share",
            "egress_gbps",
            "stage_per_s",
            "lambda_max_per_s",
            "ttft_s",
            "binding",
        }
        assert set(deployment["stage_per_s"]) == {"prfaas", "pd_p", "pd_d"}
        assert set(deployment["ttft_s"]) == {"mean", "p90"}
    assert isinstance(deployments["prfaas"]["threshold_tokens"], int)
    assert deployments["homogeneous"]["threshold_tokens"] is None
    assert deployments["home"]["n_prefill"] + deployments["home"]["n_decode"] == 8
    assert (deployments["home"]["n_prfaas"], deployments["home"]["offloaded_share"]) == (0, 0)


def test_the_text_shows_optimum_bottleneck_and_assumptions(run: Run) -> None:
    code, out, _ = run("prfaas", EXAMPLE)
    best = document(run, "prfaas", EXAMPLE)["prfaas"]
    assert code == 0
    assert out.startswith(f"Offload prompts of more than {best['threshold_tokens']:,} tokens")
    assert "The bottleneck is" in " ".join(out.split()), "the terminal wraps lines"
    for title in ("Bandwidth", "Length mix", "Price per GPU", "Egress"):
        assert title in out
    assert "- prefill on h20: linear interpolation between the given points" in out
    assert "no queue" in out


def changed(folder: Path, *changes: tuple[str, str]) -> str:
    """Write the case study with replaced texts; return its path."""
    text = Path(EXAMPLE).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "changed.yaml").write_text(text)
    return str(folder / "changed.yaml")


SLOW_REMOTE = ("times: [0.44 s, 0.72 s, 1.84 s, 7.40 s]", "times: [4.4 s, 7.2 s, 18.4 s, 74 s]")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ((), "Offload prompts of more than 19,600 tokens"),
        ((SLOW_REMOTE,), "Do not offload if you can choose your GPUs: homogeneous PD (96 h20) serves"),
        ((("egress: 100 Gbps", "egress: 1 Mbps"),), "Do not offload: home GPUs alone (64 h20) already serves"),
        ((("gpus: 64", "gpus: 8"),), "Do not offload if you can choose your GPUs"),
    ],
)
def test_the_advice_follows_from_the_numbers(
    changes: tuple[tuple[str, str], ...], advice: str, run: Run, tmp_path: Path
) -> None:
    """The advice is against offloading if it serves no more than the GPUs at home, or less than the same number of GPUs
    in one place."""
    file = changed(tmp_path, *changes)
    deployments = document(run, "prfaas", file)
    out = " ".join(run("prfaas", file)[1].split())
    assert out.startswith(advice)
    rate = {kind: deployment["lambda_max_per_s"] for kind, deployment in deployments.items()}
    no_gain = rate["prfaas"] < 1.005 * rate.get("home", 0)
    assert no_gain == advice.startswith("Do not offload: ")
    assert (rate["prfaas"] < 0.995 * rate["homogeneous"] and not no_gain) == ("if you can choose" in advice)
    if "home" in rate and not no_gain:
        assert f"{rate['prfaas'] / rate['home'] - 1:+.1%} against home GPUs alone (64 h20)" in out


def test_unused_egress_is_explained(run: Run, tmp_path: Path) -> None:
    """The output shows the bandwidth that the remote GPUs could use, what the plan uses, and how busy the GPUs are."""
    out = " ".join(run("prfaas", changed(tmp_path, ("egress: 100 Gbps", "egress: 5 Gbps")))[1].split())
    assert "takes 5 of 5 Gbps. The 32 remote GPUs would send 11.2 Gbps if they prefilled without pause" in out
    assert "the plan uses them 45% of the time" in out
    assert "if they prefilled without pause" not in run("prfaas", EXAMPLE)[1]


def test_out_writes_a_page_with_its_figures_and_all_numbers(run: Run, tmp_path: Path) -> None:
    result = run("prfaas", EXAMPLE, "--json", "--out", str(tmp_path / "plan"))
    assert result[0] == 0
    numbers = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert numbers["deployments"] == json.loads(result[1])
    assert {"egress", "price", "lengths", "spread", "break_even_factor"} <= set(numbers["sensitivity"])
    page = (tmp_path / "plan" / "report.html").read_text()
    assert "kvroute plan prfaas" in page
    assert page.count("<svg") == 4
    pictures = {path.name for path in (tmp_path / "plan" / "figures").iterdir()}
    assert pictures == {
        f"{name}.{kind}" for name in ("search", "sensitivity", "cost", "egress") for kind in ("png", "svg")
    }


def test_egress_of_the_published_models(run: Run) -> None:
    """Eq. 2: 64 instances of 8 GPUs times Table 3, for every model or for those given."""
    result = document(run, "egress", "--gpus", "512", "--tokens", "32K")
    assert (result["gpus"], result["gpus_per_instance"], result["tokens"]) == (512, 8, 32_768)
    assert len(result["models"]) == 6
    for model in result["models"]:
        assert model["egress_gbps"] == pytest.approx(64 * model["kv_gbps"])
    named = document(run, "egress", "--gpus", "512", "--model", "MiniMaxAI/MiniMax-M2.5", "--tokens", "32768")
    assert named["models"] == [model for model in result["models"] if model["model"] == "minimax-m2.5"]
    code, out, _ = run("egress", "--gpus", "512")
    assert code == 0
    assert "3,835.5" in out


def test_egress_of_a_measured_prefill(run: Run) -> None:
    """S_kv of the preset, 173.9 MiB and 17,280 bytes per token, over the measured time; four instances."""
    result = document(run, "egress", "--gpus", "32", "--model", "prfaas-1t-hybrid", "--prefill", "1.84 s")
    each = (173.9 * 2**20 + 32_768 * 17_280) * 8 / 1.84 / 1e9
    assert result["models"][0]["kv_gbps"] == pytest.approx(each)
    assert result["models"][0]["egress_gbps"] == pytest.approx(4 * each)


REFUSED = {
    "part": (("egress", "--gpus", "500"), "500 GPUs cannot be divided into instances of 8"),
    "unpublished": (("egress", "--gpus", "512", "--model", "llama-3-70b"), "give --prefill"),
    "too-long": (("egress", "--gpus", "512", "--tokens", "200K"), "does not cover 204,800 tokens"),
    "no-number": (("egress", "--gpus", "512", "--tokens", "many"), "'many' is not a valid number of tokens"),
    "no-time": (
        ("egress", "--gpus", "512", "--model", "llama-3-70b", "--prefill", "0 s"),
        "the prefill time is not above 0",
    ),
    "no-model": (("egress", "--gpus", "512", "--prefill", "1.4 s"), "--prefill needs --model"),
    "other-instances": (("egress", "--gpus", "512", "--gpus-per-instance", "4"), "instances of 8 GPUs"),
    "no-file": (("prfaas", "none.yaml"), "none.yaml: cannot be read"),
    "no-plan": (("prfaas", __file__), "this is not YAML"),
}


@pytest.mark.parametrize(("arguments", "what"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_plan_exits_with_2_and_one_sentence(arguments: tuple[str, ...], what: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert err.startswith("kvroute: ")


def test_the_ratio_table_has_a_column_for_each_length(run: Run) -> None:
    """DualPath table 1: 117 GB/PFLOP at 16K and 267 at 64K, with 32 instead of 31.2 billion parameters."""
    code, out, err = run("ratio", "qwen2.5-32b", "qwen3-235b", "--cached", "16K", "--cached", "64K")
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if "qwen2.5-32b" in line).split()
    assert row[-2:] == ["119", "270"]
    found = document(run, "ratio", "qwen3-235b", "--kv-number", "1")
    assert [printed["cached_tokens"] for printed in found] == [16_384, 32_768, 65_536]
    assert found[0]["cached_bytes_per_flop"] == pytest.approx(39e-6, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("kimi-linear-48b",), "operations of a prefill of kimi-linear-48b are not known"),
        (("no-such-model",), "there is no model 'no-such-model'"),
        (("qwen3-235b", "--cached", "0"), "'--cached'"),
        (("qwen3-235b", "--kv-number", "0"), "'--kv-number'"),
    ],
)
def test_wrong_ratios_end_with_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = run("ratio", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
