"""Tests that `make test` leaves out: they are marked `deep`, by folder, file or name.

`make test` is to say within minutes whether anything is broken: every mechanism once, each family once. `make test-all`
runs everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

Rule = Callable[[Sequence[pytest.Item]], Iterable[pytest.Item]]
"""Chooses, among the instances of one parametrized test, those that `make test` runs."""


def every(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return items


def none(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return ()


def one(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    return items[:1]


def every_nth(number: int) -> Rule:
    """The first one of this many, and so on."""
    return lambda items: items[::number]


def each_value(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """Every value of every parameter at least once, not every combination."""
    return _covering(items, lambda parameters: parameters)


def each(name: str) -> Rule:
    """Every value of this parameter once."""
    return lambda items: _covering(items, lambda parameters: {name: parameters[name]})


def _covering(items: Sequence[pytest.Item], of_interest: Callable[[dict[str, object]], dict[str, object]]) -> Rule:
    seen: set[tuple[str, str]] = set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {"": None}
        values = {(name, repr(value)) for name, value in of_interest(parameters).items()}
        if not values <= seen:
            seen |= values
            yield item


RULES: dict[str, Rule] = {
    "tests": every,
    "tests/bench": one,
    "tests/benchmarks": one,
    "tests/benchmarks/test_allocator.py": none,
    "tests/benchmarks/test_allocator.py::test_a_step_that_is_out_of_memory_says_where": one,
    "tests/benchmarks/test_allocator.py::test_only_the_third_step_is_counted": one,
    "tests/benchmarks/test_allocator.py::test_pools_decide_who_shares_memory": one,
    "tests/checkpoint": one,
    "tests/checkpoint/test_tensor_files.py": every,
    "tests/distributed": none,
    "tests/distributed/test_exactness.py::test_training_is_that_of_plain_pytorch": one,
    "tests/distributed/test_failures.py": every,
    "tests/distributed/test_failures.py::test_the_others_notice_a_process_that_is_gone_or_stopped": one,
    "tests/distributed/test_host_room.py": one,
    "tests/distributed/test_servers.py::test_processes_agree_on_more_than_a_row_of_the_board_holds": every,
    "tests/distributed/test_slots.py": every,
    "tests/docs/test_site.py::test_the_site_has_every_page_and_every_public_name": none,
    "tests/engine": one,
    "tests/engine/test_chains.py::test_gradients_are_divided_once": each("chain"),
    "tests/engine/test_exactness.py::test_three_steps_equal_plain_gradient_accumulation": every_nth(4),
    "tests/engine/test_failures.py::test_a_failed_step_changes_nothing": each("harmony"),
    "tests/engine/test_host_memory.py": none,
    "tests/engine/test_in_batch_negatives.py": none,
    "tests/engine/test_in_batch_negatives.py::test_what_does_not_fit_whole_is_cut_by_default": one,
    "tests/engine/test_in_batch_negatives.py::test_what_fits_whole_keeps_every_bit": one,
    "tests/engine/test_pipeline.py::test_every_family_trains_as_on_one_device": each("devices"),
    "tests/engine/test_precision.py::test_a_parameter_after_the_last_layer_sums_in_fp32_when_losses_are_read": every,
    "tests/estimate/test_forecast.py": one,
    "tests/estimate/test_survey.py": one,
    "tests/examples": none,
    "tests/integrations": one,
    "tests/model": each_value,
    "tests/model/test_checkpointing.py::test_losses_in_chunks_save_what_they_save_in_plain_pytorch": one,
    "tests/model/test_compiling.py": one,
    "tests/model/test_joined.py": one,
    "tests/model/test_layer_tiles.py": one,
    "tests/model/test_layer_tiles.py::test_modules_whose_tokens_look_at_each_other_are_not_cut": every,
    "tests/model/test_packed_gate.py": one,
    "tests/model/test_slices.py": one,
    "tests/model/test_tiles_beside_slices.py": none,
    "tests/model/test_tiles_beside_slices.py::test_a_loss_runs_in_tiles_beside_slices": one,
    "tests/offload": each_value,
    "tests/offload/test_disk.py": one,
    "tests/optim/test_eight_bit_optimizers.py": one,
    "tests/optim/test_muon.py": one,
    "tests/optim/test_optimizer_chain.py": one,
    "tests/runtime/test_garbage.py": one,
    "tests/scheduler": each_value,
    "tests/scheduler/test_graphs.py::test_what_is_certain_to_fit_fits_and_short_groups_tell_all": every_nth(10),
    "tests/scheduler/test_search.py": one,
    "tests/simdevice": one,
    "tests/simdevice/test_engine_exactness.py::test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan": each(
        "way"
    ),
    "tests/simdevice/test_engine_faults.py": every_nth(10),
    "tests/simdevice/test_engine_late.py::test_a_loop_trains_as_plain_pytorch": every_nth(5),
    "tests/simdevice/test_engine_pipeline.py::test_several_devices_train_as_one": every_nth(20),
    "tests/simdevice/test_simdevice.py::test_operands_on_two_devices_are_refused_but_for_a_single_number_of_the_cpu": every,
    "tests/simdevice/test_swap_memory.py": every,
}
"""By path from the repository's root, or by `path::test`; the longest one that an item is under decides."""

