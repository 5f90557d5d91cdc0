"""Train a transformers model with its Trainer in bfloat16, save it, and load it by from_pretrained."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import halfulp as hu
from halfulp.integrations.transformers import PrecisionCallback, optimizer

torch.manual_seed(0)
config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=16, n_positions=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)

starts = torch.randint(16, (256, 1))
tokens = (starts + 3 * torch.arange(16)) % 16  # each token is the one before plus 3
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=40, learning_rate=6e-3, per_device_train_batch_size=32, logging_steps=10, save_steps=20,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    narrow = optimizer(arguments, "AdamW", weight_update="kahan", param_dtype="bf16", report_interval=10)
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizer_cls_and_kwargs=narrow, callbacks=[PrecisionCallback()]
    )
    trainer.train()
    trainer.save_model(folder)
    again = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)

after = again(input_ids=tokens[:32], labels=tokens[:32]).loss.item()
before = GPT2LMHeadModel(config)(input_ids=tokens[:32], labels=tokens[:32]).loss.item()
print(f"loss {before:.3f} before training, {after:.3f} from the saved file")
print(hu.contract(model, trainer.optimizer))
assert after < before / 2
