"""The complete examples that docs/examples.md lists: their parts in this process, and whole runs as users start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp.checkpoint import latest
from examples import pretrain_gpt
from tests.helpers import ROOT, seed_cpu

# Short, so that they are read. Those of the integrations are skipped where they are not there.
COMPLETE = ["pretrain_gpt.py", "images_resnet.py", "lora_trainer.py", "lightning_digits.py", "slurm"]


# -- short ------------------------------------------------------------------------------------------------------------


def test_each_has_at_most_120_lines() -> None:
    found = [path for name in COMPLETE for path in ((ROOT / "examples" / name), *(ROOT / "examples" / name).glob("*"))]
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in found if path.is_file()}
    assert {name: length for name, length in lengths.items() if length > 120} == {}
    assert {"pretrain_gpt.py", "images_resnet.py"} <= lengths.keys()


# -- pretrain_gpt.py -------------------------------------------------------------------------------------------------------


def decoded(tokens: torch.Tensor, pairs: list[tuple[int, int]]) -> bytes:
    table = [bytes([byte]) for byte in range(256)]
    for first, second in pairs:
        table.append(table[first] + table[second])
    return b"".join(table[token] for token in tokens.tolist())


def test_tokens_are_the_text() -> None:
    text = Path(pretrain_gpt.__file__).read_bytes()
    pairs: list[tuple[int, int]] = []
    tokens = pretrain_gpt.encode(text, pairs, 300)
    assert len(pairs) == 300 - 256
    assert len(tokens) < 0.8 * len(text)
    assert decoded(tokens, pairs) == text
    # With pairs that are known nothing is learned, and any text is encoded with them.
    known = list(pairs)
    assert torch.equal(pretrain_gpt.encode(text, pairs, 300), tokens)
    for other in ("größer, 'aaaa', \n\n\n\t\0".encode(), bytes(range(256)), b"a"):
        assert decoded(pretrain_gpt.encode(other, pairs, 300), pairs) == other
    assert pairs == known


def test_the_language_model_sees_only_earlier_tokens() -> None:
    seed_cpu(0)
    size = {**pretrain_gpt.SMALL, "layers": 2, "heads": 2, "width": 16, "context": 12}
    model = pretrain_gpt.GPT(pretrain_gpt.argparse.Namespace(**size))
    outputs: list[torch.Tensor] = []
    model.blocks.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    windows = torch.randint(512, (1, 13))
    changed = windows.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 512
    assert model(windows).item() == pytest.approx(np.log(512), rel=0.02)  # it knows nothing yet
    model(changed)
    same = (outputs[0] == outputs[1]).all(dim=2)[0]
    assert same.tolist() == [True] * 7 + [False] * 5


# -- images_resnet.py ------------------------------------------------------------------------------------------------------


# -- whole runs ------------------------------------------------------------------------------------------------------------

WORKERS = 2


def command(script: str, *options: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    return [sys.executable, *launcher, f"examples/{script}", "--small", *options]


def environ() -> dict[str, str]:
    # A hidden download is an error: there is no way out but loopback.
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return {**os.environ, **proxies, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(script: str, folder: Path, *options: str) -> dict[str, Any]:
    """A whole run: its results."""
    file = folder / "new" / "result.json"
    done = subprocess.run(
        command(script, "--out", str(file), *options),
        cwd=ROOT,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["workers"] == WORKERS
    # One worker speaks, a line for each report, which says whose loss it is.
    assert len(done.stdout.splitlines()) == len(result["history"])
    assert all(word in done.stdout for word in ("local loss", "mean loss", "of the mean model", "ms per step"))
    return result


def stop(script: str, folder: Path) -> None:
    """A run that is told to stop when it has reported twice, and has saved."""
    words = command(script, "--checkpoint", str(folder / "checkpoints"))
    with subprocess.Popen(
        words, cwd=ROOT, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            for _ in range(2):
                assert process.stdout.readline()
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)  # torchrun passes it on, and ends with an error of its own
            assert process.wait(120) != 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert latest(folder / "checkpoints") is not None


def numbers(result: dict[str, Any]) -> list[dict[str, float]]:
    """The history without times, which are the machine's."""
    return [{name: value for name, value in row.items() if name != "ms per step"} for row in result["history"]]


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """A run that was stopped after two reports has saved once more, and a save mixes what is in flight."""
    own, other = numbers(found), numbers(expected)
    assert (own[:2], len(own)) == (other[:2], len(other))
    assert own[-1] == pytest.approx(other[-1], rel=0.2)  # small models and batches: they part soon


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpt")
    return train("pretrain_gpt.py", folder, "--checkpoint", str(folder / "checkpoints"))


