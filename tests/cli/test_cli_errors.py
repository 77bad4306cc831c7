"""Invalid input on the command line: one sentence with a hint, exit code 2, and no file is changed."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cli.cli_rig import CLUSTER, EXAMPLES, Ended, Kvroute, document

from kvroute_studies.command import families

FLOWS, PLAN = EXAMPLES / "flows-classes.json", EXAMPLES / "prfaas-case-study.yaml"
CUT = EXAMPLES / "scenarios" / "wan-cut.yaml"


WRONG = [
    ("simulate nofile.yaml", "nofile.yaml: the file cannot be read"),
    (f"simulate {CLUSTER} --policy netkw", "did you mean 'netkv'?"),
    (f"simulate {CLUSTER} --prefill-policy x", "unknown prefill policy 'x'"),
    (f"simulate {CLUSTER} --constraint x", "unknown level 'x'"),
    (f"simulate {CLUSTER} --cla-weights 1", "--cla-weights: '1' is not a pair of weights"),
    (f"simulate {CLUSTER} --profile x", "--profile: there is no profile 'x'"),
    (f"simulate {CLUSTER} --requests 9 --rate inf", "'inf' is not a rate"),
    (f"simulate {CLUSTER} --requests 9 --warmup inf", "'inf' is not a duration"),
    (f"simulate {CLUSTER} --requests 9 --slo-ttft inf", "'inf' is not a duration"),
    (f"simulate {CLUSTER} --seeds x", "invalid value for '--seeds': 'x' is not a whole number; see"),
    (f"simulate {CLUSTER} --seeds 2.5", "invalid value for '--seeds': '2.5' is not a whole number; see"),
    (f"simulate {CLUSTER} --seeds 0", "invalid value for '--seeds': '0' is not 1 or more; see"),
    (f"simulate {CLUSTER} --seed 9999999999", "'9999999999' is not at most 2,147,483,647; see"),
    (f"simulate {CLUSTER} --p-share x", "invalid value for '--p-share': 'x' is not a number; see"),
    (f"simulate {CLUSTER} --p-share 2", "invalid value for '--p-share': '2' is not at most 1; see"),
    ("serve --port 70000", "invalid value for '--port': '70000' is not at most 65,535; see `kvroute serve --help`"),
    (f"serve {CLUSTER} --worker nofile", "nofile: this is not a file for a worker (No such file or directory); use"),
    (f"simulate {CLUSTER} --requests 9 --on mars", "--on: cannot run on 'mars'"),
    ("trace show octets --seed 3", "--seed: a trace file needs no seed; omit it"),
    (f"simulate {CLUSTER} --trace nofile.jsonl", "nofile.jsonl: cannot be read"),
    (f"simulate {CLUSTER} --requests 9 --out file", "--out: file is not a writable folder"),
    (f"simulate {CLUSTER} --requests 9 --log a.log", "--log: a log can hold only one run"),
    (f"simulate {CLUSTER} --requests 9 --policy netkv --seeds 1 --log no/a.log", "no/a.log: cannot be written"),
    (f"simulate {CLUSTER} --requests 9 --policy netkv --seeds 1 --log .", ".: cannot be written"),
    ("simulate octets --policy netkv --seeds 1 --log a.log", "octets: the file is not UTF-8 text"),
    ("serve", "no cluster file is given; give a YAML file, or discover the engines with --kubernetes"),
    (f"serve {CLUSTER} --selector a=b", "--selector has no effect without --kubernetes; add --kubernetes"),
    ("serve --kubernetes --namespace LLM", "--namespace: 'LLM' is not the name of a namespace; write lower-case"),
    ("serve --kubernetes --selector app,", "--selector: a condition is missing after the last comma; write"),
    ("serve --kubernetes --kubeconfig nofile", "nofile not found; give a kubeconfig with --kubeconfig"),
    (f"serve {CLUSTER} --kubernetes --embedded", "--embedded and --kubernetes exclude each other"),
    ("experiment nothing", "there is no experiment 'nothing'"),
    ("experiment netkv-load --reading x", "--reading: there is no reading 'x'"),
    ("experiment netkv-load --profile x", "--profile: there is no profile 'x'"),
    ("experiment aggregated --profile network/999", "there is no profile 'network/999'; choose among 2"),
    ("experiment netkv-load --cell rag,netkv", "write profile,load,policy"),
    ("experiment netkv-load --cell rag,x,netkv", "an axis value that is not a number"),
    ("experiment netkv-load --cell rag,nan,netkv", "netkv-load has no cell 'rag,nan,netkv'"),
    ("experiment netkv-load --trace octets", "octets:1: "),
    ("experiment netkv-load --out file", "--out: file/paper/generated is not a writable folder"),
    ("experiment netkv-load --set ecmp", "--set: 'ecmp' has no value; write field=value"),
    ("experiment netkv-load --set ecmp=foo", "--set: ecmp=foo: the value is unknown; choose one of "),
    ("experiment netkv-load --set prefill_base_s=foo", "--set: prefill_base_s=foo: the value is not of type number"),
    ("experiment prfaas-burst --set wan_gbps", "--set: 'wan_gbps' has no value"),
    (
        "experiment prfaas-burst --set wan_gbps=x",
        "--set: wan_gbps=x: the value is not of type number; give a value of this type",
    ),
    ("replay octets", "octets:1: is not a kvroute log; give a file that `kvroute serve --log`"),
    ("replay nofile", "nofile: cannot be read (No such file or directory); give a file that `kvroute serve --log`"),
    ("explain object 1", "object:1: is not a kvroute log; give a file that"),
    ("explain empty 1", "empty: the log is empty; give a file that"),
    ("flows empty", "empty: the file is empty; give a JSON object with `links` and `flows`"),
    ("flows object", "object: `links` is missing; give a JSON object with `links` and `flows`"),
    (f"emulate {CLUSTER} --background 2", "--background: 2 is not a valid share; use 0 or more and less than 1"),
    ("trace generate no/x.jsonl", "no/x.jsonl: cannot be written (No such file or directory); give a file in a folder"),
    (f"topology new --both http://a:1 --out {CLUSTER}", "the file already exists; give another file to --out"),
    (f"topology show {FLOWS}", "this looks like transfers over links; read it with `kvroute flows FILE`"),
    (f"topology show {PLAN}", "this looks like a plan file; read it with `kvroute plan prfaas FILE`"),
    (f"plan replicas {CLUSTER} --rate 4/s --tpot 50", "'50' is not at most 10 s; did you mean 50ms? write a number of"),
    (f"plan replicas {CLUSTER} --rate 4/s --tpot 20s", "'20s' is not at most 10 s; write a number of seconds"),
    (f"plan placement {CLUSTER} --model opt-66b --ttft 2 --tpot 100", "did you mean 100ms?"),
    (f"plan prfaas {CLUSTER}", "this looks like a cluster file; read it with `kvroute topology check FILE`"),
    (f"simulate {CLUSTER} --scenario {CLUSTER}", "this looks like a cluster file"),
    (f"simulate {CUT}", "this looks like a scenario; read it with `kvroute simulate CLUSTER --scenario FILE`"),
    ("simulat x", "no such command 'simulat'. Did you mean 'simulate'"),
    ("topolgy check x", "no such command 'topolgy'. Did you mean 'topology'?; see `kvroute --help`"),
    ("topology chekc x", "no such command 'chekc'. Did you mean 'check'?; see `kvroute topology --help`"),
    ("llm nothing", "there is no model 'nothing'; `kvroute llm` lists the presets; or give a config.json"),
    ("llm llama-3-70", "did you mean llama-3-70b? `kvroute llm` lists the presets; or"),
    ("llm empty", "empty: the file is empty"),
    ("flows octets", "octets"),
    (f"flows {CLUSTER}", "this looks like a cluster file; read it with `kvroute topology check FILE`"),
    ("experiment netkv-load --cell x --trace-dir .", "--trace-dir: netkv does not support this option; omit it"),
    ("experiment prfaas --cell x --trace-dir .", "--trace-dir: prfaas does not support this option; omit it"),
    (
        "experiment prefix-copies --cell x --trace-dir .",
        "--trace-dir: prefix-copies does not support this option; omit it",
    ),
    ("experiment never-worse --cell x --trace-dir .", ".: the folder has none of the recorded traces; give"),
    ("topology show nofile", "nofile: "),
    ("trace show nofile", "nofile: cannot be read (No such file or directory); check its path"),
    ("trace generate trace.txt", "trace.txt"),
    ("timing fit nofile", "nofile"),
    (
        f"emulate {CLUSTER} --host 10.99.99.99",
        "cannot listen on 10.99.99.99 (Cannot assign requested address); give an",
    ),
    (f"emulate {CLUSTER} --host 10.99.99.99 --no-kv-events", "give an address of this machine"),
    (f"emulate {CLUSTER} --ready-file no/x", "--ready-file: no/x cannot be written (no such folder)"),
    (f"serve --embedded {CLUSTER} --ready-file no/x", "--ready-file: no/x cannot be written (no such folder)"),
    (f"serve --embedded {CLUSTER} --log no/x", "no/x: cannot be written (no such folder)"),
    (f"serve --embedded {CLUSTER} --log file", "file: exists and is not a kvroute log"),
    (f"serve --embedded {CLUSTER} --policy nope", "unknown decode policy 'nope'"),
    (f"serve --embedded {CLUSTER} --shadow nope", "unknown decode policy 'nope'"),
    (f"serve --embedded {CLUSTER} --constraint foo", "constraint: unknown level 'foo'"),
    (f"serve --embedded {CLUSTER} --host 10.99.99.99", "gateway.listen: cannot listen on 10.99.99.99:8080"),
]


@pytest.mark.parametrize(("line", "problem"), WRONG, ids=[line.replace(str(EXAMPLES), "examples") for line, _ in WRONG])
def test_invalid_input_gives_one_sentence_and_exit_code_2(kvroute: Kvroute, line: str, problem: str) -> None:
    """The sentence is on stderr; stdout stays empty, also with `--json`."""
    Path("file").write_text("not a folder\n")
    Path("empty").write_text("")
    Path("object").write_text("{}")
    Path("octets").write_bytes(bytes([0xFF, 0xFE, 0x00, 0x93]) * 20)
    ended = kvroute(*line.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvroute: ")
    assert problem in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("line", [f"simulate {CLUSTER} --requests 9", "experiment netkv-load --seeds 1"])
def test_a_missing_ray_is_reported_before_any_other_output(kvroute: Kvroute, line: str) -> None:
    """Nothing is printed about runs that will not start."""
    ended = kvroute(*line.split(), "--on", "ray")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvroute: --on ray: Ray is not installed")


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use_is_reported_before_engines_start(kvroute: Kvroute, option: str) -> None:
    """The error names the section and the fix, and it is the only output, because no engine has started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = "--admin-port" if option == "--port" else "--port"
        ended = kvroute("serve", "--embedded", CLUSTER, option, str(port), other, "0")
    assert (ended.code, ended.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another port" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", families())
