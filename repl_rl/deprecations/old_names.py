"""Old names of classes, members, arguments and settings, which `repl_rl.deprecations` accepts until 0.5.0."""

from collections.abc import Mapping
from types import MappingProxyType

OLD_EXPORTS = MappingProxyType(
    {
        "Credited": "CreditedTrajectory",
        "LineEarnings": "LineRewards",
        "PushResult": "LineResult",
        "RolloutEarnings": "RolloutRewards",
        "RolloutThread": "SyncRollouts",
        "Start": "BranchPoint",
        "World": "RolloutConfig",
        "asset": "find_asset",
        "console_of": "open_console",
        "estimator": "load_estimator",
        "graded": "grade_async",
        "line_rewards": "compute_line_rewards",
        "line_states": "compute_line_states",
        "select": "select_best_rollouts",
        "start_at": "get_branch_point",
        "start_of": "get_replay_branch_point",
        "to_go": "make_reward_to_go",
    }
)
"""Old name in `repl_rl` to the new one."""
OLD_MODULES = MappingProxyType(
    {
        "repl_rl.credit.truncated_rollouts": "repl_rl.credit.stop_policy",
        "repl_rl.deprecated_names": "repl_rl.deprecations.old_names",
        "repl_rl.settings.old_run_settings": "repl_rl.settings.migrate_run_settings",
        "repl_rl.settings.removed_settings": "repl_rl.deprecations.removed_settings",
        "repl_rl.credit.advantages": "repl_rl.credit.advantage_estimators",
        "repl_rl.credit.errors": "repl_rl.credit.advantage_estimators",
        "repl_rl.credit.states": "repl_rl.credit.console_state_ids",
        "repl_rl.record": "repl_rl.trajectory",
        "repl_rl.record.setup": "repl_rl.trajectory.trajectory",
        "repl_rl.record.trajectory": "repl_rl.trajectory.trajectory",
        "repl_rl.samplers.conformance": "repl_rl.samplers.conformance_checks",
        "repl_rl.samplers.environment": "repl_rl.integrations.gym_environment_sampler",
        "repl_rl.samplers.verifiers": "repl_rl.integrations.verifiers_sampler",
        "repl_rl.samplers.verifiers_agent": "repl_rl.integrations.verifiers_sampler",
        "repl_rl.samplers.verifiers_tools": "repl_rl.integrations.verifiers_sampler",
        "repl_rl.tasks.environments": "repl_rl.integrations.verifiers_tasks",
        "repl_rl.trainer.train_loop": "repl_rl.trainer.train",
        "repl_rl.trainer.train_setup": "repl_rl.trainer.train",
        "repl_rl.engine.engine_configs": "repl_rl.engine.backend_configs",
        "repl_rl.engine.registry": "repl_rl.engine.backend_configs",
    }
)
"""Old path to the new one of each moved module that pages and settings named."""
OLD_FUNCTIONS = MappingProxyType(
    {
        "repl_rl.credit.advantage_estimators": {
            "first_of_streak": "penalize_first_error",
        },
        "repl_rl.credit.rewards": {"broken": "compute_error_potential"},
    }
)
"""Module to the new name of each old function that users name in settings."""
_RENAMED_FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "repl_rl.trainer.config:TrainerConfig": {
            "updates": "num_iterations",
            "mini_batches": "num_mini_batches",
            "micro_batch": "per_device_batch_size",
            "schedule": "lr_scheduler",
            "importance": "importance_sampling",
            "ahead": "max_staleness_steps",
            "groups": "group_sampling",
            "fast": "fast_logprobs",
            "shared_prefixes": "prefix_sharing",
            "checkpointing": "gradient_checkpointing",
            "save_every": "save_steps",
            "potential": "potentials",
        },
        "repl_rl.engine.backend_configs:Vllm": {
            "threads": "cpu_threads",
            "drive": "request_mode",
        },
        "repl_rl.ray.config:RayOptions": {
            "nodes": "max_workers",
            "gpus": "gpus_per_worker",
            "simulate": "simulate_machines",
            "patience_s": "startup_timeout_s",
        },
        "repl_rl.rollout.host_functions:HostLimits": {
            "seconds": "timeout_s",
            "calls": "max_calls",
            "argument_bytes": "max_argument_bytes",
            "answer_bytes": "max_answer_bytes",
            "at_once": "max_concurrent",
            "at_once_in_all": "max_concurrent_total",
        },
        "repl_rl.rollout.sampler_base:ReplSampler": {
            "give_up_after": "max_error_streak",
        },
        "repl_rl.sft.finetune_config:FinetuneConfig": {
            "micro_batch": "per_device_batch_size",
        },
    }
)
"""Class of settings to the new name of each old field, which is an attribute and an argument."""
OLD_MEMBERS = MappingProxyType(
    {
        "repl_rl.sft.select_rollouts:Selection": {"kept": "selected", "left_out": "rejected_counts"},
        "repl_rl.credit.advantage_estimators:GroupRewards": {
            "bound": "shaping_bound",
            "each": "map_lines",
            "of": "from_rows",
            "shaping_to_go": "compute_shaping_to_go",
        },
        "repl_rl.credit.advantage_estimators:LineRewards": {"given": "given_reward"},
        "repl_rl.credit.rewards:RewardTable": {"of": "get"},
        "repl_rl.engine.base:HasPreemptionStats": {"pressure": "preemptions"},
        "repl_rl.engine.base:HasRestarts": {"deaths": "crash_count"},
        "repl_rl.engine.base:PreemptionStats": {"after": "add", "since": "subtract"},
        "repl_rl.engine.base:SupportsSleep": {"rest": "sleep"},
        "repl_rl.engine.conformance_checks:EngineFixture": {
            "crowd": "concurrent_sessions",
            "keeps": "keeps_kv_on_sync",
        },
        "repl_rl.engine.config:EngineConfig": {"doctor": "describe_status"},
        "repl_rl.engine.config:EngineOptions": {"growth_tokens": "max_growth_tokens"},
        "repl_rl.engine.scripted_engine:ScriptedEngine": {"asking": "from_policy", "loaded": "loaded_folders"},
        "repl_rl.evaluation.evaluate:Comparison": {"better": "better_tasks", "worse": "worse_tasks"},
        "repl_rl.evaluation.evaluate:Study": {"figures": "metrics", "graded": "graded_results"},
        "repl_rl.trajectory.trajectory:Stop": {"DOOMED": "EARLY_STOPPED"},
        "repl_rl.trajectory.trajectory:Trajectory": {"renamed": "with_id", "ungraded": "without_outcome"},
        "repl_rl.rollout.episode:EpisodeRewards": {"outcome": "set_outcome"},
        "repl_rl.rollout.episode:Episode": {
            "begun": "has_lines",
            "executed": "record_execution",
            "lost": "console_loss",
            "trajectory": "build_trajectory",
            "turn": "sample_turn",
        },
        "repl_rl.rollout.host_functions:HostFunction": {
            "about": "description",
            "bound": "bind_arguments",
            "declared": "declaration",
            "depth": "max_depth",
            "staged": "is_staged",
        },
        "repl_rl.rollout.rollout_limits:RolloutLimits": {"most_tokens": "max_growth_tokens"},
        "repl_rl.rollout.token_renderer:Renderer": {
            "chat_prompt": "build_chat_prompt",
            "line": "make_line",
            "observation": "encode_observation",
            "plain_prompt": "build_plain_prompt",
            "prompt": "build_prompt",
            "prompt_of_ids": "build_prompt_from_ids",
            "question_prompt": "build_question_prompt",
            "splice": "encode_splice",
            "watch": "make_watch",
            "with_controls": "encode_with_control_tokens",
            "written": "encode_as_sampled",
        },
        "repl_rl.rollout.concurrent_rollouts:Rollouts": {
            "facts": "runtime_info",
            "concurrency": "settings.concurrency",
            "group": "collect_group",
            "prompt": "build_prompt",
            "purpose": "settings.purpose",
            "replica": "settings.replica",
            "seed": "settings.seed",
            "template": "settings.template",
        },
        "repl_rl.rollout.sampler_base:RolloutSampler": {"opened": "open_resources"},
        "repl_rl.rollout.synchronous_rollouts:SyncRollouts": {
            "begin": "start_rollouts",
            "busy_s": "rollout_busy_s",
            "ended": "get_ended_groups",
            "facts": "runtime_info",
            "figures": "stats",
            "finished": "get_finished_rollouts",
            "first": "wait_for_first_group",
            "forget": "cancel_prefetched",
            "memory": "state_dict",
            "probe": "sample_probe_lines",
            "remember": "load_state_dict",
        },
        "repl_rl.runs.replay:BranchPoint": {"carry": "pending_text", "ran": "executed_lines"},
        "repl_rl.runs.replay:Branches": {"value": "mean_outcome"},
        "repl_rl.runs.replay:ShownText": {"cut": "truncated"},
        "repl_rl.runs.replay:Replay": {
            "edit": "run_instead",
            "edited": "is_edited",
            "prompt": "current_prompt",
            "state": "compute_state_digest",
            "step": "run_next",
            "to_line": "run_to_line",
            "type": "run_typed",
        },
        "repl_rl.runs.replay:ReplayedLine": {"ran": "executed_lines", "recorded": "recorded_line"},
        "repl_rl.runs.replay:DeterminismReport": {
            "causes": "divergence_causes",
            "score": "match_rate",
            "verified": "verified_count",
        },
        "repl_rl.runs.store.trajectory_files:Store": {"damage": "damaged_regions", "tokens": "read_tokens"},
        "repl_rl.runs.store.export_formats:LineTransition": {"asked": "next_prompt", "typed": "was_typed"},
        "repl_rl.samplers.chat_tool_sampler:ChatToolSampler": {"runner_of": "make_call_runner"},
        "repl_rl.samplers.conformance_checks:SamplerFixture": {
            "rollouts": "make_rollouts",
            "witness": "make_recording_engine",
        },
        "repl_rl.integrations.gym_environment_sampler:EnvironmentSampler": {"tasks": "make_tasks"},
        "repl_rl.sandbox.base:HostCallHandler": {"answer": "answer_call"},
        "repl_rl.sandbox.base:LineResult": {"cut": "truncated", "more": "incomplete"},
        "repl_rl.sandbox.base:SandboxConfig": {
            "doctor": "describe_status",
            "elsewhere": "is_remote",
            "reference": "build_reference_command",
            "refuse_unasked": "validate_recorded_choice",
            "unlimited": "unenforced_limits",
            "with_usual_programs": "with_default_image",
        },
        "repl_rl.sandbox.base:SandboxOptions": {"starting": "max_concurrent_starts", "warm": "pool_size"},
        "repl_rl.sandbox.base:SupportsContinue": {"go_on": "continue_after_answer"},
        "repl_rl.sandbox.base:SupportsHostFunctions": {"offer": "offer_functions"},
        "repl_rl.sandbox.base:SupportsWorkspace": {"prepared": "open_workspace_session"},
        "repl_rl.settings.component_registry:Registry": {"add": "register", "kinds": "entries"},
        "repl_rl.tasks.curriculum:Curriculum": {
            "levels": "compute_mean_level",
            "memory": "state_dict",
            "remember": "load_state_dict",
        },
        "repl_rl.tasks.curriculum:CurriculumConfig": {"floor": "uniform_share", "memory": "decay"},
        "repl_rl.tasks.task:Task": {
            "asked": "full_question",
            "reference": "answer_label",
            "told": "workspace_text",
            "turns": "split_turns",
        },
        "repl_rl.tasks.task_workspace:Workspace": {"in_words": "describe", "read": "from_content"},
        "repl_rl.trainer.grpo:ReplGRPOTrainer": {
            "scored": "scored_batch",
            "step_state": "train_batch",
            "sync": "sync_weights",
        },
        "repl_rl.trainer.checkpoint_schedule:CheckpointSchedule": {
            "keep": "keep_last",
            "seconds": "every_s",
            "share": "max_time_share",
        },
        "repl_rl.trainer.rollout_source:AsyncRolloutSource": {
            "begin": "start_rollouts",
            "busy_s": "rollout_busy_s",
            "finished": "get_finished_rollouts",
            "probe": "sample_probe_lines",
        },
        "repl_rl.trainer.rollout_source:WindowedRolloutSource": {
            "ended": "get_ended_groups",
            "first": "wait_for_first_group",
        },
        "repl_rl.trainer.plugins.checkpoint:Stateful": {"memory": "state_dict", "remember": "load_state_dict"},
        "repl_rl.rollout_config:RolloutConfig": {
            "chat": "chat_template_kwargs",
            "bos": "add_bos_token",
            "overshoot": "newline_tokens",
            "judge": "judges",
            "group_judge": "group_judges",
            "consoles": "open_consoles",
            "drawn": "draw_tasks",
            "fitting": "load_sampler_and_renderer",
            "recorded": "from_run",
            "recorded_consoles": "from_run_consoles",
            "renderer": "load_renderer",
            "rollouts": "open_rollouts",
        },
        **_RENAMED_FIELDS,
    }
)
"""Class, as `module:name`, to the new name of each old attribute or method."""
OLD_KEYWORDS = MappingProxyType(
    {
        "repl_rl.credit.advantage_estimators:GroupRewards": {"bound": "shaping_bound"},
        "repl_rl.engine.conformance_checks:EngineFixture": {
            "crowd": "concurrent_sessions",
            "keeps": "keeps_kv_on_sync",
        },
        "repl_rl.engine.config:EngineOptions": {"growth_tokens": "max_growth_tokens"},
        "repl_rl.rollout.host_functions:HostFunction": {
            "about": "description",
            "depth": "max_depth",
            "staged": "is_staged",
        },
        "repl_rl.rollout.concurrent_rollouts:Rollouts": {
            "concurrency": "settings.concurrency",
            "purpose": "settings.purpose",
            "replica": "settings.replica",
            "seed": "settings.seed",
            "template": "settings.template",
        },
        "repl_rl.runs.replay:BranchPoint": {"carry": "pending_text", "ran": "executed_lines"},
        "repl_rl.sandbox.base:LineResult": {"cut": "truncated", "more": "incomplete"},
        "repl_rl.sandbox.base:SandboxOptions": {"starting": "max_concurrent_starts", "warm": "pool_size"},
        "repl_rl.tasks.curriculum:CurriculumConfig": {"floor": "uniform_share", "memory": "decay"},
        "repl_rl.trainer.checkpoint_schedule:CheckpointSchedule": {
            "keep": "keep_last",
            "seconds": "every_s",
            "share": "max_time_share",
        },
        **_RENAMED_FIELDS,
        "repl_rl.rollout_config:RolloutConfig": {
            "chat": "chat_template_kwargs",
            "bos": "add_bos_token",
            "overshoot": "newline_tokens",
            "judge": "judges",
            "group_judge": "group_judges",
        },
    }
)
"""Class to the new name of each old argument of its constructor."""
OLD_SETTINGS = MappingProxyType(
    {
        "against": "baseline",
        "bos": "add_bos_token",
        "chat": "chat_template_kwargs",
        "conversations": "max_conversations",
        "drain_s": "shutdown_timeout_s",
        "eval_every": "eval_steps",
        "fleet": "workers",
        "fleet.gpus": "workers.gpus_per_worker",
        "fleet.nodes": "workers.max_workers",
        "fleet.patience_s": "workers.startup_timeout_s",
        "fleet.simulate": "workers.simulate_machines",
        "group_judge": "group_judges",
        "idle_s": "conversation_timeout_s",
        "judge": "judges",
        "learning.micro_batch": "learning.per_device_batch_size",
        "overshoot": "newline_tokens",
        "states": "checkpoint",
        "trainer.ahead": "trainer.max_staleness_steps",
        "trainer.checkpointing": "trainer.gradient_checkpointing",
        "trainer.fast": "trainer.fast_logprobs",
        "trainer.groups": "trainer.group_sampling",
        "trainer.importance": "trainer.importance_sampling",
        "trainer.micro_batch": "trainer.per_device_batch_size",
        "trainer.mini_batches": "trainer.num_mini_batches",
        "trainer.potential": "trainer.potentials",
        "trainer.save_every": "trainer.save_steps",
        "trainer.schedule": "trainer.lr_scheduler",
        "trainer.shared_prefixes": "trainer.prefix_sharing",
        "trainer.updates": "trainer.num_iterations",
        "vllm.drive": "vllm.request_mode",
        "vllm.threads": "vllm.cpu_threads",
        "waiting": "max_waiting",
    }
)
"""Old dotted name of each renamed setting to the new one. The name of a table renames what is in it."""
OLD_OPTIONS = MappingProxyType(
    {
        "answer_bytes": ("max_answer_bytes",),
        "argument_bytes": ("max_argument_bytes",),
        "at_once": ("max_concurrent",),
        "at_once_in_all": ("max_concurrent_total",),
        "calls": ("max_calls",),
        "give_up_after": ("max_error_streak",),
        "gpus": ("gpus_per_worker",),
        "keep": ("keep_last",),
        "most": ("max_rounds",),
        "nodes": ("max_workers",),
        "patience_s": ("startup_timeout_s",),
        "seconds": ("timeout_s", "every_s"),
        "share": ("max_time_share", "in_flight_share"),
        "simulate": ("simulate_machines",),
    }
)
"""Old name of an option to its new ones. Only one of them is an option of a given component."""
OLD_TYPES = MappingProxyType({"refill": "dynamic_sampling", "window": "fifo_window"})
"""Old name of a component to the new one."""
