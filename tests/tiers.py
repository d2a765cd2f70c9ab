"""Which test runs when: the one place that says so.

``make test`` (five minutes of two cores) runs the first tier: no job but a few, and of MPI the numbers of ranks that
show most. ``make test-full`` runs what it leaves out, marked ``full``; ``make test-all`` the sweeps too, marked
``slow`` where they stand, and what the second tier leaves out of its own, marked ``spare``. All of pytest's own
commands run ``full`` and ``spare`` tests as well: ``-m "not slow and not full"`` is the first tier.
"""

from __future__ import annotations

import re
from zlib import crc32

# ---------------------------------------------------------------- in one process

# Of these files the first tier runs only the tests named: others start jobs, go through tables of cases, or trace.
ONLY = {
    "docs": (
        "test_blocks_run[first pages-4]",
        "test_every_class_of_distdl_has_its_line",
        "test_every_notebook_has_its_script",
        "test_gallery",
        "test_links_between_pages",
        "test_names_that_pages_use",
        "test_only_runnable_fences",
        "test_recipes_are_whole_programs",
        "test_reference_renders",
        "test_tests_that_prove",
    ),
    "faults": ("test_exception_on_one_rank[backward]", "test_killed_rank"),
    "machines": ("test_collectives", "test_local_work", "test_messages", "test_no_such_machine"),
    "trace": ("test_a_program_is_a_line_for_each_movement", "test_every_rank_sends_what_its_trace_says[3]"),
    "launch": (
        "test_a_signal_to_any_process_ends_all[run-rank 0-SIGINT]",
        "test_bad_command_line",
        "test_results_come_in_rank_order",
    ),
    "play": (),  # it needs a browser
    "site": (),  # it needs what `make docs` installs
    "tools": (),  # programs by command lines
    "torch_engine": (
        "test_just_works[without mpi4py and cupy-torchrun]",
        "test_private_names_exist",
        "test_ranks_that_cannot_meet",
        "test_which_engine",
    ),
}

# Of all others it leaves out the tests named, which start jobs too.
LATER = {
    "bench": ("test_one_operator_on_two_ranks", "test_plots"),
    "compiler_bugs": ("test_the_order_of_effects", "test_wrapping_integers"),
    "nodes": ("test_torchrun_on_two_nodes",),
    "files": ("test_a_save_that_nobody_waits_for", "test_hyperparameters_come_back", "test_killed_while_saving"),
    "frozen": ("test_python_calls",),
    "plan": ("test_digest_is_equal_in_every_process",),
    "structure": ("test_one_rank_without_mpi4py",),
    "typing": ("test_a_typed_program",),
    "wrong_calls": ("test_wrong_arguments",),
    "numpy_options": ("test_every_option",),
    "public_docs": ("test_example",),
    "release": ("test_the_sdist_is_a_checkout", "test_the_wheel_is_the_package"),
    "security": ("test_no_rank_listens_on_a_network", "test_words_are_not_expanded"),
}

# ---------------------------------------------------------------- on the ranks of a launch