def test_an_unknown_executor_leaves_no_folder(kvroute: Kvroute, name: str) -> None:
    """`--on` is checked first, for every publication."""
    ended = kvroute("experiment", name, "--on", "mars", "--out", "made")
    assert (ended.code, Path("made").exists()) == (2, False)
    assert ended.err == "kvroute: --on: cannot run on 'mars'; choose local or ray\n"


@pytest.mark.parametrize("how", ["embedded", "live"])
def test_an_older_log_is_kept_if_no_address_can_be_bound(kvroute: Kvroute, log: Path, how: str) -> None:
    """Every address of a host name is tried; an invalid host name is reported before engines start."""
    Path("live.yaml").write_text(kvroute("topology", "new", "--both", "http://127.0.0.1:1").out)
    start = ("serve", "--embedded", CLUSTER) if how == "embedded" else ("serve", "live.yaml")
    before = log.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, why in (("localhost", "Address already in use"), ("no..name", "the host name is not valid")):
            ended = kvroute(*start, "--host", host, "--port", str(port), "--admin-port", "0", "--log", str(log))
            assert (ended.code, ended.out) == (2, "")
            assert ended.err.startswith(f"kvroute: gateway.listen: cannot listen on {host}:{port} ({why}); ")
            assert ended.err.count("\n") == 1
    assert (log.read_bytes(), Path("run.log.1").exists()) == (before, False)