@pytest.fixture(scope="module")
def recognized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("skimage")
    folder = tmp_path_factory.mktemp("images")
    saves = "--save", str(folder / "model.pt"), "--checkpoint", str(folder / "checkpoints")
    result = train("images_resnet.py", folder, *saves)
    return {**result, "model": folder / "model.pt"}


LOSS = "validation loss of the mean model"


@pytest.mark.slow
def test_pretraining_learns_and_ends_where_ddp_does(pretrained: dict[str, Any], tmp_path: Path) -> None:
    first, *_, last = pretrained["history"]
    assert [row["step"] for row in pretrained["history"]] == list(range(50, 301, 50))
    assert last[LOSS] < first[LOSS] - 0.5 < np.log(pretrain_gpt.SMALL["vocabulary"]) - 0.5
    assert last[LOSS] < 4.6  # much less than without context: the entropy of single tokens is above 5
    assert last["mean loss"] != last["local loss"]
    assert last["mean loss"] == pytest.approx(last["local loss"], rel=0.05)
    ddp = train("pretrain_gpt.py", tmp_path, "--method", "ddp")
    assert ddp["method"] == "ddp"
    assert last[LOSS] == pytest.approx(ddp["history"][-1][LOSS], rel=0.03)
    assert last["mean loss"] == pytest.approx(ddp["history"][-1]["mean loss"], rel=0.03)


@pytest.mark.slow
def test_pretraining_continues(pretrained: dict[str, Any], tmp_path: Path) -> None:
    stop("pretrain_gpt.py", tmp_path)
    resumed = train_again("pretrain_gpt.py", tmp_path)
    assert_alike(resumed, pretrained)


@pytest.mark.slow
def test_photographs_are_recognized_by_the_mean_model(recognized: dict[str, Any]) -> None:
    from torch.utils.data import ConcatDataset, DataLoader

    from examples import images_resnet

    first, *_, last = recognized["history"]
    assert last["mean loss"] < 0.5 * first["mean loss"]
    found = last["accuracy of the mean model"]
    assert found > 0.65  # guessing the largest class gives 0.11
    # The file is a plain state dict, with statistics of BatchNorm for the mean model.
    model = images_resnet.make_resnet(images_resnet.SMALL["widths"])
    model.load_state_dict(torch.load(recognized["model"], weights_only=True), strict=True)
    model.eval()
    held_out = ConcatDataset([images_resnet.read_patches(name, i)[1] for i, name in enumerate(images_resnet.PHOTOS)])
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(held_out, 256))
    assert right / len(held_out) == pytest.approx(found, abs=0.01)


@pytest.mark.slow
def test_recognition_continues(recognized: dict[str, Any], tmp_path: Path) -> None:
    stop("images_resnet.py", tmp_path)
    resumed = train_again("images_resnet.py", tmp_path)
    assert_alike(resumed, recognized)


def train_again(script: str, folder: Path) -> dict[str, Any]:
    """The second start of a run: it makes only the steps that are left."""
    file = folder / "result.json"
    words = command(script, "--checkpoint", str(folder / "checkpoints"), "--out", str(file))
    done = subprocess.run(words, cwd=ROOT, env=environ(), capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    assert 0 < len(done.stdout.splitlines()) < len(result["history"])
    return result


def test_checkpoints_of_ddp_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--method", "ddp", "--checkpoint", "runs/gpt"])
    with pytest.raises(SystemExit):
        pretrain_gpt.main()
    assert "--checkpoint is for gossip" in capsys.readouterr().err


def test_the_committed_results_are_those_of_the_page() -> None:
    from benchmarks import examples

    results = json.loads((examples.RESULTS / "examples.json").read_text(encoding="utf-8"))
    assert results["workers"] == examples.WORKERS == 4
    table = (examples.RESULTS / "examples.md").read_text(encoding="utf-8")
    assert table == examples.make_table(results["runs"])
    page = (ROOT / "docs" / "lab" / "demo.md").read_text(encoding="utf-8")
    assert table in page, "run `make examples`, and put docs/results/examples.md onto the page"