# On how many ranks each file of tests/mpi runs at all; those that are not named, the movements, on any number.
LAYERS = (1, 4)  # compositions: 4 ranks show every way of splitting them (uneven, empty, some of the ranks, grids)
ODD = (1, 3, 4)  # those that others are made of, on an odd number too
LONG = (4,)  # trainings of whole models and their like
SMALL = (1, 2, 3, 4)  # how torch traces and compiles, and differentiates where ranks do not do the same
ANY = (1, 2, 3, 4, 8)
RANKS = {
    "attention": ODD,
    "checkpoint": (2, 4),
    "others": (1, 2, 4),
    "c10d": (2, 3, 4),
    "compiled": (2,),
    "compiled_region": (2,),
    "compiled_training": (2,),
    "conv": ODD,
    "convert": LAYERS,
    "differing_ranks": SMALL,
    "dropout_init": LAYERS,
    "embedding": SMALL,
    "expert": LAYERS,
    "fft": LAYERS,
    "fields": SMALL,
    "fno": LAYERS,
    "frozen_messages": (2,),
    "fuzz_layers": LAYERS,
    "gpt": ANY,
    "graph": ODD,
    "interop": (2, 4),
    "inversion": LAYERS,
    "interpolate": LAYERS,
    "layout_of": SMALL,
    "linear": ODD,
    "local": LAYERS,
    "loss": ODD,
    "neighborhood": ODD,
    "neon": LONG,
    "networks": LAYERS,
    "nn": LAYERS,
    "nn_idioms": LAYERS,
    "norm": ODD,
    "outside": SMALL,
    "overlap": LAYERS,
    "average": LONG,
    "data": LONG,
    "grid": LONG,
    "hooks": LONG,
    "pipeline": LONG,
    "precision": LONG,
    "rows": SMALL,
    "shallow_water": LAYERS,
    "shard": LONG,
    "sharded": LAYERS,
    "simplify": SMALL,
    "dense": LAYERS,
    "solve": LAYERS,
    "sparse": ODD,
    "staggered": SMALL,
    "sums": ODD,
    "topology": LAYERS,
    "peer_double": (2, 4),
    "pool": LAYERS,
    "poisson": LAYERS,
    "reduce": LAYERS,
    "remat": LAYERS,
    "rendezvous": (2, 4),
    "reshape": LAYERS,
    "sample": ODD,
    "scan": (1, 2, 4),
    "sweep": LAYERS,
    "ties": SMALL,
    "tracing": SMALL,
    "models": (2, 3, 4),
    "traced": (1, 2, 3, 4),
    "trigonometric": LAYERS,
    "without_fast": (2,),
}

# The first tier runs each test once: on 1 and 2 ranks all but these, which run everything again, or compile it;
AGAIN = ("compiled", "compiled_region", "compiled_training", "models", "traced", "without_fast")
# and on 4 ranks in their place these files, or of a file the tests named.
FOUR = {
    "adjoints": None,
    "checkpoint": None,
    "conv": None,
    "dense": ("test_what_is_required_of_the_numbers", "test_what_is_required_of_qr"),
    "derivatives": None,
    "convert": ("test_flags_dtypes_and_attributes",),
    "dropout_init": ("test_same_mask_on_any_partition", "test_same_parameters_on_any_partition"),
    "embedding": None,
    "expert": ("test_linear",),
    "fft": (
        "test_round_trips_and_parseval",
        "test_messages_of_slabs_and_pencils",
        "test_half_a_spectrum_counts_its_interior_twice",
    ),
    "interpolate": ("test_bare_partition_and_messages", "test_nearest_chooses_as_torch"),
    "linear": None,
    "loss": None,
    "local": ("test_local_conv[(3, 3)-(1, 1)]", "test_lcn[(5, 1)]"),
    "messages": None,
    "networks": None,
    "nn": ("test_torch_machinery", "test_parameters_do_not_depend_on_the_partition"),
    "norm": None,
    "average": ("test_every_step_is_a_period", "test_hierarchical", "test_weights"),
    "data": (
        "test_accumulation_with_one_reduction[None]",
        "test_one_message_for_a_bucket",
        "test_unused_parameters",
    ),
    "grid": ("test_bytes[shape0]", "test_data_tensor_space_negotiates_nothing[split_outputs]"),
    "hooks": ("test_identity", "test_power_sgd_finds_low_rank_exactly", "test_with_modules"),
    "pipeline": ("test_a_table_written_by_hand", "test_hessian_vector_products[1f1b]"),
    "overlap": ("test_a_batch_on_one_rank_only",),
    "precision": (
        "test_blocks_without_elements",
        "test_dtypes",
        "test_the_scale_follows_torchs[False]",
        "test_torchs_own_scaler_skips_everywhere",
    ),
    "shard": ("test_norms_are_torchs[2.0]", "test_under_torch_func[True]"),
    "solve": ("test_every_rank_stops_at_the_same_step", "test_messages_of_cg"),
    "sums": (
        "test_gradient_sync[module-conv]",
        "test_parametrized_layers[older hook]",
        "test_partly_overlapping_ranks_are_refused",
        "test_precision_and_sharding_keep_it",
        "test_unfrozen_frozen_and_added_later",
    ),
    "topology": ("test_discovered", "test_hierarchical_all_reduce"),
    "pool": None,
    "reduce": None,
    "reshape": (
        "test_flatten_and_back",
        "test_pad",
        "test_cat",
        "test_cat_outside_a_bare_partition",
        "test_cat_subset_splits_and_errors",
        "test_stack",
    ),
    "sample": ("test_an_index_is_kept", "test_as_torchs_grid_sample"),
    "ties": None,
    "value": None,
    "vmap": None,
}
# Trainings of whole models among them, which 2 ranks show too.
BUT = {
    "checkpoint": ("test_another_number_of_ranks_continues_the_curve", "test_the_serial_model"),
    "networks": ("test_case_16_unet", "test_resnet_stem_and_blocks"),
}