@pytest.mark.parametrize(
    "options",
    [
        "--rate -1", "--rate nan", "--background 1", "--background nan", "--oracle-refresh 0", "--p-share 2",
        "--warmup nan", "--slo-ttft nan", "--seeds 0", "--seed -1", "--seed 9999999999999999999999", "--requests 0",
        "--input-tokens 10000000000", "--workers 0", "--workers 100000", "--nonsense",
    ],
)  # fmt: skip
def test_values_out_of_range_are_usage_errors(kvroute: Kvroute, options: str) -> None:
    """The exit code is 2 and one sentence gives the option's name and the help command, before anything runs."""
    ended = kvroute("simulate", CLUSTER, *options.split(), "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvroute: ")
    assert options.split()[0] in ended.err
    assert ended.err.endswith("; see `kvroute simulate --help`\n")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("plain", "with_unit"),
    [
        ("--slo-ttft 2", "--slo-ttft 2s"),
        ("--slo-ttft 0.5", "--slo-ttft 500ms"),
        ("--warmup 60", "--warmup 1min"),
        ("--rate 1.5", "--rate 90/min"),
        ("--oracle-refresh 0.25", "--oracle-refresh 250ms"),
        ("--input-tokens 2048", "--input-tokens 2K"),
    ],
)
def test_options_accept_units(kvroute: Kvroute, plain: str, with_unit: str) -> None:
    """Numbers without a unit are seconds, requests per second and tokens."""
    start = ("simulate", CLUSTER, "--requests", "40", "--seeds", "1", "--policy", "cla", "--json")
    runs = [document(kvroute(*start, *options.split())) for options in (plain, with_unit)]
    for run in runs:
        for measured in ("decision_s", "wall_s", "cpu_s"):
            del run["runs"][0][measured]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--slo-ttft 2x", "'2x' is not a duration; write a number of seconds, or a number and ns, us, ms, s, min or h"),
        ("--slo-ttft 0", "'0' is not 1 us or more; write"),
        ("--rate 6/d", "'6/d' is not a rate; write requests per second, or with a unit, such as 6/s or 90/min"),
        ("--rate 0/s", "'0/s' is not above 0; write requests per second"),
        ("--input-tokens 2.5", "'2.5' is not a number of tokens; write a whole number, or thousands such as 32K"),
    ],
)
def test_a_wrong_unit_gives_one_sentence_with_a_hint(kvroute: Kvroute, options: str, sentence: str) -> None:
    """The sentence contains the option's name."""
    ended = kvroute("simulate", CLUSTER, *options.split(), "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"kvroute: invalid value for '{options.split()[0]}': {sentence}")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("simulat", "no such command 'simulat'. Did you mean 'simulate' or 'emulate'?; see `kvroute --help`"),
        ("simulate", "missing argument 'cluster'; see `kvroute simulate --help`"),
        ("topology nope", "no such command 'nope'; see `kvroute topology --help`"),
        ("trace generate", "missing argument 'out'; see `kvroute trace generate --help`"),
    ],
)
def test_an_invalid_command_line_gives_one_sentence(kvroute: Kvroute, line: str, sentence: str) -> None:
    """There is no box and no usage text, only a reference to the help."""
    assert kvroute(*line.split()) == Ended(2, "", f"kvroute: {sentence}\n")
