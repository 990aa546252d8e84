"""Where a name leads: built-in, another package, a file; and what happens when packages are wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import METRIC, POLICY, Install

from kvtool import plugins
from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.manifest import source_digest
from kvtool.metrics import describe_metrics, metric_from_text
from kvtool.policies import ALL, BUILT_IN, describe_policies, policy_from_text
from kvtool.replay import replay
from kvtool.replay.serving import serving
from kvtool.result import Result
from kvtool.trace import open_trace

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
CUT: dict[str, Any] = {"ratios": ["0.5"], "layers": [0], "sequences": [0], "sinks": 1, "window": 8}


def refused(text: str, code: str) -> KvtoolError:
    with pytest.raises(KvtoolError) as caught:
        policy_from_text(text)
    assert caught.value.code == code, caught.value.message
    return caught.value


def entry_of(name: str) -> dict[str, Any]:
    (found,) = [entry for entry in describe_policies() if entry["name"] == name]
    return found


def test_a_name_leads_into_its_package_on_first_use_and_not_before(install: Install) -> None:
    install("new-ways", "2.5", policies={"newest": "ways_one:Newest"}, ways_one=POLICY)
    found = plugins.find("kvtool.policies")["newest"]
    assert found == (plugins.Plugin("newest", "ways_one:Newest", "new-ways", "2.5"),)
    policy_from_text("snapkv")
    assert "ways_one" not in sys.modules
    name, policy = policy_from_text("newest:power=2")
    assert (name, type(policy).__module__, policy.power) == ("newest", "ways_one", 2.0)  # type: ignore[attr-defined]
    assert refused("newest:powr=2", "policy-parameter").hint == "did you mean power? known: power"


def test_names_of_packages_are_among_the_suggestions(install: Install) -> None:
    install("new-ways", policies={"newest": "ways_two:Newest"}, ways_two=POLICY)
    assert (refused("newst", "policy-unknown").hint or "").startswith("did you mean newest?")


def test_all_and_the_controls_stay_the_built_in_ones(install: Install) -> None:
    install("new-ways", policies={"newest": "ways_three:Newest", "random": "ways_three:Newest"}, ways_three=POLICY)
    result = replay(TINY, ["knorm", "all"], **CUT)
    labels = [policy["label"] for policy in result.manifest["replay"]["policies"]]
    assert labels[0] == "knorm"
    assert set(labels) == set(ALL)
    assert next(p for p in result.manifest["replay"]["policies"] if p["label"] == "random")["class"] == "Random"
    assert "ways_three" not in sys.modules
    assert {one.name for one in serving(open_trace(TINY)) if one.kind == "policy"} == set(BUILT_IN)


def test_the_manifest_says_where_every_policy_comes_from(install: Install, tmp_path: Path) -> None:
    site = install("new-ways", "2.5", policies={"newest": "ways_four:Newest"}, ways_four=POLICY)
    (tmp_path / "own.py").write_text(POLICY)
    result = replay(TINY, ["newest", f"{tmp_path}/own.py:Newest"], **CUT)
    found = {p["label"]: p for p in result.manifest["replay"]["policies"]}
    assert found["newest"]["package"] == {"name": "new-ways", "version": "2.5"}
    assert found[f"{tmp_path}/own.py:Newest"]["package"] is None
    assert found["random"]["package"]["name"] == "kvtool"
    assert found["newest"]["source"] == found[f"{tmp_path}/own.py:Newest"]["source"] is not None
    assert site.is_dir()
    kept = {e["policy"]: e["digest"] for e in result.entries("evict_steps")}
    assert kept["newest"] == kept[f"{tmp_path}/own.py:Newest"] != kept["random"]


@pytest.mark.parametrize(
    ("value", "source", "said"),
    [
        ("broken_a:Newest", "import nothing_of_this_name\n", "ModuleNotFoundError"),
        ("broken_b:Newest", "raise SystemExit(3)\n", "SystemExit"),
        ("broken_c:Missing", POLICY, "no attribute 'Missing'"),
        ("broken_d:Newest", "Newest = 5\n", "no subclass of kvtool.policies.Policy"),
        ("broken_e:Newest", "class Newest: pass\n", "no subclass of kvtool.policies.Policy"),
        ("broken_f:Newest", "def broken(:\n", "SyntaxError"),
        ("broken_g", POLICY, "no subclass of kvtool.policies.Policy"),
        ("broken_h:Newest", POLICY + "    def __post_init__(self):\n        1 / 0\n", "ZeroDivisionError"),
        ("broken_i:Newest", POLICY + "    other: Nonsense = 1\n", "NameError"),
    ],
)
def test_a_broken_plug_in_breaks_only_itself(install: Install, value: str, source: str, said: str) -> None:
    source = "from __future__ import annotations\n" + source
    install("half-done", "0.3", policies={"lame": value, "fit": "sound:Newest"}, sound=POLICY)
    install("helper", **{value.partition(":")[0]: source})
    error = refused("lame", "plugin-broken")
    assert "half-done 0.3" in error.message
    assert said in error.message
    assert "\n" not in error.message
    assert policy_from_text("fit")[0] == "fit"
    assert policy_from_text("snapkv")[0] == "snapkv"
    entry = entry_of("lame")
    assert said in entry["fault"]
    assert entry["from"] == "half-done 0.3"
    assert entry_of("fit")["fault"] is None
    assert entry_of("fit")["idea"] == "Keep the newest."


def test_a_module_that_is_not_there_is_a_broken_plug_in(install: Install) -> None:
    install("half-done", "0.3", policies={"lame": "no_such_module_at_all:X"})
    assert "ModuleNotFoundError" in refused("lame", "plugin-broken").message
    assert "ModuleNotFoundError" in entry_of("lame")["fault"]


def test_a_property_that_fails_is_the_policys_fault(install: Install) -> None:
    source = POLICY + "\n    @property\n    def needs(self):\n        return self.nothing\n"
    install("half-done", "0.3", policies={"lame": "lame_trait:Newest"}, lame_trait=source)
    assert "lame does not say its needs: AttributeError" in refused("lame", "policy-broken").message
    assert "half-done 0.3" in entry_of("lame")["fault"]


def test_listing_survives_what_naming_does_not(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    source = "print('hello from a package')\nraise RuntimeError('no good')\n"
    install("half-done", "0.3", policies={"lame": "loud:X"}, metrics={"lame_metric": "loud:X"}, loud=source)
    for command in ("policies", "metrics"):
        assert run([command, "--json"]) == 0
        out, err = capfd.readouterr()
        listed = json.loads(out)[command]
        (entry,) = [entry for entry in listed if entry["name"].startswith("lame")]
        assert "no good" in entry["fault"]
        assert "warning:" in err
        assert run([command]) == 0
        assert "half-done 0.3" in capfd.readouterr().out
        assert run([command, entry["name"]]) == 2
        assert "[plugin-broken]" in capfd.readouterr().err


def test_a_name_that_two_packages_give_is_refused_naming_both(install: Install) -> None:
    install("one", "1.0", policies={"newest": "twice_a:Newest"}, twice_a=POLICY)
    install("two", "2.0", policies={"newest": "twice_b:Newest", "other": "twice_b:Newest"}, twice_b=POLICY)
    message = refused("newest", "plugin-twice").message
    assert "one 1.0" in message
    assert "two 2.0" in message
    assert policy_from_text("other")[0] == "other"
    assert {"twice_a"}.isdisjoint(sys.modules)
    entry = entry_of("newest")
    assert entry["fault"] == message
    assert sorted(entry["from"].split(" and ")) == ["one 1.0", "two 2.0"]


def test_a_name_of_kvtool_itself_is_refused_until_plug_ins_are_off(install: Install) -> None:
    install("one", "1.0", policies={"snapkv": "shadow:Newest"}, metrics={"layer_error": "shadow:X"}, shadow=POLICY)
    error = refused("snapkv", "plugin-twice")
    assert "kvtool 0.1.0 and by one 1.0" in error.message
    assert "--no-plugins" in (error.hint or "")
    assert policy_from_text("h2o")[0] == "h2o"
    assert entry_of("snapkv")["fault"] == error.message
    assert entry_of("snapkv")["idea"]
    with pytest.raises(KvtoolError, match=r"kvtool 0\.1\.0 and by one 1\.0"):
        metric_from_text("layer_error")
    with plugins.switched_off():
        assert type(policy_from_text("snapkv")[1]).__name__ == "SnapKV"
    refused("snapkv", "plugin-twice")


@pytest.mark.parametrize("name", ["quest", "Quest", "all", "a:b", "dir/x", "x.py", "two words"])
def test_names_that_cannot_be_are_listed_with_the_reason(install: Install, name: str) -> None:
    install("odd", "1.0", policies={name: "odd_names:Newest"}, odd_names=POLICY)
    entry = entry_of(name)
    assert "odd 1.0 cannot be used" in entry["fault"]
    if "quest" in name.lower():
        refused(name, "not-eviction")


def test_one_package_found_twice_counts_once_and_the_first_wins(install: Install) -> None:
    install("same", "1.0", policies={"newest": "same_old:Newest"}, same_old=POLICY)
    install("same", "2.0", policies={"newest": "same_new:Newest"}, same_new=POLICY)  # before the other on the path
    assert [p.version for p in plugins.find("kvtool.policies")["newest"]] == ["2.0"]
    assert type(policy_from_text("newest")[1]).__module__ == "same_new"


def test_metadata_that_cannot_be_read_hides_no_other_package(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install("torn", "1.0", entry_points="[kvtool.policies]\nthis line says nothing\n")
    nameless = install("nameless", "1.0", policies={"quiet": "quiet:Newest"}, quiet=POLICY)
    (nameless / "nameless-1.0.dist-info" / "METADATA").unlink()
    assert policy_from_text("quiet")[0] == "quiet"
    assert str(plugins.find("kvtool.policies")["quiet"][0]) == "nameless 1.0"
    assert run(["policies"]) == 0
    assert "package torn 1.0: its entry points cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_switched_off_by_option_or_environment(
    install: Install, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install("new-ways", policies={"newest": "ways_off:Newest"}, metrics={"worst": "ways_metric:Worst"}, ways_off=POLICY)
    if how == "environment":
        monkeypatch.setenv("KVTOOL_NO_PLUGINS", "1")
    option = ["--no-plugins"] if how == "option" else []
    for command, name in (("policies", "newest"), ("metrics", "worst")):
        assert run([*option, command, name]) == 2
        assert "switched off" in capfd.readouterr().err
        assert run([*option, command, "--json"]) == 0
        assert name not in [entry["name"] for entry in json.loads(capfd.readouterr().out)[command]]
    monkeypatch.setenv("KVTOOL_NO_PLUGINS", "0")
    assert run(["policies", "newest"]) == 0  # the option held for its own command only
    assert not plugins.disabled()
    with plugins.switched_off():  # what the caller decided is not undone by a command without the option
        assert run(["policies", "newest"]) == 2
        assert plugins.disabled()


def test_metrics_are_listed_with_columns_and_origin(install: Install, tmp_path: Path) -> None:
    install("new-ways", "2.5", metrics={"worst": "ways_listed:Worst"}, ways_listed=METRIC)
    (found,) = [entry for entry in describe_metrics() if entry["name"] == "worst"]
    assert (found["version"], found["from"], found["fault"]) == (3, "new-ways 2.5", None)
    assert found["columns"][0]["name"] == "worst_tokens"
    assert found["parameters"] == [{"name": "times", "type": "float", "default": 1.0}]
    (tmp_path / "own.py").write_text(METRIC)
    (own,) = describe_metrics([f"{tmp_path}/own.py:Worst"])
    assert own["from"] == f"{tmp_path}/own.py"
    bad = METRIC.replace('"worst_layer", "layer"', '"layer_error", "layer"')
    install("taken", "1.1", metrics={"worse": "ways_bad:Worst"}, ways_bad=bad)
    (found,) = [entry for entry in describe_metrics() if entry["name"] == "worse"]
    assert "layer_error, which is a column of a built-in metric" in found["fault"]
    with pytest.raises(KvtoolError, match=r"taken 1\.1"):
        describe_metrics(["worse"])


def test_help_looks_for_no_packages() -> None:
    code = (
        "import sys\n"
        "import importlib.metadata as m\n"
        "m.distributions = m.entry_points = lambda *a, **k: sys.exit('looked for packages')\n"
        "from kvtool.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "assert run(['replay', '--help']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--no-plugins" in done.stdout


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sources(result: Result) -> dict[str, str]:
    """Label -> digest of the source, of policies and metrics."""
    said = result.manifest["replay"]
    return {entry["label"]: entry["source"] for entry in (*said["policies"], *said["metrics"])}


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    words, wanted = {}, {}
    for noun, source in (("p", POLICY), ("m", METRIC)):
        for place in "ab":
            name = "worst" if place == "a" else "worse"
            text = source.replace("worst", name).replace("layers_seen", f"{name}_seen") + f"\nPLACE = {place!r}\n"
            (tmp_path / place).mkdir(exist_ok=True)
            (tmp_path / place / f"own_{noun}.py").write_text(text)
            words[noun + place] = f"{tmp_path}/{place}/own_{noun}.py:{'Newest' if noun == 'p' else 'Worst'}"
            wanted[words[noun + place]] = digest_of(text)
    result = replay(TINY, [words["pa"], words["pb"]], metrics=[words["ma"], words["mb"]], **CUT)
    found = sources(result)
    assert {word: found[word] for word in wanted} == wanted
    assert len(set(wanted.values())) == 4


def test_the_digest_is_of_what_was_loaded_not_of_what_the_file_holds_by_now(tmp_path: Path, install: Install) -> None:
    path = tmp_path / "own.py"
    path.write_text(POLICY)
    _, old = policy_from_text(f"{path}:Newest")
    edited = POLICY.replace("power", "pow_r")  # as long, and within the same second
    path.write_text(edited)
    assert source_digest(type(old)) == digest_of(POLICY)
    _, new = policy_from_text(f"{path}:Newest")
    assert [f.name for f in dataclasses.fields(new)] == ["pow_r"]
    assert (source_digest(type(new)), source_digest(type(old))) == (digest_of(edited), digest_of(POLICY))
    assert sys.modules[type(old).__module__].Newest is type(old)
    assert not (tmp_path / "__pycache__").exists()
    site = install("new-ways", policies={"newest": "ways_edited:Newest"}, ways_edited=POLICY)
    policy_from_text("newest")
    (site / "ways_edited.py").write_text(edited)
    assert sources(replay(TINY, ["newest"], **CUT))["newest"] == digest_of(POLICY)


def test_what_a_file_imports_or_makes_is_told_apart(tmp_path: Path, install: Install) -> None:
    install("helper", helping_hand=POLICY)
    imports, makes = tmp_path / "imports.py", tmp_path / "makes.py"
    imports.write_text("from helping_hand import Newest\n")
    made = POLICY + "\nMade = dataclass(frozen=True)(type('Made', (Newest,), {'__module__': 'types'}))\n"
    makes.write_text(made)
    assert source_digest(type(policy_from_text(f"{imports}:Newest")[1])) == digest_of(POLICY)
    assert source_digest(type(policy_from_text(f"{makes}:Made")[1])) == digest_of(made)


@pytest.mark.parametrize("noun", ["policy", "metric"])
def test_a_file_whose_class_cannot_be_made_is_blamed(tmp_path: Path, noun: str) -> None:
    source, cls = (POLICY, "Newest") if noun == "policy" else (METRIC, "Worst")
    find = policy_from_text if noun == "policy" else metric_from_text
    head = source.partition(" = 1.0")[0].rpartition("\n")[2]
    for change, said in (
        (f"{head} = float('nan')", "is NaN"),
        (f"{head} = 1.0\n    kind: object = torch.float32", "parameter kind is of type dtype"),
        (f"{head} = 1.0\n\n    def __post_init__(self):\n        1 / 0\n", "ZeroDivisionError"),
        (f"{head} = 1.0\n\n    def __post_init__(self):\n        raise SystemExit(0)\n", "SystemExit"),
        (f"{head} = 1.0\n    other: 'Nonsense' = 1", "NameError"),
    ):
        path = tmp_path / "own.py"
        path.write_text("import torch\n" + source.replace(f"{head} = 1.0", change))
        with pytest.raises(KvtoolError) as caught:
            find(f"{path}:{cls}")
        assert caught.value.code == f"{noun}-broken", caught.value.message
        assert said in caught.value.message


def test_a_default_of_infinity_is_said_in_words(tmp_path: Path) -> None:
    for name, source in (("p.py", POLICY), ("m.py", METRIC)):
        (tmp_path / name).write_text(source.replace("float = 1.0", "float = float('inf')").replace("* self.times", ""))
    (tmp_path / "p.py").write_text((tmp_path / "p.py").read_text().replace("* self.power", ""))
    words = {"policies": [f"{tmp_path}/p.py:Newest"], "metrics": [f"{tmp_path}/m.py:Worst"]}
    result = replay(TINY, **words, output=tmp_path / "out", **CUT)
    said = result.manifest["replay"]
    assert said["policies"][0]["parameters"] == {"power": "inf"}
    assert said["metrics"][0]["parameters"] == {"times": "inf"}
    assert Result.load(tmp_path / "out").manifest["replay"] == said
