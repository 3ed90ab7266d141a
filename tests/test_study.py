"""evaluate.py, compare.py and study.py on real runs of seconds, as a user starts them."""

import csv
import html
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, refused, run_program
from safetensors.torch import load_file
from scipy import stats

from model import checkpoint
from model.config import SCALING_KINDS
from scripts import compare, evaluate

KINDS = [kind for kind in SCALING_KINDS if kind != "none"]


def flags(text_folder: Path, folder: Path) -> list[str]:
    return [
        "--config=tiny.yaml", "--data.source=files", f"--data.path={text_folder}", "--data.limit=null",
        "--data.vocab_size=300", "--data.val_fraction=0.25", f"--data.cache_dir={folder / 'cache'}",
        f"--out_dir={folder / 'runs'}", "--train.steps=12", "--train.warmup_steps=2", "--train.save_every=3", "--eval.length_ratios=[0.25,1,2,8]",
        "--train.log_every=3", "--eval.windows=16", "--eval.length_targets=64", "--eval.sample_tokens=0",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[Path, subprocess.CompletedProcess]:
    """A whole study of two encodings and two seeds, with fine-tuning, recorded by wandb offline."""
    folder = tmp_path_factory.mktemp("study")
    done = run_program(
        "scripts/study.py", "--positions", "rope", "sinusoidal", "--seeds", "0", "1", "--wandb=true", "--targets=128",
        "--fine_tune_steps=2", "--fine_tune_kinds", "yarn",
        *flags(text_folder, folder), "--tracking.mode=offline",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "runs", done


def test_lengths_json_says_all_that_is_needed_to_read_it(study):
    lengths = json.loads((study[0] / "tiny-rope" / "lengths.json").read_text())
    assert lengths["trained_context"] == 32 and lengths["block"] == 8 and lengths["checkpoint"] == "step-0000012"
    assert lengths["targets"] > 64 and lengths["documents"] == 3 and lengths["bytes"] > lengths["targets"]
    contexts = [row["context"] for row in lengths["by_context"]]
    assert contexts == [8, 32, 64, 256]
    assert list(lengths["variants"]) == ["window", *KINDS]
    for rows in lengths["variants"].values():
        assert [row["context"] for row in rows] == contexts[2:]
    buckets = lengths["by_position"]["buckets"]
    assert buckets[0]["from"] == 0 and buckets[-1]["to"] == 256
    assert all(a["to"] == b["from"] for a, b in itertools.pairwise(buckets))
    assert sum(b["targets"] for b in buckets) == lengths["by_position"]["windows"] * 256
    for row in lengths["copy_gain"]["rows"]:
        assert row["gain"] == row["first"] - row["second"]
        assert row["gain_in_place"] == row["without_copy"] - row["second"]
    other = json.loads((study[0] / "tiny-sinusoidal" / "lengths.json").read_text())
    assert list(other["variants"]) == ["window"]
    assert [other[key] for key in ("targets", "bytes", "documents")] == [
        lengths[key] for key in ("targets", "bytes", "documents")
    ]


def test_evaluation_is_deterministic_and_independent_of_batch_size(study, tmp_path: Path):
    shutil.copytree(study[0] / "tiny-rope", tmp_path / "run")
    before = json.loads((tmp_path / "run" / "lengths.json").read_text())
    again = run_program("scripts/evaluate.py", tmp_path / "run", "--targets=128")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "run" / "lengths.json").read_text()) == before
    assert run_program("scripts/evaluate.py", tmp_path / "run", "--targets=128", "--batch_tokens=300").returncode == 0
    after = json.loads((tmp_path / "run" / "lengths.json").read_text())

    def numbers(value: object) -> list[float]:
        if isinstance(value, dict | list):
            return [n for v in (value.values() if isinstance(value, dict) else value) for n in numbers(v)]
        return [float(value)] if isinstance(value, int | float) else []

    assert numbers(after) == pytest.approx(numbers(before), abs=2e-5)


