"""docs/reference.md, all arguments, from the docstrings: ``python -m benchmarks.reference``."""

from __future__ import annotations

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import decent_dp
from decent_dp import checkpoint, errors, launch, logging, optim, sim
from decent_dp.faults import Roster

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

HEAD = """# All arguments

<!-- Made from the docstrings by `python -m benchmarks.reference`; a test compares them. -->

```bash
python -c "import decent_dp; help(decent_dp.gossip)"
```

The docstrings have more than these tables: what is returned, what is raised, and why. Other modules and names may change at any
time. More of [topologies](topologies.md), [compression and encryption](network.md), [rules](rules.md), [faults](faults.md),
[nodes](nodes.md), [process groups](launch.md#process-groups),
[weights](data-and-evaluation.md#workers-with-batches-of-different-sizes), [the wrapper](wrapper.md).

All workers make a call that is "called by all workers" in the same round. If they have made different numbers of rounds, all of
them raise an `OutOfStepError`. If only one worker calls, it waits for the others until the process group's timeout. So put
`if rank == 0:` inside `averaged()`, not around it.
"""

# Headings, and what stands below them.
PARTS: list[tuple[str, list[Any]]] = [
    ("Train", [decent_dp.gossip, decent_dp.Gossip, decent_dp.Stats, Roster]),
    ("Start", [launch.initialize_dist, launch.spawn, decent_dp.Tolerate, decent_dp.join]),
    ("Data", [decent_dp.RosterSampler]),
    (
        "Save and stop",
        [
            checkpoint.save,
            checkpoint.Saving,
            checkpoint.load,
            checkpoint.latest,
            checkpoint.read_parameters,
            checkpoint.export,
            checkpoint.calibrate,
            checkpoint.AveragedReplica,
            checkpoint.Preemption,
        ],
    ),
    ("Watch", [logging.Recorder, logging.publish]),
    (
        "Optimizers and rules",
        [
            decent_dp.GossipAdamW,
            decent_dp.AccumAdamW,
            decent_dp.MomentumTracking,
            decent_dp.OuterNesterov,
            decent_dp.GASLoC,
            optim.lr_scheduler_fn_cosine_with_warmup,
        ],
    ),
    ("The wrapper", [decent_dp.DecentralizedDataParallel]),
    ("The simulator", [sim.VirtualCluster]),
]
# What these share with gossip() is described there: methods, and arguments unless their default is another one.
SHARE = (decent_dp.DecentralizedDataParallel, sim.VirtualCluster)
# The methods of these classes that users call; of others all, but for those of NO_METHODS, which this library calls.
METHODS: dict[type, str] = {
    sim.VirtualCluster: "step kill revive cut heal alive consensus_distance mean_model replica_model",
    decent_dp.Gossip: "averaged average_ consensus_distance gather due roster on_roster stats no_sync join flush state_dict "
    "load_state_dict close",
    decent_dp.DecentralizedDataParallel: "state_dict load_state_dict zero_grad set_accumulate_grad no_sync update "
    "set_adaptive_factor global_avg revert_global_avg optimizers lr_schedulers get_lr optim_state_dict load_optim_state_dict",
}
NO_METHODS = (decent_dp.Rule, decent_dp.GossipAdamW, decent_dp.AccumAdamW, decent_dp.Tolerate, Roster)


def plain(text: str) -> str:
    """A docstring's words as Markdown of one line."""
    text = re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))
    return text.replace("|", "\\|")


def sections(item: Any) -> dict[str, str]:
    """A docstring by its headings; what comes before them is under ''."""
    found = re.split(r"^(Args|Attributes|Returns|Yields|Raises):\n", inspect.getdoc(item) or "", flags=re.MULTILINE)
    return {"": found[0], **dict(zip(found[1::2], found[2::2], strict=True))}


def entries(text: str) -> dict[str, str]:
    """The entries of a section: names, and what is said of them."""
    found = re.findall(r"^    (\S[^:\n]*): (.*(?:\n(?:        .*|$))*)", text, flags=re.MULTILINE)
    return {names: plain(said) for names, said in found}


def default_of(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, tuple) and value and isinstance(value[0], enum.Enum):
        return ", ".join(f"`{one.name}`" for one in value)
    return f"`{value!r}`"


def arguments(item: Any) -> list[str]:
    """The rows of an item's table: names, defaults, meaning."""
    said = sections(item)
    parameters = dict(inspect.signature(item).parameters)
    elsewhere = inspect.signature(decent_dp.gossip).parameters if item in SHARE else {}
    rows = []
    for names, meaning in entries(said.get("Args", said.get("Attributes", ""))).items():
        each = [name.strip("*") for name in names.split(", ")]
        of = [parameters[name] for name in each if name in parameters]
        if of and all(p.name in elsewhere and p.default == elsewhere[p.name].default for p in of):
            continue
        defaults = ", ".join(dict.fromkeys(filter(None, map(default_of, of))))
        rows.append(f"| {', '.join(f'`{name}`' for name in each)} | {defaults} | {meaning} |")
    return rows


def methods(item: type) -> list[str]:
    """The rows of a class's methods and properties."""
    names = METHODS[item].split() if item in METHODS else [name for name in vars(item) if not name.startswith("_")]
    rows = []
    for name, found in ((name, inspect.getattr_static(item, name)) for name in names):
        first = plain(sections(found)[""].partition("\n\n")[0])
        if isinstance(found, property):
            rows.append(f"| `{name}` | {first} |")
        elif inspect.isfunction(found):
            given = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
            shown = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in given)
            more = " ".join(f"`{key}`: {text}" for key, text in entries(sections(found).get("Args", "")).items())
            rows.append(f"| `{name}({shown})` | {first} {more}".rstrip() + " |")
    return rows


def described(item: Any) -> str:
    lines = [f"### {item.__name__}\n", plain(sections(item)[""].partition("\n\n")[0])]
    if item in SHARE:
        lines[-1] += " What is not in the tables is as with `gossip`."
    if rows := arguments(item):
        lines += ["", f"| {'argument' if 'Args' in sections(item) else 'field'} | default | meaning |", "|---|---|---|", *rows]
    if inspect.isclass(item) and not issubclass(item, NO_METHODS) and (rows := methods(item)):
        lines += ["", "| method | does |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def make_page() -> str:
    parts = [HEAD]
    for heading, items in PARTS:
        parts += [f"## {heading}\n", *map(described, items)]
    rows = [f"| `{name}` | {plain(sections(getattr(errors, name))[''])} |" for name in errors.__all__]
    return "\n".join([*parts, "## Errors\n", "| error | when |\n|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
