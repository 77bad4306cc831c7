"""Command lines of engines in manifests of vLLM, SGLang, llm-d and Dynamo."""

from __future__ import annotations

import shlex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kube.api.command_line import EngineCommand, engine_command
from kvroute.kube.api.objects import Container, EnvironmentVariable

WORDS = st.text(alphabet="ab-=$(){}'\"#;&\\\n _./", max_size=12)


def found(*command: str, args: tuple[str, ...] = (), image: str = "", **env: str) -> EngineCommand:
    result = optional(*command, args=args, image=image, **env)
    assert result is not None
    return result


def optional(*command: str, args: tuple[str, ...] = (), image: str = "", **env: str) -> EngineCommand | None:
    variables = [EnvironmentVariable(name=name, value=value) for name, value in env.items()]
    return engine_command(Container(command=list(command), args=list(args), image=image, env=variables))


@given(st.lists(WORDS, max_size=6), st.lists(WORDS, max_size=6), st.booleans())
def test_no_command_line_raises(command: list[str], args: list[str], shell: bool) -> None:
    """Whatever a manifest holds."""
    container = Container(command=["sh", "-c"] if shell else command, args=args)
    result = engine_command(container)
    assert result is None or result.kind in ("vllm", "sglang", "dynamo")


NAMES = st.from_regex(r"--[a-z][a-z-]{0,10}[a-z]", fullmatch=True)
VALUES = st.text(alphabet="abc019{}\":,/ '", min_size=1, max_size=10)


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.booleans(), st.booleans())
def test_each_way_to_write_options_gives_the_same(options: dict[str, str], equals: bool, underscores: bool) -> None:
    """`--name value` and `--name=value`, hyphens and underscores, as a list and as a quoted script."""
    words: list[str] = []
    for name, value in options.items():
        written = "--" + name[2:].replace("-", "_") if underscores else name
        words += [f"{written}={value}"] if equals else [written, value]
    listed = found("vllm", "serve", "org/model", *words)
    scripted = found(
        "/bin/bash", "-c", args=("set -e\nexec " + shlex.join(["vllm", "serve", "org/model", *words]) + "\n",)
    )
    assert listed == scripted
    assert listed.options == options
    assert listed.model == "org/model"


def test_module_of_vllm_and_of_sglang() -> None:
    """The long form, with the options of either engine."""
    vllm = found("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "-tp", "8")
    assert (vllm.kind, vllm.first("--model"), vllm.number("--tensor-parallel-size")) == ("vllm", "m", 8)
    sglang = found("python3", "-m", "sglang.launch_server", args=("--model-path=m", "--tp", "16", "--enable-metrics"))
    assert (sglang.kind, sglang.first("--model-path", "--model"), sglang.number("--tp")) == ("sglang", "m", 16)
    assert sglang.has("--enable-metrics")
    assert found("numactl", "-N", "0", "/opt/venv/bin/vllm", "serve", "m").model == "m"
    assert found("python3", "-m", "dynamo.vllm", "--model", "m").kind == "dynamo"


def test_images_with_an_engine_as_entry_point() -> None:
    """Then `args` alone are its options."""
    image = "docker.io/vllm/vllm-openai:v0.32.0@sha256:0"
    assert found(args=("--model", "m"), image=image).first("--model") == "m"
    assert found(args=("m", "--port", "80"), image=image).model == "m"
    assert found(args=("serve", "m"), image=image).model == "m"
    assert optional("sleep", args=("1",), image=image) is None
    assert optional(args=("--model", "m"), image="other/vllm/vllm-openai-tools:1") is None
    assert optional() is None


def test_scripts() -> None:
    """Continued lines, comments, several commands and pipes."""
    script = """
    # the model
    pip install x && export A=1; ulimit -l unlimited
    vllm serve $MODEL \\
      --port ${PORT} --host $POD_IP \\
      --kv-transfer-config '{"kv_role":
         "kv_both"}' 2>&1 | tee log --port 9
    echo --port 10
    """
    result = found("sh", "-ec", args=(script,), MODEL="org/m", PORT="8100")
    assert result.model == "org/m"
    assert result.number("--port") == 8100
    assert result.first("--host") == ""
    assert result.mapping("--kv-transfer-config") == {"kv_role": "kv_both"}


def test_variables_of_the_kubelet() -> None:
    """A known value is filled in; one from a webhook or a field stays unknown, also inside a script."""
    known = found("vllm", "serve", "$(MODEL)", args=("--port=$(PORT)", "--x=$$(PORT)"), MODEL="m", PORT="81")
    assert (known.model, known.number("--port"), known.first("--x")) == ("m", 81, "")
    script = "python3 -m sglang.launch_server --dist-init-addr $(LWS_LEADER_ADDRESS):20102 --tp 16 --node-rank $(RANK)"
    scripted = found("bash", "-c", script)
    assert scripted.number("--tp") == 16
    assert scripted.has("--node-rank")
    assert scripted.number("--node-rank") is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"--kv-events-config": '{"a": 1}'}, {"a": 1}),
        ({"--kv-events-config": '{"a": 1}', "--kv-events-config.b_c": "2"}, {"a": 1, "b_c": "2"}),
        ({"--kv-events-config.b_c": "2"}, {"b_c": "2"}),
        ({"--kv-events-config": "[1]"}, None),
        ({"--kv-events-config": "{broken"}, None),
        ({"--kv-events-config": ""}, None),
        ({}, None),
    ],
)
def test_options_in_json(options: dict[str, str], expected: dict[str, object] | None) -> None:
    """With vLLM's dotted form."""
    words = [f"{name}={value}" for name, value in options.items()]
    assert found("vllm", "serve", "m", *words).mapping("--kv-events-config") == expected


def test_containers_keep_only_what_is_used() -> None:
    """Fields without a use are skipped when a pod is decoded."""
    text = (
        b'{"name": "a", "resources": {"limits": {"cpu": "1"}}, "args": null, "env": [{"name": "X", "valueFrom": {}}]}'
    )
    decoded = msgspec.json.decode(text, type=Container)
    assert decoded == Container(name="a", env=[EnvironmentVariable(name="X")])