def test_report_holds_the_paired_differences_of_the_runs(study):
    runs, done = study
    report = (runs / "tiny-study" / "report.md").read_text()
    assert report.split("\n\n", 1)[1].split("###")[1] in done.stdout
    loss = {}
    for name in ("rope", "rope-s1", "sinusoidal", "sinusoidal-s1"):
        rows = json.loads((runs / f"tiny-{name}" / "lengths.json").read_text())["by_context"]
        loss[name] = next(row["loss"] for row in rows if row["context"] == 32)
    test = stats.ttest_rel([loss["sinusoidal"], loss["sinusoidal-s1"]], [loss["rope"], loss["rope-s1"]])
    low, high = test.confidence_interval(0.95)
    line = next(line for line in report.splitlines() if line.startswith("| 32 (trained length)"))
    shown = re.search(r"([+-]\d\.\d+) ± (\d+\.\d+) \|$", line)
    assert float(shown[1]) == pytest.approx((low + high) / 2, abs=6e-4)
    assert float(shown[2]) == pytest.approx((high - low) / 2, abs=6e-4)


def test_zero_shot_and_fine_tuned_have_tables_of_their_own(study):
    report = (study[0] / "tiny-study" / "report.md").read_text()
    tables = {part.splitlines()[0].strip(): part for part in report.split("### ")[1:]}
    zero_shot = tables["rope: reading further without training (zero-shot)"]
    fine_tuned = tables["RoPE fine-tuned for 2 steps at a context of 128"]
    assert "| context | plain | window | " + " | ".join(KINDS) + " |" in zero_shot
    assert "| context | yarn |" in fine_tuned
    fine = yaml.safe_load((study[0] / "tiny-rope-s1-fine-tuned-yarn" / "config.yaml").read_text())
    assert fine["model"]["rope"]["scaling"]["kind"] == "yarn" and fine["data"]["context"] == 128 and fine["seed"] == 1


def test_csv_and_page_are_complete(study):
    folder = study[0] / "tiny-study"
    with (folder / "lengths.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (4 + 6 * 2) + 2 * (4 + 2)
    lengths = json.loads((study[0] / "tiny-sinusoidal-s1" / "lengths.json").read_text())
    mine = [r for r in rows if r["position"] == "sinusoidal" and r["seed"] == "1" and r["variant"] == "plain"]
    assert [float(r["nats_per_token"]) for r in mine] == [row["loss"] for row in lengths["by_context"]]
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 4 and page.count("data:image/png;base64,") == 4
    assert page.count("<table>") == (folder / "report.md").read_text().count("| --- |\n")
    assert not re.search(r"(src|href)=['\"]?(https?:|//)", page)
    for name in ("loss", "loss-by-context", "loss-by-position", "copy-gain"):
        assert (folder / f"{name}.png").stat().st_size > 10_000 and (folder / f"{name}.svg").exists()


WIDTHS = {"phone": 390, "desktop": 1280}
# Shows the page in frames of these widths and writes down what a reader would see.
BROWSER_PAGE = """<!DOCTYPE html><body>{frames}<pre id=found></pre><script>
onload = () => setTimeout(() => {{ found.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {{
  const page = frame.contentDocument, visible = e => e.getBoundingClientRect().width > 50 && e.getBoundingClientRect().height > 50;
  return {{ width: frame.clientWidth, scroll: page.documentElement.scrollWidth,
    images: [...page.images].map(i => i.complete && i.naturalWidth > 500 && visible(i) && i.getBoundingClientRect().right <= frame.clientWidth),
    tables: [...page.querySelectorAll("table")].map(t => visible(t) && (t.scrollWidth <= t.parentNode.clientWidth
      || frame.clientWidth < 600 && getComputedStyle(t.parentNode).overflowX == "auto")) }};
}})) }}, 300) </script>"""


def test_a_browser_shows_every_plot_and_table_at_phone_and_desktop_width_without_network(study, tmp_path: Path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    page = html.escape((study[0] / "tiny-study" / "report.html").read_text(), quote=True)
    frames = "".join(
        f'<iframe width={w} height=800 style="border:0" srcdoc="{page}"></iframe>' for w in WIDTHS.values()
    )
    (tmp_path / "frames.html").write_text(BROWSER_PAGE.format(frames=frames))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900", "--virtual-time-budget=5000",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/frames.html",
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)[1]))
    tables = (study[0] / "tiny-study" / "report.html").read_text().count("<table>")
    assert [shown["width"] for shown in found] == list(WIDTHS.values())
    for shown in found:
        assert (
            shown["images"] == [True] * 4 and shown["tables"] == [True] * tables and shown["scroll"] <= shown["width"]
        )


