"""Which tests hold which reported fault: the numbers this package answers for, and the tests of each."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ANSWERED = [*range(1, 47)]

FAULTS = {
    1: ["ops/test_lookup_pool.py::test_fault_1_empty_bags_are_zero"],
    2: ["jagged/test_keyed_jagged_tensor.py::test_fault_02_the_last_offset_is_the_number_of_ids"],
    3: ["jagged/test_keyed_jagged_tensor.py::test_fault_03_bad_offsets"],
    4: [
        "jagged/test_keyed_jagged_tensor.py::test_fault_04_empty_offsets",
        "ops/test_lookup_pool.py::test_fault_4_no_ids_and_no_bags",
    ],
    5: [
        "jagged/test_keyed_jagged_tensor.py::test_fault_05_keys_are_never_narrowed",
        "nn/test_plan.py::test_fault_05_int32_inputs_are_widened",
        "ops/test_dedup.py::test_fault_05_int32_keys_are_widened",
    ],
    6: [
        "jagged/test_keyed_jagged_tensor.py::test_fault_06_features_of_very_different_length_keep_their_ids",
        "nn/test_plan.py::test_fault_06_lengths_of_very_different_features_stay_apart",
    ],
    7: ["jagged/test_keyed_jagged_tensor.py::test_fault_07_lengths_that_do_not_fit"],
    8: [
        "nn/test_training.py::test_fault_08_padding_gets_no_gradient_however_often_it_occurs",
        "ops/test_lookup_pool.py::test_fault_8_padding_has_no_row_no_count_and_no_gradient",
        "pipeline/test_models.py::test_fault_08_padding_never_moves",
    ],
    9: [
        "nn/test_training.py::test_fault_09_frozen_tables_do_not_move",
        "stages/test_lookup_function.py::test_fault_09_frozen_tables_with_trainable_weights",
    ],
    10: [
        "ops/test_lookup_pool.py::test_fault_10_any_dim_is_right",
        "store/test_store_rows.py::test_fault_10_every_dim_keeps_whole_rows",
    ],
    11: [
        "nn/test_embedding_bag_collection.py::test_fault_11_open_tables_take_any_key",
        "ops/test_dedup.py::test_fault_11_extreme_keys",
        "ops/test_owners.py::test_fault_11_any_key_and_hash",
        "store/test_store_keys.py::test_fault_11_extreme_keys_are_ordinary",
    ],
    12: [
        "ops/test_dedup.py::test_fault_12_close_and_large_keys_stay_apart",
        "ops/test_dedup.py::test_fault_12_float_keys_are_refused",
        "store/test_store_keys.py::test_fault_12_large_keys_keep_their_digits",
    ],
    13: [
        "init/test_distributions.py::test_fault_13_multiples_are_balanced_over_owners",
        "ops/test_owners.py::test_fault_13_multiples_of_the_world_size_are_balanced",
    ],
    14: [
        "nn/test_plan.py::test_fault_14_ids_outside_a_fixed_vocabulary",
        "pipeline/test_errors.py::test_fault_14_a_bad_batch_is_raised_by_its_own_step_and_changes_nothing",
        "pipeline/test_processes.py::test_fault_14_38_what_fails_on_one_rank_fails_its_own_batch_only",
    ],
    15: [
        "nn/test_training.py::test_fault_15_eval_inserts_nothing",
        "pipeline/test_iterators.py::test_fault_15_evaluation_inserts_nothing",
        "store/test_store_keys.py::test_fault_15_reading_inserts_nothing",
    ],
    16: [
        "ops/test_dedup.py::test_fault_16_a_million_distinct_keys",
        "ops/test_dedup.py::test_fault_16_strided_equals_contiguous",
    ],
    17: [
        "nn/test_training.py::test_fault_17_two_calls_in_one_forward_are_one_update",
        "pipeline/test_models.py::test_fault_17_a_model_trains_as_with_plain_autograd",
        "pipeline/test_processes.py::test_fault_17_28_two_ranks_same_key_gradient_1_is_averaged_over_ranks",
    ],
    18: [
        "nn/test_policy_training.py::test_fault_18_the_gradient_of_a_refused_key_is_skipped_alone",
        "pipeline/test_policy_keys.py::test_fault_18_a_key_without_a_row_is_skipped_and_no_other_keys_gradient_moves",
        "store/test_store_gradients.py::test_fault_17_and_18_repeated_keys_sum_and_absent_ones_skip_only_themselves",
        "store/test_store_rules.py::test_fault_18_a_key_without_a_row_leaves_the_gradients_of_others_in_place",
    ],
    19: ["pipeline/test_ranks.py::test_fault_19_every_gradient_reaches_its_own_row"],
    20: [
        "ops/test_row_update.py::test_fault_20_no_rows_is_no_op",
        "store/test_store_gradients.py::test_fault_20_no_keys_is_no_update",
    ],
    21: [
        "ops/test_row_update.py::test_fault_21_bias_correction_by_row_counts_own_updates",
        "ops/test_row_update.py::test_fault_21_lazy_rule_and_step_alone_decide_bias_correction",
        "ops/test_row_update_rules.py::test_fault_21_first_update_of_a_row_starts_its_buffer_whenever_it_comes",
        "ops/test_row_update_rules.py::test_fault_21_rows_without_gradient_stand_still",
        "ops/test_row_update_rules.py::test_fault_21_step_or_rows_own_count_decides_bias_correction",
    ],
    22: [
        "optim/test_settings.py::test_fault_22_defaults_are_those_of_torch",
        "optim/test_settings.py::test_fault_22_eps_is_documented",
    ],
    23: ["pipeline/test_models.py::test_fault_23_half_precision_gradients_are_summed_in_float32"],
    24: ["store/test_store_keys.py::test_fault_24_memory_is_flat_over_1000_calls_on_the_same_keys"],
    25: [
        "ops/test_bucketize.py::test_fault_25_repeated_runs_are_equal",
        "ops/test_dedup.py::test_fault_25_repeated_runs_are_equal",
        "store/test_store_gradients.py::test_fault_25_a_hot_key_is_summed_in_blocks_alike_on_any_number_of_threads",
    ],
    26: [
        "pipeline/test_bad_gradients.py::test_fault_26_raise_changes_nothing_on_any_rank",
        "pipeline/test_bad_gradients.py::test_fault_26_skip_row_leaves_out_only_the_bad_rows",
        "pipeline/test_bad_gradients.py::test_fault_26_what_one_owner_alone_sees_all_ranks_hear",
        "store/test_store_gradients.py::test_fault_26_one_bad_gradient_changes_nothing",
    ],
    27: [
        "pipeline/test_mutations.py::test_fault_27_an_update_in_every_micro_batch",
        "pipeline/test_semantics.py::test_fault_27_micro_batches_make_one_update",
    ],
    28: [
        "nn/test_training.py::test_fault_28_ranks_average_their_gradients",
        "pipeline/test_semantics.py::test_fault_28_dense_gradients_are_the_mean_over_all_ranks",
        "pipeline/test_semantics.py::test_fault_28_row_gradients_are_the_mean_over_all_ranks",
    ],
    29: [
        "nn/test_training.py::test_fault_29_forward_and_backward_alone_change_no_row",
        "nn/test_training.py::test_fault_29_max_norm_is_refused",
    ],
    30: [
        "pipeline/test_policy_keys.py::test_fault_30_quotas_of_no_row_and_of_one_end_in_refusals_not_in_waiting",
        "store/test_store_keys.py::test_fault_30_capacity_refuses_only_what_does_not_fit",
        "store/test_store_keys.py::test_fault_30_capacity_zero",
        "store/test_store_keys.py::test_fault_30_growth_in_calls_of_10_000",
        "store/test_store_rules.py::test_fault_30_a_capacity_of_zero_refuses_every_key",
    ],
    31: [
        "nn/test_policy_training.py::test_fault_31_without_a_rule_a_full_table_raises",
        "pipeline/test_agreement.py::test_fault_31_a_full_table_is_an_error_that_changes_nothing",
        "pipeline/test_policy_keys.py::test_fault_31_a_full_table_raises_unless_a_rule_says_what_happens",
        "store/test_store_keys.py::test_fault_31_a_full_table_raises_and_changes_nothing",
        "store/test_store_rules.py::test_fault_31_refused_keys_are_reported_one_by_one_and_raise_where_no_rule_says_so",
    ],
    32: [
        "pipeline/test_policy_keys.py::test_fault_32_rows_of_batches_in_flight_are_never_the_victims",
        "store/test_store_limbo.py::test_fault_32_rows_in_flight_are_not_touched_when_their_neighbours_go",
        "store/test_store_limbo.py::test_fault_32_rows_of_the_batch_and_the_one_before_are_never_victims",
    ],
    33: [
        "checkpoint/test_row_loading.py::test_fault_33_a_missing_slot_is_named_and_never_left_unset",
        "nn/test_policy_training.py::test_fault_33_a_key_that_returns_starts_afresh",
        "pipeline/test_policy_keys.py::test_fault_33_an_evicted_key_returns_without_its_former_state",
        "store/test_store_keys.py::test_fault_33_a_key_inserted_again_starts_from_its_initial_row",
        "store/test_store_limbo.py::test_fault_33_a_key_that_returns_starts_from_its_initial_row",
    ],
    34: [
        "comm/test_gloo.py::test_fault_34_a_rank_with_nothing_to_send",
        "pipeline/test_processes.py::test_fault_34_a_rank_without_keys_takes_part",
        "pipeline/test_semantics.py::test_fault_34_a_rank_without_samples_has_no_output_and_the_others_train",
    ],
    35: [
        "pipeline/test_iterators.py::test_fault_35_ranks_evaluate_and_train_together_with_uneven_batches",
        "pipeline/test_ranks.py::test_fault_35_ranks_with_5_and_4_batches_and_last_ones_of_3_and_1_samples",
    ],
    36: ["comm/test_memory_world.py::test_fault_36_counts_that_disagree_name_both_ranks"],
    37: [
        "pipeline/test_ranks.py::test_fault_37_modules_called_in_another_order_train_alike",
        "pipeline/test_ranks.py::test_fault_37_modules_defined_in_another_order_are_an_error_not_a_hang",
    ],
    38: [
        "launch/test_run_ranks.py::test_fault_38_a_killed_rank_is_named_and_the_others_end_by_themselves",
        "pipeline/test_faults.py::test_fault_38_a_rank_killed_in_the_middle",
        "pipeline/test_faults.py::test_fault_38_an_exception_on_one_rank",
        "pipeline/test_processes.py::test_fault_14_38_what_fails_on_one_rank_fails_its_own_batch_only",
    ],
    39: [
        "capture/test_split_batch.py::test_fault_39_micro_batches_own_their_tensors",
        "pipeline/test_mutations.py::test_fault_39_a_loader_that_refills_its_tensors_is_harmless",
        "pipeline/test_mutations.py::test_fault_39_a_prefetch_that_does_not_copy",
        "pipeline/test_processes.py::test_fault_39_tensors_that_the_loader_and_the_caller_overwrite",
    ],
    40: [
        "pipeline/test_iterators.py::test_fault_40_evaluation_in_the_middle_of_an_epoch_sees_the_batch_before",
        "pipeline/test_iterators.py::test_fault_40_the_same_iterator_object_trains_again",
        "pipeline/test_iterators.py::test_fault_40_the_same_loader_trains_in_every_epoch",
    ],
    41: [
        "checkpoint/test_row_loading.py::test_fault_41_a_capacity_that_is_too_small_is_named_with_both_numbers",
        "checkpoint/test_row_loading.py::test_fault_41_settings_that_differ_are_named_with_both_values",
        "checkpoint/test_row_round_trips.py::test_fault_41_one_to_four_to_two_to_three_to_one_ranks_keep_every_row_and_slot",
    ],
    42: [
        "checkpoint/test_killed_saves.py::test_fault_42_killed_at_random_moments",
        "checkpoint/test_row_loading.py::test_fault_42_files_that_are_missing_cut_or_swapped_are_named",
        "cli/test_train_checkpoint.py::test_fault_42_44_killed_and_continued_equals_one_run",
    ],
    43: [
        "checkpoint/test_row_round_trips.py::test_fault_43_a_load_brings_back_the_rows_not_only_the_rest",
        "checkpoint/test_save_load.py::test_fault_43_a_checkpoint_without_its_dense_part_is_an_error",
        "checkpoint/test_save_load.py::test_fault_43_empty_tables_and_features_never_used",
        "checkpoint/test_save_load.py::test_fault_43_rows_states_and_dense_come_back_and_the_report_says_so",
    ],
    44: [
        "checkpoint/test_resume_loaders.py::test_fault_44_a_shuffling_data_loader_goes_on",
        "checkpoint/test_resume_loaders.py::test_fault_44_another_order_is_an_error",
        "checkpoint/test_resume_loaders.py::test_fault_44_one_iterator_through_progress",
        "cli/test_train_checkpoint.py::test_fault_42_44_killed_and_continued_equals_one_run",
    ],
    45: [
        "test_native_import.py::test_fault_45_a_broken_extension_file_is_reported",
        "test_native_import.py::test_fault_45_a_missing_extension_says_what_to_install",
        "test_native_import.py::test_fault_45_another_version_is_refused",
    ],
    46: [
        "capture/test_transfer.py::test_fault_46_custom_batch_class_is_moved",
        "capture/test_transfer.py::test_fault_46_custom_batch_class_is_pinned",
        "pipeline/test_models.py::test_fault_46_batches_of_any_kind",
    ],
}


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_answered_fault_has_tests() -> None:
    assert sorted(set(ANSWERED) - FAULTS.keys()) == []
    assert all(FAULTS.values())


@pytest.mark.parametrize("number", FAULTS)
def test_the_tests_of_a_fault_exist_and_name_it(number: int) -> None:
    for test in FAULTS[number]:
        file, _, name = test.partition("::")
        assert name in functions_of(TESTS / file), f"{test} is gone"
        numbers = re.match(r"test_fault((?:_(?:and_)?\d+)+)_", name)
        assert numbers, f"{name} does not name a fault"
        assert number in {int(n) for n in re.findall(r"\d+", numbers[1])}, f"{name} names another fault than {number}"