# Cases that say the same again: on these numbers of ranks the second tier runs one in so many of the tests that match,
# drawn by their names, so that everybody draws the same; or none (0).
_SOME = [((3, 8), 4, r".*\[")]  # what is asked of every case of the registry, and is whole on 1, 2 and 4 ranks
DRAWN: dict[str, list[tuple[tuple[int, ...], int, str]]] = {
    "adjoints": [((8,), 2, r".*\[")],
    # Fifty disagreements on each number of ranks, of which each is waited for: of its two seeds one.
    "alarms": [
        ((3,), 0, r"test_first_error_ends_the_block\[1\]"),
        ((4, 8), 0, r"test_first_error_ends_the_block\[0\]"),
    ],
    "attention": [((3,), 4, r".*\["), ((4,), 0, r"test_an_order_by_name\[.*-16\]")],  # 13 and 3 rows do not divide
    # Transforms are gone when inductor begins: its graphs hold movements, as those of the random programs do.
    "compiled_region": [
        ((2,), 0, r"test_transforms\[(?!vmap of grad|jvp of grad).*-inductor"),
        ((2,), 0, r"test_inside\[(a map|its adjoint|a composition|a pytree|values|a layout|a batch.*)-inductor"),
    ],
    "derivatives": [((3,), 2, r".*\["), ((8,), 4, r".*\[")],
    "dtypes": _SOME,
    "inputs": _SOME,
    "split_phase": _SOME,
    "strided": _SOME,
    "traced": [((1, 2), 4, r".*\["), ((3, 4), 2, r".*\[")],  # each on 3 ranks or on 4
    "vmap": [((3,), 2, r".*\["), ((8,), 4, r".*\[")],
    # All of it runs without any fast path, and values and adjoints without each one; derivatives run the same programs.
    "without_fast": [((2,), 4, r"test_(grad|jvp|second_order|results_are_reproducible|layers)\[without (?!all-)")],
}


def _among(test: str, names) -> bool:
    """Whether a test, or the function that it is a case of, is named."""
    return names is None or test in names or test.partition("[")[0] in names


def in_one_process(file: str, test: str) -> str:
    """The tier of a test without MPI: "", or "full"."""
    return "" if _among(test, ONLY.get(file)) and not _among(test, LATER.get(file, ())) else "full"


def on_ranks(file: str, test: str, n: int) -> str:
    """The tier of a test on n ranks: "", "full", or "slow" where it has nothing more to show. Of a file ("") the first
    that any of its tests has."""
    if n not in RANKS.get(file, ANY):
        return "slow" if n in SMALL else "never" if file in RANKS else "full"
    if file in AGAIN or n not in (1, 2, 4):
        return "full"
    named, but = FOUR.get(file, ()), BUT.get(file, ())
    if test:
        return "" if (_among(test, named) and not _among(test, but)) == (n == 4) else "full"
    some = named is None or named if n == 4 else named is not None or but
    return "" if some else "full"


def spare(file: str, test: str, n: int) -> bool:
    """Whether the second tier leaves this test out on n ranks. Next numbers of ranks draw others."""
    return any(
        n in numbers and re.match(tests, test) is not None and not (one_in and (crc32(test.encode()) + n) % one_in == 0)
        for numbers, one_in, tests in DRAWN.get(file, ())
    )