def test_a_finished_study_is_not_done_again(study, text_folder: Path):
    runs = study[0]
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/checkpoints/*/model.safetensors")}
    done = run_program(
        "scripts/study.py", "--positions", "rope", "sinusoidal", "--seeds", "0", "1", f"--out={runs / 'again'}",
        *flags(text_folder, runs.parent), "--tracking.mode=offline",
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("is finished") == 4, done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in runs.glob("*/checkpoints/*/model.safetensors")}


def test_wandb_has_the_length_points_of_both_and_the_tables_of_the_comparison(study):
    wandb = Path(sys.executable).parent / "wandb"

    def records(folder: Path) -> list[dict]:
        done = subprocess.run(
            [wandb, "leet", "inspect", "--json", folder / "wandb"], capture_output=True, text=True, check=True
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    for name in ("tiny-rope", "tiny-sinusoidal"):
        found = records(study[0] / name)
        assert [r["run"]["run_group"] for r in found if r["type"] == "run"] == ["tiny"]
        axes = {m.get("glob_name"): m.get("step_metric") for m in (r["metric"] for r in found if r["type"] == "metric")}
        assert axes["length/*"] == "length/context"
        points = [r["history"]["item"] for r in found if r["type"] == "history"]
        assert [p["length/context"] for p in points if "length/loss" in p] == [8, 32, 64, 256]
    found = records(study[0] / "tiny-study")
    items = [r["history"]["item"] for r in found if r["type"] == "history"]
    assert [p["length/context"] for p in items if {"length/rope", "length/sinusoidal"} <= p.keys()] == [8, 32, 64, 256]
    keys = {key for item in items for key in item}
    assert any("comparison/Loss by context" in key for key in keys) and any(
        "comparison/Copy gain" in key for key in keys
    )


@pytest.mark.slow
def test_a_killed_study_goes_on_and_mixes_nothing(study, text_folder: Path, tmp_path: Path):
    """SIGKILL while two runs train at once; the study started again ends with the weights of the unbroken one."""
    command = [
        sys.executable, ROOT / "scripts/study.py", "--positions", "rope", "sinusoidal", "--seeds", "0", "--targets=128",
        "--jobs=2", *flags(text_folder, tmp_path), "--tracking.mode=disabled",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    second = tmp_path / "runs" / "tiny-sinusoidal" / "checkpoints" / "step-0000003"
    while process.poll() is None and not second.exists():
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert second.exists()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tiny-sinusoidal: resuming .* from step \d+$", done.stdout, re.M)
    for name in ("tiny-rope", "tiny-sinusoidal"):
        one, two = (
            load_file(base / name / "checkpoints/step-0000012/model.safetensors")
            for base in (study[0], tmp_path / "runs")
        )
        assert all((one[key] == two[key]).all() for key in one)


def test_a_run_whose_study_was_killed_alone_is_not_trained_twice(text_folder: Path, tmp_path: Path):
    """Its train.py lives on: the study started again must leave that run folder alone, and say why."""
    command = [
        sys.executable, ROOT / "scripts/study.py", "--positions", "rope", "--seeds", "0",
        *flags(text_folder, tmp_path), "--train.steps=100000", "--tracking.mode=disabled",
    ]  # fmt: skip
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    run = tmp_path / "runs" / "tiny-rope"
    try:
        while first.poll() is None and not (run / "checkpoints" / "step-0000006").exists():
            time.sleep(0.005)
        first.kill()
        first.wait()
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
    assert done.returncode == 2 and "tiny-rope is running" in done.stdout
    assert (
        done.stderr.strip()
        == f"train.py: error: {run} is being trained by another process: wait for it, or stop it first"
    )


# --- what cannot be compared


@pytest.fixture
def pair(study, tmp_path: Path) -> list[Path]:
    """Copies of two runs, to be spoilt."""
    return [Path(shutil.copytree(study[0] / name, tmp_path / name)) for name in ("tiny-rope", "tiny-sinusoidal")]


def spoil_setting(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"]["learning_rate"] = 0.5
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def spoil_tokenizer(run: Path) -> None:
    path = next((run / "checkpoints").glob("step-0000012/state.json"))
    state = {**json.loads(path.read_text()), "tokenizer_sha256": "0"}
    path.write_text(json.dumps(checkpoint.sealed(state)))


def only_training_curve(run: Path) -> None:
    lengths = json.loads((run / "lengths.json").read_text())
    (run / "lengths.json").write_text(json.dumps({k: v for k, v in lengths.items() if k != "copy_gain"}))


def same_cell(run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(run.parent / "tiny-rope", run)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (spoil_setting, "no fair comparison: train.learning_rate is 0.01 in"),
        (spoil_tokenizer, "tokenizer_sha256 is"),
        (only_training_curve, "run python scripts/evaluate.py"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "holds no checkpoint"),
        (lambda run: (run / "lengths.json").unlink(), "has no lengths.json: run python scripts/evaluate.py"),
        (shutil.rmtree, "has no config.yaml"),
        (same_cell, "are both rope of seed 0"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_in_one_line(
    pair: list[Path], tmp_path: Path, spoil, words: str, capsys: pytest.CaptureFixture
):
    spoil(pair[1])
    assert words in refused(compare.main, [*pair, f"--out={tmp_path / 'out'}"], capsys)
    assert not (tmp_path / "out").exists()


def test_evaluate_refuses_in_one_line(
    pair: list[Path], tmp_path: Path, text_folder: Path, capsys: pytest.CaptureFixture
):
    shutil.rmtree(pair[1] / "checkpoints")
    too_long = run_program(
        "train.py", *flags(text_folder, tmp_path), "--data.context=1200", "--train.batch_size=1", "--eval.length_ratios=[1,2]", "--train.steps=2", "--train.warmup_steps=0",
        "--name=long", "--tracking.mode=disabled",
    )  # fmt: skip
    assert too_long.returncode == 0 and "left out, longer than any held-out document: 2400" in too_long.stdout, (
        too_long.stderr
    )
    for run, words in (
        (pair[1], "holds no checkpoint"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "runs" / "long", "no held-out document is longer than the trained length of 1200 tokens"),
    ):
        assert words in refused(evaluate.main, [run], capsys)


def test_the_command_of_the_sweep_runs(text_folder: Path, tmp_path: Path):
    """As wandb's agent starts it: parameters become --key=value, and ${env} and ${program} are filled in."""
    sweep = yaml.safe_load((ROOT / "configs/sweep.yaml").read_text())
    assert sweep["parameters"]["model.position"]["values"] == ["rope", "sinusoidal", "alibi", "nope"]
    chosen = ["--model.position=alibi", "--seed=2"]
    filled = {"${env}": ["/usr/bin/env"], "${program}": [sweep["program"]], "${args}": chosen}
    command = [word for part in sweep["command"] for word in filled.get(part, [part])]
    command[command.index("python")] = sys.executable
    done = subprocess.run(
        [*command, *flags(text_folder, tmp_path)[1:], "--tracking.mode=disabled"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "runs/small-alibi-s2/config.yaml").read_text())
    assert config["model"]["position"] == "alibi" and config["seed"] == 2
