"""PyTorch Lightning over nn.EmbeddingBag, and the same module through the nested pipeline.

python examples/lightning_loop.py --plain     the module as it was
python examples/lightning_loop.py             with the lines marked "changed"

Two lines change, in `main`; `Pipelined` is the same for every module that has a `net` and optimizes by hand. Lightning
counts, logs, validates and calls callbacks as before; the pipeline draws the batches, and steps the dense optimizer
through Lightning's wrapper of it. Schedulers are stepped by hand, too; Lightning's files hold the tables' rows but not
the states of their optimizers, which nk.checkpoint.save does. From the second epoch on Lightning alone shuffles in
another order, as it makes one iterator more.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch
from plain_loop import Recommender, loss_fn, make_loader

import nestpipe_kernels as nk

try:
    import pytorch_lightning as pl
except ImportError as error:
    sys.exit(f"this example needs PyTorch Lightning: pip install pytorch-lightning ({error})")


class Module(pl.LightningModule):
    """A module as anybody's: one optimizer for the dense part and one for the tables, which have sparse gradients."""

    automatic_optimization = False  # Lightning's own loop takes one optimizer

    def __init__(self) -> None:
        super().__init__()
        self.net = Recommender(users=1000, films=1000, dim=16)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(self.net.top.parameters(), lr=1e-3)]
        tables = [p for name, p in self.net.named_parameters() if not name.startswith("top.")]
        return optimizers + ([torch.optim.SparseAdam(tables, lr=1e-3)] if tables else [])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = loss_fn(self.net, batch)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("loss", loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = loss_fn(self.net, batch)
        self.log("val_loss", loss, batch_size=len(batch[0]))


class Pipelined(pl.LightningModule):
    """A module whose tables are converted, trained through a pipeline: Lightning's batches are numbers of steps."""

    automatic_optimization = False

    def __init__(self, module: Module, loader: Any, config: nk.PipelineConfig | None = None) -> None:
        super().__init__()
        self.module, self.loader, self.config = module, loader, config

    def configure_optimizers(self) -> Any:
        return self.module.configure_optimizers()

    def train_dataloader(self) -> range:
        self.pipe = nk.NestedPipeline(self.module.net, self.optimizers(), loss_fn, self.config)
        return range(len(self.loader))

    def on_train_epoch_start(self) -> None:
        self.steps = self.pipe.run(self.loader)

    def training_step(self, number: int, batch_idx: int) -> None:
        self.log("loss", next(self.steps).loss)

    def on_train_epoch_end(self) -> None:
        next(self.steps, None)  # the last update is in the tables

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = loss_fn(self.module.net, batch)
        self.log("val_loss", loss, batch_size=len(batch[0]))

    def on_fit_end(self) -> None:
        self.pipe.close()


class Printer(pl.Callback):
    """Prints what Lightning has logged: of every step the loss, of every epoch the validation."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        print(f"step {trainer.global_step:>3}   loss {float(trainer.logged_metrics['loss']):.5f}")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        print(f"epoch {trainer.current_epoch}   val_loss {float(trainer.callback_metrics['val_loss']):.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the module before, in Lightning alone")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()

    warnings.filterwarnings("ignore", module="pytorch_lightning")
    torch.manual_seed(0)
    module, loader, held_out = Module(), make_loader(options.batch_size), make_loader(1024)
    trainer = pl.Trainer(
        max_epochs=options.epochs, accelerator="cpu", logger=False, enable_checkpointing=False, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[Printer()],
    )  # fmt: skip
    if options.plain:
        trainer.fit(module, loader, held_out)
        return
    nk.convert(module, nk.optim.Adam(lr=1e-3))  # changed: was SparseAdam over the tables
    trainer.fit(Pipelined(module, loader), val_dataloaders=held_out)  # changed: was trainer.fit(module, loader, ...)


if __name__ == "__main__":
    main()
