"""A script with a Transformers Trainer, for torchrun.

torchrun --nproc-per-node 2 transformers_fit.py --steps 60 --folder checkpoints
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from holdfast.integrations.transformers import HoldfastCallback, last_checkpoint

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=60)
options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
options.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
options.add_argument("--folder", default="checkpoints")
options = options.parse_args()


class Sequences(torch.utils.data.Dataset):
    """256 random sequences of 16 tokens."""

    tokens = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        time.sleep(options.pause / 8)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


args = TrainingArguments(
    options.folder,
    max_steps=options.steps,
    save_steps=options.every,
    save_total_limit=3,
    logging_steps=1,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    dataloader_pin_memory=False,
    disable_tqdm=True,
)
set_seed(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    attention_dropout=0.1,
)
trainer = Trainer(
    LlamaForCausalLM(config),
    args,
    train_dataset=Sequences(),
    callbacks=[HoldfastCallback()],
)
trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