SLOW = """
    bench/test_bench.py::test_a_comparison_is_resumed_and_its_losses_agree
    bench/test_bench.py::test_a_pipeline_is_compared_with_one_device
    bench/test_bench.py::test_an_engine_that_fails_is_a_row_and_the_others_go_on
    bench/test_bench.py::test_an_error_in_one_of_two_processes_is_the_row_s
    bench/test_bench.py::test_deepspeeds_copies_are_those_of_the_formulas
    bench/test_bench.py::test_other_engines_run_at_their_best_micro_batch_and_resume_with_it
    bench/test_bench.py::test_two_processes_are_compared_as_one_engine
    benchmarks/test_gpu.py::test_adapters_on_a_quantized_base_are_measured
    benchmarks/test_gpu.py::test_device_memory_is_told_beside_its_model
    benchmarks/test_paper.py::test_grouped_swaps_do_not_grow_and_those_of_each_alone_do
    benchmarks/test_search.py::test_a_comparison_is_never_better_than_all_plans
    checkpoint/test_deepspeed.py::test_a_universal_checkpoint_is_read_back
    checkpoint/test_deepspeed.py::test_every_stage_of_deepspeed_goes_on_from_harmony
    checkpoint/test_deepspeed.py::test_harmony_goes_on_from_deepspeed
    checkpoint/test_deepspeed.py::test_torn_and_foreign_checkpoints_of_deepspeed_are_refused
    checkpoint/test_kill.py::test_a_save_that_is_killed_before_any_of_its_moments_loses_nothing
    checkpoint/test_kill.py::test_runs_that_are_killed_at_any_moment_go_on_bit_for_bit
    checkpoint/test_kill.py::test_saving_takes_less_memory_than_two_layers
    checkpoint/test_resume.py::test_adams_take_each_others_state
    checkpoint/test_resume.py::test_an_engine_goes_back_to_what_it_saved
    checkpoint/test_resume.py::test_another_accumulation_goes_on_as_if_it_had_been_changed_on_the_way
    checkpoint/test_resume.py::test_another_plan_goes_on_bit_for_bit
    checkpoint/test_resume.py::test_saving_changes_nothing_and_leaves_resident_packs_on_the_device
    checkpoint/test_resume.py::test_the_familiar_loop_goes_on_at_its_boundary
    cli/test_commands.py::test_a_base_can_be_quantized_where_adapters_are_trained
    cli/test_commands.py::test_a_batch_that_processes_do_not_divide_is_an_error
    cli/test_commands.py::test_a_closed_pipe_ends_the_command_quietly
    cli/test_commands.py::test_a_model_too_large_for_the_device_exits_with_3_and_names_ways_out
    cli/test_commands.py::test_a_model_too_large_for_the_host_exits_with_3_and_is_forecast_all_the_same
    cli/test_commands.py::test_a_pipeline_is_estimated_planned_and_drawn
    cli/test_commands.py::test_a_stash_that_fits_the_device_is_a_way_out_of_too_little_host_memory
    cli/test_commands.py::test_adapters_are_trained_and_the_model_is_not
    cli/test_commands.py::test_an_answer_says_what_is_trained_and_how_and_what_is_frozen
    cli/test_commands.py::test_estimate_as_json
    cli/test_commands.py::test_estimate_of_several_devices
    cli/test_commands.py::test_masters_and_state_on_a_disk_are_no_host_memory_and_its_rate_is_the_updates
    cli/test_commands.py::test_the_ds_config_is_read_as_the_engine_reads_it
    cli/test_commands.py::test_the_sequence_is_the_models_longest
    cli/test_commands.py::test_trace_draws_the_predicted_step
    cli/test_commands.py::test_trace_of_a_model_that_does_not_fit_exits_with_3
    cli/test_commands.py::test_trace_takes_the_saved_plan_of_the_ds_config
    cli/test_commands.py::test_what_does_not_fit_beside_adapters_may_be_quantized
    cli/test_commands.py::test_where_not_even_a_row_in_a_million_fits_the_answer_names_how_many_do
    config/test_errors.py::test_a_config_error_is_deepspeeds_too_where_deepspeed_is_loaded
    distributed/test_failures.py::test_a_model_that_waits_for_the_others_is_measured_by_all_as_often
    distributed/test_failures.py::test_a_process_that_ended_as_it_lost_connections_is_not_named_without_that_reason
    distributed/test_failures.py::test_an_exception_without_clipping_ends_all_or_comes_before_the_first_update
    distributed/test_failures.py::test_reading_is_right_in_every_process
    distributed/test_failures.py::test_side_effects_in_every_process_are_refused_by_name
    distributed/test_failures.py::test_unsupported_calls_are_refused_by_name
    distributed/test_host_room.py::test_each_process_has_a_share_of_the_least_room_and_all_run_one_plan
    engine/test_ledger.py::test_swaps_do_not_grow_with_the_number_of_micro_batches
    engine/test_lifetime.py::test_a_process_leaves_in_peace_without_destroy
    engine/test_lifetime.py::test_a_process_without_harmony_ds_reads_a_saved_model
    engine/test_lifetime.py::test_an_engine_that_waits_for_garbage_collection_does_not_hold_its_model
    engine/test_loaded_dtype.py::test_a_resumed_run_in_bf16_alone_goes_on_bit_for_bit
    engine/test_long_context.py::test_a_loss_of_two_forward_passes_runs_in_tiles
    engine/test_long_context.py::test_a_run_that_goes_on_with_more_memory_keeps_its_tiles
    engine/test_long_context.py::test_an_adapter_on_the_head_is_a_part_of_it
    engine/test_long_context.py::test_families_train_under_budgets_that_do_not_hold_their_logits
    engine/test_long_context.py::test_gradients_in_bf16_are_summed_in_fp32
    engine/test_long_context.py::test_tiles_and_boundaries_on_the_host_train_where_neither_alone_fits
    engine/test_loop.py::test_another_way_through_the_model_beside_a_look_is_refused_by_name_and_training_goes_on
    engine/test_pipeline.py::test_any_number_of_devices_goes_on_from_a_checkpoint_and_generates
    engine/test_pipeline.py::test_losses_that_are_looked_at_early
    engine/test_planning.py::test_a_kept_profile_is_used_again_and_a_foreign_one_replaced
    engine/test_planning.py::test_a_plan_found_with_memory_to_spare_for_residents_is_adopted_without_any
    engine/test_planning.py::test_a_saved_plan_that_does_not_match_is_refused
    engine/test_planning.py::test_every_plan_within_a_budget_gives_the_same_bits_and_keeps_to_it
    engine/test_precision.py::test_muon_beside_adam
    engine/test_quantized.py::test_a_base_and_adapters_in_bf16_train_to_plain_pytorchs_bits
    engine/test_quantized.py::test_a_packed_base_may_lie_on_a_disk
    engine/test_quantized.py::test_exports_of_plain_weights_refuse_a_packed_base_by_name
    engine/test_quantized.py::test_quantized_experts_train_to_plain_pytorchs_bits
    engine/test_quantized.py::test_resident_packs_of_a_quantized_base_train_to_the_same_bits
    engine/test_quantized.py::test_the_program_sees_the_same_base_before_and_after
    engine/test_quantized.py::test_weights_that_evaluation_repacks_are_trained_beside_as_if_it_had_not
    engine/test_refusals.py::test_what_does_not_fit_in_any_cut_says_the_least_budget_that_does_and_what_was_tried
    engine/test_residency.py::test_the_first_packs_may_stay_as_well_as_the_last
    engine/test_residency.py::test_the_plan_counts_resident_packs
    engine/test_shared_losses.py::test_the_memory_of_a_shared_loss_is_planned
    engine/test_split_masters.py::test_gradients_in_bf16_and_parameters_of_several_blocks
    engine/test_surface.py::test_one_process_needs_no_launcher_no_environment_and_no_mpi
    engine/test_switches.py::test_the_search_finds_a_plan_within_a_budget
    engine/test_unet.py::test_less_than_its_weights_and_gradients_is_enough
    estimate/test_forecast.py::test_several_devices_hold_weights_and_state_once_and_take_their_pieces_of_the_gradients
    estimate/test_survey.py::test_a_model_of_70_billion_parameters_takes_no_memory
    estimate/test_survey.py::test_a_row_whose_layers_do_not_fit_is_estimated_in_tiles_of_both
    estimate/test_survey.py::test_a_row_whose_logits_do_not_fit_is_estimated_in_tiles
    estimate/test_survey.py::test_a_saved_profile_stands_in_for_measuring
    estimate/test_survey.py::test_auto_joins_micro_batches_of_short_rows
    estimate/test_survey.py::test_joining_is_advised_for_short_rows_alone
    estimate/test_survey.py::test_long_rows_take_no_more_device_memory_with_more_micro_batches
    estimate/test_survey.py::test_packs_do_not_stay_where_the_engine_lets_none_stay
    estimate/test_survey.py::test_the_budget_is_the_ds_configs_or_what_the_engine_would_take
    estimate/test_survey.py::test_tiles_and_slices_that_repeat_others_are_left_out_of_an_estimate
    estimate/test_survey.py::test_times_are_the_rooflines
    estimate/test_survey.py::test_what_a_resident_parameter_takes_is_what_the_engine_would_keep
    integrations/test_as_deepspeed.py::test_a_trainer_of_trl_with_zero_3
    integrations/test_client_scripts.py::test_a_script_of_accelerate_with_two_models_and_two_ds_configs
    integrations/test_launchers.py::test_a_trainer_takes_the_ds_config_of_accelerates_launcher_and_saves_its_model
    integrations/test_launchers.py::test_deepspeeds_launcher_of_several_processes_is_refused_for_a_pipeline
    integrations/test_quantized.py::test_other_methods_of_peft_train_on_a_quantized_base_as_in_plain_pytorch
    integrations/test_quantized.py::test_the_trainer_trains_adapters_on_a_quantized_base
    integrations/test_quantized.py::test_trl_fine_tunes_and_aligns_adapters_on_a_quantized_base
    integrations/test_quantized.py::test_two_adapters_on_one_base_train_in_turn
    integrations/test_resume.py::test_a_trainer_goes_on_from_what_the_stock_trainer_saved_of_adapters
    integrations/test_retrievers.py::test_in_batch_negatives_are_cut_where_they_do_not_fit
    integrations/test_script.py::test_the_command_runs_a_module_and_names_what_is_wrong
    integrations/test_trainer.py::test_a_model_loaded_in_bf16_trains_as_with_bf16_true
    integrations/test_trainer.py::test_classification_with_evaluation_and_prediction
    integrations/test_trainer.py::test_sequence_to_sequence_with_generation
    integrations/test_trainer.py::test_training_arguments_may_carry_the_ds_config_and_the_saved_model_is_stock
    integrations/test_trl.py::test_a_reference_that_is_an_adapter
    integrations/test_trl.py::test_an_adapter_for_each_task
    integrations/test_trl.py::test_one_model_is_tuned_and_then_aligned
    model/test_compiling.py::test_compiled_by_inductor
    model/test_joined.py::test_a_plan_of_joined_calls_runs_on_any_number_of_devices
    model/test_joined.py::test_longer_rows_that_have_no_room_together_run_in_smaller_calls
    model/test_joined.py::test_the_same_bits_each_time_and_after_a_resume
    model/test_layer_tiles.py::test_gradients_of_tiles_are_added_up_in_the_accumulation_dtype
    model/test_layer_tiles.py::test_the_same_tiles_give_the_same_bits_whatever_the_packs
    model/test_layer_tiles.py::test_tiles_of_head_and_layers_can_be_named_and_a_saved_plan_keeps_them
    model/test_slices.py::test_a_micro_batch_size_of_auto_is_a_whole_batch_in_slices
    model/test_slices.py::test_auto_takes_slices_where_whole_micro_batches_do_not_fit
    model/test_slices.py::test_rows_that_could_not_be_found_for_want_of_memory_are_looked_for_again
    model/test_slices.py::test_sizes_as_large_as_the_micro_batch_change_nothing
    model/test_slices.py::test_times_of_all_sizes_are_kept_in_the_profile
    scheduler/test_devices.py::test_several_devices_keep_packs_from_forward_to_backward_and_none_from_step_to_step
    scheduler/test_host_room.py::test_stash_stays_on_the_device_where_the_host_has_no_room_for_it
    scheduler/test_search.py::test_a_larger_budget_never_gives_a_slower_plan
    scheduler/test_search.py::test_more_devices_are_used_where_one_thread_issues_their_work_fast_enough
    scheduler/test_search.py::test_neighbours_are_tried_until_so_much_has_been_simulated
    scheduler/test_search.py::test_nothing_in_the_list_of_candidates_is_faster_than_what_is_chosen
    scheduler/test_search.py::test_the_fastest_are_the_same_whether_or_not_the_others_are_simulated_in_full
    simdevice/test_engine_crossing.py::test_the_peak_of_many_micro_batches_of_long_rows_is_about_that_of_few
    simdevice/test_engine_exactness.py::test_same_weights_and_peak_with_mechanisms_switched_off
    simdevice/test_engine_late.py::test_after_some_steps_nothing_more_is_page_locked_for_lengths_that_vary
    simdevice/test_engine_memory.py::test_a_model_trains_under_a_limit_that_plain_pytorch_exceeds
    simdevice/test_engine_memory.py::test_forward_passes_whose_outputs_the_program_has_let_go_take_no_memory
    simdevice/test_engine_peaks.py::test_a_budget_is_filled_but_never_exceeded
    simdevice/test_engine_pipeline.py::test_joined_calls_cross_in_order
    simdevice/test_engine_quantized.py::test_int8_leaves_nothing_of_the_base_in_the_modules
    simdevice/test_engine_quantized.py::test_the_peak_is_a_part_of_the_base
    simdevice/test_engine_residency.py::test_deepspeeds_optimizers_are_replaced_by_torchs_on_the_device
    simdevice/test_engine_slices.py::test_late_copies_of_slices_change_no_bit
    step/test_allocator_retries.py::test_an_eighth_is_left_free_at_most_and_weights_are_those_of_one_plan
    step/test_fragments.py::test_a_plan_that_is_not_served_any_more_is_replaced
    step/test_fragments.py::test_a_saved_plan_is_replayed_and_a_warning_says_that_the_allocator_needs_more
    step/test_fragments.py::test_a_warning_says_that_the_allocator_cannot_serve_the_plan_that_was_found
    step/test_fragments.py::test_calls_that_are_cut_until_a_plan_fits_leave_fragments_free_and_more_where_steps_need_it
    step/test_fragments.py::test_whole_calls_run_with_a_warning_where_the_allocator_could_serve_no_plan_at_all
"""
"""Tests that take seconds, in folders of which the others run: the mechanism has a faster test beside them."""
RULES |= {f"tests/{name}": none for name in SLOW.split()}


def mark_deep(items: Sequence[pytest.Item], root: Path) -> None:
    """Mark every item that its rule leaves out."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.path, getattr(item, "originalname", item.name)].append(item)
    for (path, name), instances in tests.items():
        if not path.is_relative_to(root):  # somebody's own test beside ours
            continue
        kept = set(map(id, rule_of(path.relative_to(root), name)(instances)))
        for item in instances:
            if id(item) not in kept:
                item.add_marker(pytest.mark.deep)


def rule_of(path: Path, test: str) -> Rule:
    places = (f"{path}::{test}", str(path), *map(str, path.parents))
    return next(RULES[place] for place in places if place in RULES)
