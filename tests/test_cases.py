"""Faults that users of such libraries have reported, by number, and the tests that hold the right results; `make check`
runs those of tests/mpi again with every movement checked."""

import ast
from pathlib import Path

HERE = Path(__file__).parent
TESTS = """
1   mpi/movement/test_adjoints.py::test_case_1_all_sum_against_invariant_sum
2   mpi/movement/test_adjoints.py::test_case_2_rank_dependent_losses
3   mpi/movement/test_messages.py::test_transposing_adds_nothing
4   mpi/movement/test_adjoints.py::test_case_4_broadcast_over_a_group_without_rank_0
5   mpi/movement/test_vmap.py::test_batch_axis_between_split_and_gathered_axes
6   mpi/movement/test_vmap.py::test_nested_and_with_derivatives
7   mpi/movement/test_derivatives.py::test_case_7_two_outputs_through_one_movement
8   mpi/movement/test_adjoints.py::test_case_8_messages_of_other_lengths_both_ways
9   mpi/movement/test_adjoints.py::test_case_9_halo_adjoint_adds
10  mpi/movement/test_derivatives.py::test_complex_grad
11  mpi/movement/test_derivatives.py::test_second_order
12  mpi/movement/test_derivatives.py::test_case_12_data_parallel_model
13  mpi/movement/test_inputs.py::test_stride_zero
13  mpi/movement/test_inputs.py::test_strided
13  mpi/movement/test_inputs.py::test_conjugate
14  mpi/movement/test_value.py::test_case_14_a_column_gathered
15  mpi/movement/test_inputs.py::test_nothing_is_mutated
16  mpi/nn/test_networks.py::test_case_16_unet mpi/movement/test_inputs.py::test_in_place_after_movement
17  mpi/movement/test_inputs.py::test_fresh_memory_or_identity
18  mpi/movement/test_value.py::test_case_18_widths_by_splits
19  mpi/movement/test_many_ranks.py::test_case_21_three_by_four_to_four_by_two test_plan.py::test_repartition
20  test_partition.py::test_blocks_cover_exactly_once
21  mpi/movement/test_value.py::test_case_21_one_to_six_and_five_to_three
21  mpi/movement/test_many_ranks.py::test_case_21_three_by_four_to_four_by_two
22  mpi/movement/test_value.py::test_value mpi/movement/test_value.py::test_case_22_broadcast_to_eight
22  mpi/movement/test_many_ranks.py::test_case_22_broadcast_to_sixteen
23  mpi/watching/test_agreement.py::test_shape_changes_on_one_rank_only
24  mpi/engine/test_chunks.py::test_chunks
25  mpi/test_world.py::test_case_25_no_leak_in_100_000_calls
26  mpi/functional/test_conv.py::test_case_26_halos_wider_than_blocks movement/test_halo.py::test_window_against_unfold
27  mpi/functional/test_conv.py::test_windows mpi/functional/test_conv.py::test_all_derivatives
28  mpi/functional/test_conv.py::test_windows mpi/nn/test_networks.py::test_resnet_stem_and_blocks
29  mpi/functional/test_conv.py::test_case_29_frozen
30  mpi/functional/test_conv.py::test_case_30_uneven_widths
31  mpi/functional/test_pool.py::test_case_31_avg_pool mpi/functional/test_pool.py::test_max_pool
32  mpi/functional/test_conv.py::test_random mpi/functional/test_pool.py::test_case_32_adaptive
33  mpi/functional/test_norm.py::test_case_33_batch_norm_training
33  mpi/functional/test_norm.py::test_case_33_running_statistics
34  mpi/functional/test_norm.py::test_case_34_layer_norm_over_uneven_splits
34  mpi/functional/test_reduce.py::test_case_34_means_count_elements
35  mpi/functional/test_loss.py::test_case_35_cross_entropy mpi/functional/test_embedding.py::test_options
36  mpi/functional/test_dropout_init.py::test_same_mask_on_any_partition
36  mpi/functional/test_dropout_init.py::test_same_parameters_on_any_partition
37  mpi/watching/test_agreement.py::test_blocks_do_not_fit
37  mpi/watching/test_agreement.py::test_dtype
37  mpi/watching/test_agreement.py::test_operator
37  mpi/movement/test_vmap.py::test_batch_sizes_differ
37  mpi/watching/test_checking.py::test_shape_and_dtype_without_negotiation
37  mpi/watching/test_checking.py::test_operator mpi/watching/test_checking.py::test_batches
38  mpi/movement/test_ties.py::test_unused_output_on_one_rank
38  mpi/watching/test_checking.py::test_output_unused_on_one_rank
38  mpi/watching/test_agreement.py::test_requires_grad_is_joined
38  mpi/watching/test_agreement.py::test_placeholder_without_grad
38  mpi/watching/test_agreement.py::test_requires_grad_inside_torch_func
38  mpi/watching/test_checking.py::test_zero_volume_input_without_grad
38  mpi/movement/test_ties.py::test_one_rank_alone_is_nonlinear
38  mpi/watching/test_checking.py::test_second_derivatives_with_an_unequal_loss
39  mpi/movement/test_order.py::test_case_39_groups_in_an_order_that_differs_by_rank
39  mpi/movement/test_order.py::test_case_39_box_plans_of_overlapping_groups
39  programs/test_faults.py::test_groups_in_another_order
40  programs/test_faults.py::test_exception_on_one_rank programs/test_faults.py::test_killed_rank
"""


def test_every_case_has_its_tests():
    rows = [(int(number), names) for number, *names in map(str.split, TESTS.strip().splitlines())]
    assert {number for number, _ in rows} == set(range(1, 41))
    for number, names in rows:
        for file, _, name in (n.partition("::") for n in names):
            defined = {
                node.name
                for node in ast.walk(ast.parse((HERE / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert name in defined, f"case {number}: {file} has no {name}"
