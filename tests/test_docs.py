"""The documents: every code block runs, every path, link, command and message that they name exists.

A page's ```python blocks run from top to bottom in one namespace, in a fresh worker without a launcher and in an empty
directory, with warnings as errors. What they print is on the page, as lines ``# > ...`` (``…`` stands for anything), and
nothing else may be printed. A ```diff block is a whole script before and after a change, and both sides run on two workers.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch._C._profiler import _ExperimentalConfig

from decent_dp.rules import Rule
from tests.helpers import ROOT
from tests.sharded_cases import CPUS_CAN_SHARD

USERS = sorted((ROOT / "docs").glob("*.md"))  # the pages for users; docs/lab/ has what was measured, and the log
PAGES = [ROOT / "README.md", *USERS, *sorted((ROOT / "docs" / "lab").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

# Blocks that are shown but not run, as page: how many. They say so themselves: ```python no-run
NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "docs/faults.md": 1,
    "docs/launch.md": 2,
    "docs/lightning.md": 6,
    "docs/lab/log.md": 4,
    "docs/ray.md": 1,
    "docs/nodes.md": 1,
    "docs/transformers.md": 2,
}
# The reader's own files, which no command of ours has to find.
THEIRS = {"train.py", "model.pt", "test.sbatch"}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=page_id)
each_text = pytest.mark.parametrize("page", TEXTS, ids=page_id)
# The log and the changelog may name what is no longer there.
HISTORY = {"docs/lab/log.md", "CHANGELOG.md"}
each_present_text = pytest.mark.parametrize("page", [page for page in TEXTS if page_id(page) not in HISTORY], ids=page_id)


@dataclass(frozen=True)
class Block:
    info: str  # what stands after the opening fence
    line: int  # of its first line of code in the page, from 1
    code: str


def blocks_of(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    found, start, info = [], None, ""
    for i, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start, info = i + 1, line[3:].strip()
        else:
            found.append(Block(info, start + 1, "".join(lines[start:i])))
            start = None
    assert start is None, f"{page.name}: the block that begins before line {start} has no end"
    return found


def blocks(page: Path, *infos: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.info in infos]


def prose(page: Path) -> str:
    """The page without its code blocks and comments."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


@each_text
def test_blocks_are_of_a_known_kind(page):
    kinds = {"python", "python no-run", "diff", "bash", "text"}
    assert {b.info for b in blocks_of(page)} <= kinds, "a block of another kind would be neither run nor checked"
    assert len(blocks(page, "python no-run")) == NOT_RUN.get(page_id(page), 0)


# -- python ----------------------------------------------------------------------------------------------------------------


