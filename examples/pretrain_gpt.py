"""Pretrains a GPT-2, decentralized, on the source code of Python's standard library.

    torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py --small                 # a minute on two cores
    torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py --small --method ddp    # the same with PyTorch DDP

With --checkpoint DIR, a run that was stopped continues exactly when it is started again.
"""

import argparse
import contextlib
import json
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import decent_dp
from decent_dp.checkpoint import Preemption, load, save
from decent_dp.optim import GossipAdamW, lr_scheduler_fn_cosine_with_warmup

GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 1024, "batch": 8, "lr": 6e-4, "steps": 500}
SMALL = {"layers": 3, "heads": 3, "width": 96, "context": 64, "vocabulary": 512, "batch": 8, "lr": 1e-3, "steps": 300}
EVERY = 50  # steps from one report, and one save, to the next
REPORT = ("step", "local loss", "mean loss", "validation loss of the mean model", "ms per step")  # losses in nats per token


def encode(text: bytes, pairs: list[tuple[int, int]], vocabulary: int) -> Tensor:
    """Byte-pair encoding. Pairs that are missing are learned: the most frequent pair of tokens becomes a token."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int64)
    for new in range(256, vocabulary):
        if new == 256 + len(pairs):
            differ = tokens[:-1] != tokens[1:]  # pairs of equal tokens could overlap, as in "aaa"
            pairs.append(divmod(int(np.bincount((tokens[:-1] * new + tokens[1:])[differ]).argmax()), new))
        first, second = pairs[new - 256]
        at = np.flatnonzero((tokens[:-1] == first) & (tokens[1:] == second))
        tokens[at] = new
        tokens = np.delete(tokens, at + 1)
    return torch.from_numpy(tokens)


class GPT(nn.Module):
    def __init__(self, size: argparse.Namespace) -> None:
        super().__init__()
        width = size.width
        self.tokens, self.places = nn.Embedding(size.vocabulary, width), nn.Embedding(size.context, width)
        block = nn.TransformerEncoderLayer(width, size.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, size.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for matrix in (param for param in self.parameters() if param.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Returns the mean loss, in nats, of predicting each token from those before it in its window."""
        x, targets = windows[:, :-1], windows[:, 1:].flatten()
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        x = self.blocks(self.tokens(x) + self.places.weight, mask, is_causal=True)
        return nn.functional.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), targets)  # tied weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrains a GPT-2 on the source code of the standard library.")
    parser.add_argument("--small", action="store_true", help="a model for CPUs; else it has GPT-2's size")
    parser.add_argument("--method", choices=["gossip", "ddp"], default="gossip")
    parser.add_argument("--checkpoint", metavar="DIR", help="where the run saves, and continues from")
    parser.add_argument("--out", metavar="FILE", help="where the results go, as JSON")
    options = parser.parse_args()
    if options.checkpoint and options.method == "ddp":
        parser.error("--checkpoint is for gossip: with DDP, save the model and the optimizer of one worker yourself")
    size = argparse.Namespace(**(SMALL if options.small else GPT2))
    rank, workers = decent_dp.initialize_dist()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    unseen, *seen = (b"".join(file.read_bytes() for file in modules[i::10]) for i in range(10))  # one of ten is held out
    encode(seen[0], pairs := [], size.vocabulary)  # learns the pairs
    windows, unseen = (encode(text, pairs, size.vocabulary).unfold(0, size.context + 1, 1) for text in (b"".join(seen), unseen))
    share = unseen[:: size.context][:240][rank::workers].to(device)  # each worker evaluates its share

    torch.manual_seed(rank)  # each worker draws its own windows; all begin with the model of worker 0
    model = GPT(size).to(device)
    optimizer = GossipAdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1)  # under DDP it is AdamW
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=size.steps * 9 // 10, t_warmup=size.steps // 10)
    replica = decent_dp.gossip(model, optimizer) if options.method == "gossip" else None  # a mix follows each step
    trained = model if replica else nn.parallel.DistributedDataParallel(model)
    found = load(replica, options.checkpoint, missing_ok=True) if options.checkpoint else None
    at = found or {"step": 0, "loss": torch.zeros((), device=device), "history": [], "scheduler": scheduler.state_dict()}
    scheduler.load_state_dict(at["scheduler"])
    began, since = time.perf_counter(), at["step"]
    with Preemption(replica) if options.checkpoint else contextlib.nullcontext() as stop:
        for step in range(at["step"] + 1, size.steps + 1):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = trained(windows[torch.randint(len(windows), (size.batch,))].to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            at["step"], at["loss"] = step, at["loss"] + loss.detach() / EVERY
            if step % EVERY == 0:  # only here do workers wait for all others
                local, ms = at["loss"].item(), 1e3 * (time.perf_counter() - began) / (step - since)
                with replica.averaged() if replica else contextlib.nullcontext(), torch.no_grad():
                    sums = torch.stack([at["loss"] / workers, model(share) * len(share) / 240])
                torch.distributed.all_reduce(sums)
                at["history"].append(dict(zip(REPORT, (step, local, *sums.tolist(), ms), strict=True)))
                if rank == 0:
                    print(", ".join(f"{name} {number:.4g}" for name, number in at["history"][-1].items()), flush=True)
                at["loss"], began, since = torch.zeros_like(at["loss"]), time.perf_counter(), step
            if stop and ((due := stop.due) or step % EVERY == 0):
                saving = save(replica, options.checkpoint, {**at, "scheduler": scheduler.state_dict()}, wait=due)
                if due:
                    raise SystemExit(saving.error)  # None is exit code 0
    if options.out and rank == 0:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps({"method": options.method, "workers": workers, "history": at["history"]}))


if __name__ == "__main__":
    main()
