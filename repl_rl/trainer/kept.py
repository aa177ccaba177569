"""TRL's trainer with a checkpoint manager: it saves its steps, and resumes from a saved state."""

from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from repl_rl.machine.refused import writing
from repl_rl.trainer.grpo_config import GRPOTrainer
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.order import Order
from repl_rl.trainer.sharded import check_sharded, shard


class Moves(TrainerCallback):
    """Trainer callback that calls the checkpoint manager."""

    def __init__(self, keeper: Keeper, trainer: GRPOTrainer) -> None:
        self._keeper, self._trainer = keeper, trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Intervals of logging and saving may change when a run resumes, so take those of the current settings.
        state.compute_steps(args, state.max_steps)
        # A checkpoint of transformers overwrites the entry of each callback, and fails without one. A saved state has
        # no entries, because callbacks may change, too, when a run resumes.
        state.stateful_callbacks = TrainerState(stateful_callbacks=self._trainer.stateful).stateful_callbacks
        self._keeper.began(self._trainer)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._keeper.turned(self._trainer)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._keeper.moving()


class KeptTrainer(GRPOTrainer):
    """TRL's trainer with an optional checkpoint manager."""

    keeper: Keeper | None = None
    """Checkpoint manager. None means that the run is not saved."""
    order: Order
    """Order of the tasks. Its random generator continues from epoch to epoch."""

    @property
    def steps_done(self) -> int:
        """Number of finished steps; each takes `optimizer_steps` optimizer steps."""
        done: int = self.state.global_step // self.optimizer_steps
        return done

    @property
    def stateful(self) -> list[object]:
        """Callbacks whose states transformers writes into its checkpoints."""
        return [one for one in (*self.callback_handler.callbacks, self.control) if isinstance(one, ExportableState)]

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per batch of rollouts."""
        passes: int = self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps
        return max(1, passes)

    def keep(self, keeper: Keeper, parts: Mapping[str, object], tell: Callable[[str], None]) -> None:
        """Attach a checkpoint manager: it saves the trainer with all stateful `parts`, and restores a resumed run.

        Under FSDP, the main process saves whole weights. Under DeepSpeed, nothing is saved and a warning is reported,
        because each process has only a part of the weights.

        Raises:
            ConfigError: as `Keeper.attach`.
        """
        if self.is_deepspeed_enabled:
            tell("no states are saved, so the run cannot be resumed: each process has a part of the weights alone")
            return
        keeper.attach(self, parts)
        self.keeper = keeper
        self.add_callback(Moves(keeper, self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as transformers does, with FSDP if it is requested."""
        super().create_accelerator_and_postprocess()
        shard(self.accelerator)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        """Prepare the model as transformers does, and check that FSDP has sharded it.

        Raises:
            ConfigError: FSDP is requested, and the model is not sharded.
        """
        prepared: object = super()._prepare_for_training(*args, **kwargs)
        check_sharded(self.model)
        return prepared

    def _get_train_sampler(self, dataset: object = None) -> Order:
        self.order = Order.of(super()._get_train_sampler(dataset))
        return self.order

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.keeper is not None:
            self.keeper.ended(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as TRL does, with a one-line error if the system refuses the write.

        Raises:
            ConfigError: the model cannot be written.
        """
        with writing("folder", Path(output_dir or self.args.output_dir), "the model", ", then --resume"):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: object, **kwargs: object) -> None:
        with writing("folder", Path(self.args.output_dir), "a checkpoint", ", then --resume"):
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, folder: str, model: object = None) -> None:
        assert self.keeper is not None
        self.keeper.learned(self)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is not None and self.keeper is not None:
            self.keeper.scheduled(self)

    def _load_rng_state(self, folder: str | None) -> None:
        if folder is not None and self.keeper is not None:
            self.keeper.diced(self)

    def go_on(self) -> None:
        """Train to the end, from the beginning or from the state of the checkpoint manager.

        Raises:
            ConfigError: a state could not be written.
        """
        keeper = self.keeper
        if keeper is None:
            self.train()
            return
        state = keeper.state
        try:
            # The saved run has finished training, so only its weights are loaded.
            if state is not None and state.policy_step >= self.args.max_steps:
                keeper.learned(self)
                return
            self.train(resume_from_checkpoint=None if state is None else str(state.folder))
            keeper.settle()
        except BaseException:
            keeper.rescue(self)
            raise