def run_page(rank: int, n: int, name: str, found: list[Block]) -> list[tuple[int, str]]:
    """Runs a page's blocks; what each printed, with its line."""
    import torch.distributed as dist

    dist.destroy_process_group()  # the reader has none either
    # A page that registers something does so for itself: this process ends with it.
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for block in found:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                # Moved down, so that a traceback shows the page's own lines.
                exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), names)
            printed.append((block.line, output.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()
        os.chdir("/")
    return printed


def shown_by(code: str) -> list[str]:
    return [match[1].rstrip() for line in code.splitlines() if (match := re.match(r"\s*# ?>(?: (.*))?$", line)) is not None]


def compare(where: str, code: str, output: str) -> None:
    shown, printed = [line or "" for line in shown_by(code)], [line.rstrip() for line in output.splitlines()]
    fits = len(shown) == len(printed) and all(
        re.fullmatch(re.escape(want).replace("…", ".*"), got) for want, got in zip(shown, printed, strict=True)
    )
    assert fits, f"{where} shows\n" + "\n".join(shown) + "\n\nand prints\n" + "\n".join(printed)


# What the oldest torch does not have, and frameworks that are not installed. A page ends at the first block with such a word.
TOO_NEW = [
    *(["profile_all_threads"] if "profile_all_threads" not in str(_ExperimentalConfig.__init__.__doc__) else []),
    *([] if CPUS_CAN_SHARD else ["fully_shard"]),
    *([] if find_spec("tensorboard") else ["Recorder"]),  # an extra of its own
    *([] if find_spec("accelerate") else ["from accelerate"]),
]


@each_page
def test_python_blocks_run_and_print_the_lines_shown(workers, page):
    written = blocks(page, "python")
    found = list(itertools.takewhile(lambda block: not any(word in block.code for word in TOO_NEW), written))
    if written and not found:
        pytest.skip("this page needs a newer torch, or a framework")
    if not found:
        return
    (printed,) = workers(1, run_page, page_id(page), found)
    for block, (line, output) in zip(found, printed, strict=True):
        compare(f"{page_id(page)}:{line}", block.code, output)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_quick_start_runs_under_torchrun(tmp_path, page):
    first = blocks(ROOT / page, "python")[0]
    (tmp_path / "train.py").write_text(first.code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    compare(f"under torchrun, {page}", first.code, done.stdout)
    assert (tmp_path / "model.pt").is_file()


def run_stopped(rank: int, n: int, folder: str, code: str) -> list[tuple[int, dict[str, Any]]]:
    """Runs a script to its end, and again with a stop at its fourth save and a second start: where it began, and its model."""
    from unittest.mock import patch

    from decent_dp import checkpoint

    def stop(*args: Any, **options: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(save(*args, **options))
        return calls[-1]

    save, calls, ends = checkpoint.save, [], []
    for stops in (False, True):
        Path(folder, str(stops)).mkdir(exist_ok=True)
        os.chdir(Path(folder, str(stops)))
        if stops:
            names: dict[str, Any] = {}
            with patch.object(checkpoint, "save", stop), pytest.raises(KeyboardInterrupt):
                exec(code, names)
            names["replica"].close()
        names = {}
        exec(code, names)
        ends.append((names["at"]["epoch"], names["model"].state_dict()))
    return ends


def test_the_script_that_saves_resumes_bit_for_bit(workers, tmp_path):
    code = blocks(ROOT / "docs" / "save-and-resume.md", "python")[0].code
    for (first, whole), (second, resumed) in workers(2, run_stopped, str(tmp_path), code):
        assert (first, second) == (0, 1)
        assert {name for name, value in whole.items() if not value.equal(resumed[name])} == set()


@pytest.mark.slow
def test_the_page_of_restarts_shows_the_job_script():
    script = (ROOT / "examples" / "slurm" / "job.sbatch").read_text(encoding="utf-8")
    shown = [block.code for block in blocks(ROOT / "docs" / "launch.md", "text") if "--signal=" in block.code]
    assert [code.strip() for code in shown] == [script[script.index("#SBATCH") :].strip()]


@pytest.mark.slow
def test_the_page_of_sharded_replicas_shows_the_example(tmp_path):
    (block,) = [block for block in blocks(ROOT / "docs" / "nodes.md", "python") if "fully_shard" in block.code]
    example = (ROOT / "examples" / "sharded.py").read_text(encoding="utf-8").partition("import annotations\n\n")[2]
    assert example == "".join(line for line in block.code.splitlines(keepends=True) if not line.startswith("# >"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = str(ROOT / "examples" / "sharded.py")
    done = subprocess.run([*command, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    shown = block.code.replace("# > 1 replicas of 1", "# > 2 replicas of 2")
    compare("under torchrun, docs/nodes.md", shown, done.stdout)
    assert (tmp_path / "model.pt").is_file()


# -- before and after -------------------------------------------------------------------------------------------------------


def side(diff: str, mark: str) -> str:
    """One of the two files in a diff of a whole file."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (mark, " ", "\n"))


def run_side(rank: int, n: int, name: str, code: str) -> str:
    """Runs a script on a worker whose process group is there already."""
    import torch.distributed as dist

    dist.init_process_group = lambda *args, **options: None
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *args: None
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        gc.collect()  # DDP lies in a cycle. Freed after its process group is destroyed, it can wait for ever, so before:
        destroy()
        assert (rank == 0) == Path("model.pt").exists(), "worker 0 saves the model"
        os.chdir("/")
    return output.getvalue()


@pytest.mark.parametrize("mark", ["-", "+"], ids=["before", "after"])
def test_both_sides_of_the_diff_run(workers, mark):
    page = ROOT / "docs" / "coming-from-ddp.md"
    (diff,) = blocks(page, "diff")
    code = side(diff.code, mark)
    assert ("DistributedDataParallel(" if mark == "-" else "decent_dp.gossip(") in code
    first, second = workers(2, run_side, f"{page.name} {mark}", code)
    compare(f"{page.name} ({mark})", code, first)
    assert second == ""


# -- shell -----------------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]  # variables before a command
            if words:
                yield words


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, flags=re.MULTILINE))


def test_install_lines_do_not_fetch_the_earlier_version():
    """The registries have one under the package's name. So a line has a place: a clone, an address, a wheel.

    By name alone it stands in two places: where an installed version lacks an extra, and where pages warn of it.
    """
    sources = [path for room in ("src", "examples", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    place = r"-e (?:\.|'\.\[{extras}\]')(?![\w\[.])|'decent-dp\[{extras}\] @ git\+https://|'\./decent_dp-\S+\.whl\[{extras}\]'"
    place = place.replace("{extras}", r"(?:[a-z,]+|\{extra\})")
    found = []
    for path in [*TEXTS, *sources, ROOT / "constraints.txt"]:
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"\bpip3? install(?! --upgrade pyzmq).*", text):
            by_name = path.name == "_checks.py" or line.startswith(
                ("pip install decent-dp` alone", "pip install decent-dp gives")
            )
            assert by_name or re.match(rf"pip install (?:-c constraints\.txt )?(?:{place})", line), f"{path}: {line}"
            found.append(path.name)
        for named in re.findall(r"(?:decent-dp|\.|whl)\[([a-z,]+)\]", text) if path in TEXTS else ():
            assert set(named.split(",")) <= extras(), f"{path}: {named}"
    assert {"README.md", "_checks.py", "compare.py", "net.py"} <= set(found)


@each_present_text
def test_commands_name_existing_targets(page):
    from torch.distributed.run import get_args_parser

    known = {"make", "pip", "python", "torchrun", "srun", "sbatch", "git", "cd", "source", "sudo", "decent-dp"}
    known |= {".venv/bin/python", ".venv/bin/pre-commit"}
    for words in commands(page):
        assert words[0] in known, words
        rest = words[1:]
        if words[0] == "make":
            assert {word for word in rest if "=" not in word} <= targets(), words
        if words[0] == "pip":
            for word in rest:
                named = re.search(r"\[(.*)\]", word)
                assert named is None or set(named[1].split(",")) <= extras(), words
        if words[0] == "torchrun":
            options = get_args_parser().parse_args(rest)  # an unknown option exits
            if options.module:
                assert [options.training_script, *options.training_script_args] == ["decent_dp", "doctor"], words
            else:
                assert options.training_script in THEIRS or (ROOT / options.training_script).is_file(), words
        check_script(rest)
        if "pytest" in words:
            check_tests(rest)


OURS = sorted(
    {tuple(words) for page in TEXTS if page_id(page) not in HISTORY for words in commands(page) if words[0] == "decent-dp"}
)
LAUNCHES = [words for words in OURS if words[1] == "launch"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.slow) if words[1] in ("simulate", "plan") else words
        for words in OURS
        if words not in LAUNCHES and words[1] != "roster"  # which serves until it is stopped (tests/test_epochs.py)
    ],
    ids=" ".join,
)
def test_the_command_line_runs_as_shown(words, tmp_path, monkeypatch, capsys):
    from decent_dp.tools.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(list(words[1:])) == 0
    shown = capsys.readouterr()
    assert shown.out
    assert shown.err == ""


@pytest.mark.parametrize("words", LAUNCHES, ids=" ".join)
def test_a_launch_on_a_page_lacks_only_the_readers_script(words, tmp_path, monkeypatch, capsys):
    from decent_dp.tools.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(list(words[1:])) == 2
    assert capsys.readouterr().err.startswith("decent-dp: there is no file 'train.py'")


@pytest.mark.parametrize("page", ["simulate", "network"])
def test_the_command_prints_the_plan_on_the_page(page, capsys):
    """On one of them a part of it."""
    from decent_dp.tools.cli import main

    path = ROOT / "docs" / f"{page}.md"
    command = next(words for words in commands(path) if words[:2] == ["decent-dp", "plan"])
    assert main(command[1:]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    shown = ["\n".join(line.rstrip() for line in block.code.strip().splitlines()) for block in blocks(path, "text")]
    assert any(text in printed for text in shown), printed


def check_script(words: list[str]) -> None:
    """Scripts and other files are there, and take the options that they are given."""
    for i, word in enumerate(words):
        path = word.partition("::")[0]
        if re.search(r"\.(py|md|toml|txt|json|sbatch)$", path) and path not in THEIRS and not path.startswith("runs/"):
            assert (ROOT / path).is_file(), words
            if path.startswith("examples/"):
                source = (ROOT / path).read_text()
                for option in (w for w in words[i + 1 :] if w.startswith("--")):
                    assert f'"{option}"' in source, f"{path} takes no {option}"
    if "-m" in words and words[words.index("-m") + 1].startswith(("examples.", "benchmarks.")):
        assert (ROOT / (words[words.index("-m") + 1].replace(".", "/") + ".py")).is_file(), words


def check_tests(words: list[str]) -> None:
    for word in words:
        path, _, test = word.partition("::")
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(), word


@each_present_text
def test_targets_in_the_text_exist(page):
    assert set(re.findall(r"`make ([a-z-]+)`", prose(page))) <= targets()


# -- links and paths ---------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub derives them from their text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_text
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@each_present_text
def test_named_files_exist(page):
    for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|txt|png))`", prose(page)):
        places = [ROOT / name, page.parent / name, ROOT / "src" / "decent_dp" / name]
        assert name in THEIRS or name.startswith("runs/") or any(place.exists() for place in places), name


def test_the_map_of_files_is_complete():
    (tree,) = [block.code for block in blocks(ROOT / "CONTRIBUTING.md", "text") if "src/decent_dp/" in block.code]
    named, above = set(), ""
    for line in tree.splitlines():
        indent, paths = re.match(r"( *)([^\s,]+(?:, [^\s,]+)*)", line).groups()
        above = paths if not indent else above
        named |= {paths} if not indent else {above + path for path in paths.split(", ")}
    assert {path for path in named if not (ROOT / path).exists()} == set()
    rooms = [p for p in (ROOT / "src" / "decent_dp").iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))]
    inside = {f"src/decent_dp/{p.name}{'/' if p.is_dir() else ''}" for p in rooms}
    inside |= {f"docs/{p.name}/" for p in (ROOT / "docs").iterdir() if p.is_dir()}
    inside |= {f"examples/{p.name}" for p in (ROOT / "examples").glob("*.py") if p.name != "__init__.py"}
    assert inside - named == set()


# -- what the pages say about the code -----------------------------------------------------------------------------------------


def test_the_page_of_all_arguments_is_that_of_the_docstrings():
    """What it has for a public class or function; each error; each counter."""
    from benchmarks import reference

    assert reference.PAGE.read_text(encoding="utf-8") == reference.make_page(), "run `python -m benchmarks.reference`"


def test_every_method_of_a_rule_is_on_its_page():
    for verb in (name for name, value in vars(Rule).items() if not name.startswith("_") and callable(value)):
        arguments = [name for name in inspect.signature(getattr(Rule, verb)).parameters if name != "self"]
        assert f"| `{verb}({', '.join(arguments)})` |" in text_of("docs/rules.md"), verb


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_readme_says_what_is_predicted_for_nodes_of_several_workers():
    command, predicted = re.findall(
        r"`decent-dp (plan [^`]*)` predicts ([^`]*)`gossip\(\)`", " ".join(text_of("README.md").split())
    )[0]
    done = subprocess.run(
        [sys.executable, "-m", "decent_dp", *command.split(), "--json"], capture_output=True, text=True, timeout=100
    )
    plan = json.loads(done.stdout)
    ms = {row["name"]: f"{row['step_ms']:,.0f}" for row in plan["predictions"]}
    assert "base-2" in json.dumps(plan["same_rounds"])
    assert predicted == f"{ms['ddp']} ms per step with DDP, and {ms['one-peer-exp, node']} with "


def test_the_site_has_every_page():
    named = re.findall(r"[:-] (\S+\.md)$", text_of("mkdocs.yml").partition("\nnav:\n")[2], flags=re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def messages() -> list[str]:
    """The texts in the source; what is filled in stands as …"""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_in_the_pages_are_those_of_the_code():
    texts = messages()
    page = ROOT / "docs" / "troubleshooting.md"
    table = page.read_text(encoding="utf-8").partition("## Messages")[2]
    rows = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(rows) >= 30
    for message in rows:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
        theirs = message.startswith(("one of the variables", "Tried to step"))  # torch's
        assert theirs or any(pattern.search(text) for text in texts), message


@each_page
def test_the_site_gets_fences_that_it_understands(page):
    """After a fence with two words, the site shows the rest of the page as code."""
    from benchmarks.site import on_page_markdown

    assert re.findall(r"^```\w+ .*$", on_page_markdown(page.read_text(encoding="utf-8")), re.MULTILINE) == []


# -- how much a reader has to read --------------------------------------------------------------------------------------------


def test_pages_are_few_and_short():
    assert len(USERS) <= 26
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()) <= 1500


@pytest.mark.parametrize("page", [ROOT / "README.md", *USERS], ids=page_id)
def test_a_page_begins_with_what_to_type_and_fits_a_narrow_screen(page):
    before, fence, _ = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).partition("\n```")
    assert fence
    assert len(before.split()) <= 80 or page not in USERS
    for block in blocks(page, "python", "python no-run", "bash", "diff"):
        for line in block.code.splitlines():
            assert len(line) <= 88 or line.lstrip().startswith("# >"), line
