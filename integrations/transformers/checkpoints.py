"""Checkpoints from which a run can be continued: model, optimizer, scheduler, random numbers, position in the data.

transformers saves no optimizer state of models that were sharded when they were loaded. `CheckpointCallback` does for
Trainer, `Checkpoints` for a loop of one's own. Both write model and optimizer by
``torch.distributed.checkpoint``, which divides them anew among another number of ranks.

A checkpoint is complete once the file ``.metadata`` is there, which PyTorch writes last and renames into its place.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.utils._pytree import tree_map_only
from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_PLACE = "run"  # in a checkpoint of Trainer
_COMPLETE = ".metadata"
_REST = "rest.pt"  # what is the same on all ranks
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # groups of parameters may differ with the ranks


class Checkpoints:
    """The checkpoints of a loop of one's own, in one folder that all ranks see.

        checkpoints = Checkpoints("out", model, optimizer, scheduler)
        position = checkpoints.load() or {"step": 0}
        for step in range(position["step"], steps):
            ...
            checkpoints.save(step + 1, {"step": step + 1})
        checkpoints.wait()

    All ranks of the default group call its methods together.

    Args:
        folder: where the checkpoints are, each in a folder ``step-NUMBER``.
        model, optimizer: as they train. Their tensors may be sharded.
        scheduler: anything with `state_dict` and `load_state_dict`, or None.
        keep: the number of complete checkpoints that stay, at least 1. `save` removes older ones.
        asynchronous: `save` returns when the tensors are copied to host memory. They are written meanwhile.
    """

    def __init__(
        self,
        folder: str | Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        keep: int = 2,
        asynchronous: bool = False,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: expected an integer of at least 1, got {keep!r}")
        self._folder, self._keep = Path(folder), keep
        self._run = _Run(model, optimizer, scheduler, asynchronous)

    def save(self, step: int, position: dict[str, Any]) -> None:
        """Writes a checkpoint. position: numbers, text and tensors, the same on all ranks, which `load` returns.

        Waits for the checkpoint that is written now, if there is one, and raises its error.
        """
        self.wait()
        numbers = _random_state()
        self._run.write(self._folder / f"step-{step}", position, numbers)
        _set_random_state(numbers)  # writing draws some
        if not self._run.is_writing:
            self._remove_old()

    def load(self) -> dict[str, Any] | None:
        """Loads the latest complete checkpoint, and returns its position. None: there is none."""
        found = _latest(self._folder, "step", Path())
        return None if found is None else self._run.read(found)

    def wait(self) -> None:
        """Waits for the checkpoint that is written now, and raises its error."""
        if self._run.wait():
            self._remove_old()

    def _remove_old(self) -> None:
        if _rank() == 0:
            for old in _complete(self._folder, "step", Path())[: -self._keep]:
                shutil.rmtree(old)


class CheckpointCallback(TrainerCallback):
    """Makes Trainer's checkpoints ones to continue from, although the model was sharded at load.

        checkpoints = CheckpointCallback(trainer)
        trainer.train(resume_from_checkpoint=checkpoints.latest())

    Every rank makes one, before training. Pass ``save_only_model=True`` and any ``save_strategy``: each checkpoint then
    has the model as transformers loads it, and beside it, in the folder ``run``, what continues the run. Trainer
    removes old checkpoints by ``save_total_limit``. The folder must be one that all ranks see.

    With another number of ranks the run continues with the same weights and optimizer state. Its batches are the same
    if ranks times ``per_device_train_batch_size`` stays, and its random numbers are new ones.

    Args:
        trainer: the Trainer. This object calls its method `add_callback`.
        asynchronous: training goes on when the tensors are copied to host memory. They are written meanwhile. The next
            checkpoint and the end of training wait for them. Needs a ``save_total_limit`` of 2 or more, or none:
            Trainer removes the older checkpoint before the new one is complete.

    Raises:
        ValueError: the trainer would save its own optimizer state, or asynchronous with a save_total_limit of 1.
    """

    def __init__(self, trainer: Trainer, asynchronous: bool = False) -> None:
        arguments = trainer.args
        if not arguments.save_only_model:
            raise ValueError("save_only_model: expected True, since this callback saves the rest, got False")
        if asynchronous and arguments.save_total_limit == 1:
            raise ValueError("save_total_limit: expected at least 2 with asynchronous=True, got 1")
        self._trainer, self._asynchronous = trainer, asynchronous
        self._folder = Path(str(arguments.output_dir))
        self._run: _Run | None = None
        self._save_model = trainer.save_model
        ours = {
            "save_model": self._save,  # Trainer removes old checkpoints afterwards
            "_load_from_checkpoint": self._check,
            "_load_optimizer_and_scheduler": self._load,
            "_load_rng_state": _load_random,
        }
        for name, function in ours.items():
            setattr(trainer, name, function)
        trainer.add_callback(self)

    def latest(self) -> str | None:
        """Returns the latest complete checkpoint in the trainer's output_dir, the same on all ranks. None: none."""
        found = _latest(self._folder, "checkpoint", Path(_PLACE))
        return None if found is None else str(found)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes Trainer remove checkpoints first that a run has left half written, or half removed."""
        if _rank() == 0:
            for one in self._folder.glob("checkpoint-*"):
                if not _is_complete(one, Path(_PLACE)):
                    os.utime(one, (0, 0))  # it removes the oldest

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._run is not None:
            self._run.wait()

    def _save(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._run is not None:
            self._run.wait()
        numbers = _random_state()
        self._save_model(output_dir, _internal_call=_internal_call)
        if _internal_call and output_dir is not None:
            self._made().write(Path(output_dir, _PLACE), {}, numbers)
        _set_random_state(numbers)  # writing draws some

    def _made(self) -> _Run:
        trainer = self._trainer
        if self._run is None or self._run.optimizer is not _inner(trainer.optimizer):
            scaler = getattr(trainer.accelerator, "scaler", None)
            self._run = _Run(trainer.model, trainer.optimizer, trainer.lr_scheduler, self._asynchronous, scaler)
        return self._run

    def _check(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Takes the place of Trainer's loading of weights, which `_load` does."""
        path = Path(resume_from_checkpoint)
        if not _is_complete(path, Path(_PLACE)):
            raise ValueError(
                f"resume_from_checkpoint: expected a complete checkpoint with the folder {_PLACE!r} of a "
                f"CheckpointCallback, got {path}; CheckpointCallback.latest() finds one"
            )

    def _load(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._made().read(Path(checkpoint, _PLACE))


class _Run:
    """The objects whose state a checkpoint has."""

    def __init__(
        self, model: Any, optimizer: Any, scheduler: Any, asynchronous: bool = False, scaler: Any = None
    ) -> None:
        self.model, self.optimizer = model, _inner(optimizer)
        self._rest = {"scheduler": scheduler, "scaler": scaler}
        # The thread that writes needs a group of its own, whose backend serves CPUs.
        self._group = dist.new_group(backend="gloo") if asynchronous and dist.is_initialized() else None
        self._asynchronous = asynchronous
        self._written: Any = None

    @property
    def is_writing(self) -> bool:
        return self._written is not None

    def write(self, path: Path, position: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Writes a checkpoint, or begins to. Collective. numbers: the state of the random numbers."""
        if _rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # left by a run that ended while it wrote
            path.mkdir(parents=True)
            states = {name: one.state_dict() for name, one in self._rest.items() if one is not None}
            torch.save(states | {"position": position, "ranks": _num_ranks()}, path / _REST)
        if dist.is_initialized():
            dist.barrier()
        torch.save(numbers, path / _random_file())
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_BY_NAME)
        state = {"model": model, "optimizer": optimizer}
        if not self._asynchronous:
            save(state, checkpoint_id=path)
        else:
            self._written = async_save(state, checkpoint_id=path, process_group=self._group, async_stager=_Copies())

    def wait(self) -> bool:
        """Waits until what is being written is complete. Returns whether anything was."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
        return written is not None

    def read(self, path: Path) -> dict[str, Any]:
        """Loads a complete checkpoint. Returns its position. Collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_BY_NAME)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_BY_NAME,
        )
        rest: dict[str, Any] = torch.load(path / _REST, weights_only=True, map_location="cpu")
        for name, one in self._rest.items():
            if one is not None and name in rest:
                one.load_state_dict(self._fitted(rest[name]))
        _set_random_state(_kept_state(path))
        found: dict[str, Any] = rest["position"]
        return found

    def _fitted(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a scheduler's state for as many groups of parameters as the optimizer has here.

        transformers makes a group for each mesh. Groups of one schedule are equal, so any number of them is.
        """
        groups = len(self.optimizer.param_groups)
        before = len(state.get("base_lrs", range(groups)))
        if before == groups:
            return state
        fitted = dict(state)
        for name, values in state.items():
            if isinstance(values, list) and len(values) == before:
                if any(value != values[0] for value in values):
                    raise ValueError(f"scheduler: expected {groups} equal groups in {name}, got {values}")
                fitted[name] = values[:1] * groups
        return fitted


class _Copies(BlockingAsyncStager):
    """Copies tensors to host memory, before the training goes on. PyTorch's own deep copies fail for some DTensors."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copies: dict[str, Any] = tree_map_only(torch.Tensor, lambda one: one.detach().to("cpu", copy=True), state_dict)
        return copies


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _complete(folder: Path, prefix: str, place: Path) -> list[Path]:
    """Returns the complete checkpoints in `folder`, the latest last."""
    names = re.compile(rf"{prefix}-(\d+)")
    found = [(int(match[1]), one) for one in folder.glob("*") if (match := names.fullmatch(one.name))]
    return [one for _, one in sorted(found) if _is_complete(one, place)]


def _latest(folder: Path, prefix: str, place: Path) -> Path | None:
    """Returns the latest complete checkpoint that rank 0 sees, the same on all ranks. Collective."""
    found = [next(reversed(_complete(folder, prefix, place)), None) if _rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _is_complete(path: Path, place: Path) -> bool:
    """place: where the files are in the checkpoint. In one of Trainer, its own state, which it writes last, is read."""
    if place != Path():
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            return False
    return (path / place / _COMPLETE).is_file()


def _random_file() -> str:
    return f"random-{_rank()}.pt"


def _random_state() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def _set_random_state(state: dict[str, Any] | None) -> None:
    if state is None:
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _kept_state(path: Path) -> dict[str, Any] | None:
    """Returns the state of the random numbers that this rank had. None: it was another number of ranks."""
    if torch.load(path / _REST, weights_only=True, map_location="cpu")["ranks"] != _num_ranks():
        return None
    state: dict[str, Any] = torch.load(path / _random_file(), weights_only=True)
    return state


def _load_random(checkpoint: str | None) -> None:
    """Takes the place of Trainer's function, which it calls when it has skipped the batches of the checkpoint."""
    if checkpoint is not None:
        _set_random_state(_kept_state(Path(checkpoint, _PLACE)))
