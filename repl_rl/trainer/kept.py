"""TRL's trainer as a keeper needs it: it tells what it does, and goes on where a state says."""

from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from repl_rl.machine.refused import writing
from repl_rl.trainer.config import GRPOTrainer
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.order import Order
from repl_rl.trainer.sharded import check_sharded, shard


class Moves(TrainerCallback):
    """Tells a keeper what its trainer is about to do."""

    def __init__(self, keeper: Keeper, trainer: GRPOTrainer) -> None:
        self._keeper, self._trainer = keeper, trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        state.compute_steps(args, state.max_steps)  # what may change from one command to the next
        # A checkpoint of transformers writes the state of each callback over an entry that must be there already; a
        # saved state has none, because the callbacks, too, may change from one command to the next.
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
    """TRL's trainer, whose steps are saved by a keeper where it has one, and which goes on with what one took up."""

    keeper: Keeper | None = None
    order: Order
    """What orders the tasks. Its generator goes on from epoch to epoch."""

    @property
    def steps_done(self) -> int:
        """Batches of rollouts that were learned from; each took a fixed number of optimizer steps."""
        done: int = self.state.global_step // self.optimizer_steps
        return done

    @property
    def stateful(self) -> list[object]:
        """Callbacks whose states transformers writes into its checkpoints."""
        return [one for one in (*self.callback_handler.callbacks, self.control) if isinstance(one, ExportableState)]

    @property
    def optimizer_steps(self) -> int:
        """Those that a batch of rollouts takes."""
        passes: int = self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps
        return max(1, passes)

    def keep(self, keeper: Keeper, parts: Mapping[str, object], tell: Callable[[str], None]) -> None:
        """Be saved by `keeper` from now on, with those of `parts` that remember something, and go on where it is.

        Under FSDP the main process saves whole weights. Under DeepSpeed nothing is saved, which `tell` is given a line
        about: each process has a part alone.

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
        """As transformers', with FSDP where that is asked for."""
        super().create_accelerator_and_postprocess()
        shard(self.accelerator)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        """As transformers'.

        Raises:
            ConfigError: FSDP is asked for, and the model is not sharded.
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
        """TRL's; what the disk refuses is told in one line.

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
        """Train to the end, from the beginning or from the keeper's state.

        Raises:
            ConfigError: a state could not be written.
        """
        keeper = self.keeper
        if keeper is None:
            self.train()
            return
        state = keeper.state
        try:
            if state is not None and state.policy_step >= self.args.max_steps:
                keeper.learned(self)
                return
            self.train(resume_from_checkpoint=None if state is None else str(state.folder))
            keeper.settle()
        except BaseException:
            keeper.rescue(self)
            raise
