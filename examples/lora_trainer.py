"""LoRA with the Trainer of transformers, by gossip: a decoder that knows Python's code learns Python's manual.

    torchrun --standalone --nproc-per-node 2 examples/lora_trainer.py --small

Nothing is downloaded: the text is the standard library's, and tokens are bytes. The same command continues a run that was
stopped. docs/transformers.md explains attach().
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import pydoc_data.topics

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from decent_dp import GossipAdamW
from decent_dp.integrations.transformers import attach


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a text, in bytes, that follow each other."""

    def __init__(self, text: bytes, length: int) -> None:
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = self.rows[i].long()
        return {"input_ids": tokens, "labels": tokens}


def texts() -> tuple[bytes, bytes]:
    """The sources of the standard library's modules, and the manual that Python's help() shows."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(source.read_bytes() for source in sources), "".join(pydoc_data.topics.topics.values()).encode()


def fit(model: nn.Module, text: bytes, folder: Path, steps: int, rate: float, options: argparse.Namespace) -> Trainer:
    """Trains on a text but its last tenth, and prints the loss on that tenth before and after."""
    split = len(text) * 9 // 10
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        max_grad_norm=2.0,  # of one worker's gradient, which is noisier than the mean of all
        per_device_train_batch_size=8,
        warmup_steps=10,
        logging_steps=20,
        save_steps=options.save_every,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    held_out = Windows(text[split : split + 20_000], options.length)
    optimizer = (GossipAdamW, {"lr": rate})
    data = {"train_dataset": Windows(text[:split], options.length), "eval_dataset": held_out}
    trainer = Trainer(model=model, args=args, optimizer_cls_and_kwargs=optimizer, **data)
    stopped = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    before = None if stopped else trainer.evaluate()["eval_loss"]
    callback = attach(trainer, topology=options.topology, signals=(signal.SIGTERM,))  # the one line
    trainer.train(resume_from_checkpoint=stopped)
    after = trainer.evaluate()["eval_loss"]  # of the mean, which the model is now
    if trainer.is_world_process_zero():
        start = f"continued from {Path(stopped).name}" if stopped else f"loss {before:.3f} before"
        stats = callback.replica.stats()
        sent = stats.bytes_sent / max(1, stats.rounds) / 1024
        print(f"{folder.name}: {start}, {after:.3f} after {steps} steps; {sent:.0f} KiB per step", flush=True)
    return trainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA with the Trainer of transformers, by gossip")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/lora"), help="checkpoints and the adapter; continued if it exists"
    )
    parser.add_argument("--topology", default="base-2")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--small", action="store_true", help="less than three minutes on two cores")
    options = parser.parse_args()
    options.width, options.layers, options.length = (64, 2, 64) if options.small else (384, 6, 256)
    options.steps = (150, 100) if options.small else (5000, 1000)
    return options


def main() -> None:
    options = parse()
    disable_progress_bar()
    set_seed(0)
    code, manual = texts()
    base = options.out / "base"  # stands for the pre-trained model of your choice
    if (base / "config.json").is_file():
        model = LlamaForCausalLM.from_pretrained(base)
    else:
        sizes = {"vocab_size": 256, "hidden_size": options.width, "intermediate_size": 3 * options.width}
        heads = {"num_hidden_layers": options.layers, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=options.length, **sizes, **heads))
        fit(model, code, options.out / "code", options.steps[0], 3e-3, options).save_model(str(base))
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = fit(get_peft_model(model, adapter), manual, options.out / "manual", options.steps[1], 1e-2, options)
    trainer.save_model(str(options.out / "adapter"))
    trainer.end()


if __name__ == "__main__":
    main()
