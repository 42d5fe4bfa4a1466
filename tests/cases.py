"""Faults that people reported of other libraries, each with the tests of it here.

    python tests/cases.py                               # on the chosen backend
    python tests/cases.py --backends tensorflow jax torch
    python tests/cases.py --cases case-05 case-17 --workers 2
    python tests/cases.py --reports FOLDER --backends tensorflow jax torch

A line of `CASES` says where a fault was reported, what holds here, and which tests
show it; the command runs those tests, one process for each backend, or reads what
`pytest --junitxml=FOLDER/BACKEND.xml` left of a run of all tests, and prints a table.
`benchmarks/peers.py` shows which of the faults are still there elsewhere.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
BACKENDS = ("tensorflow", "jax", "torch")

Case = collections.namedtuple("Case", "source holds tests")

LAYERS = "test_contract.py::test_every_layer_keeps_the_contract"
MODELS = "test_contract.py::test_every_builder_keeps_the_contract"

# fmt: off
CASES = {
    # Masks
    "case-01": Case(
        "keras-team/keras#23038",
        "no option of a causal layer lets the future through",
        ("test_masks.py::test_changing_the_future_changes_the_past_by_exactly_nothing",
         "test_masks.py::test_a_call_makes_any_layer_causal")),
    "case-02": Case(
        "keras-team/keras#21284",
        "a builder makes every block causal, and random tokens teach nothing",
        ("test_builders.py::test_no_token_sees_a_later_one_whatever_the_block",
         "test_training.py::test_random_tokens_teach_nothing",
         f"{MODELS}[own_block_decoder]")),
    "case-03": Case(
        "karpathy/nanoGPT#331",
        "all ways to compute attention agree; one token attends to itself",
        ("test_attention.py::test_scaled_attention_equals_the_reference",
         "test_attention.py::test_one_token_alone_attends_to_itself_and_nobody_warns",
         "test_attention.py::test_asking_for_scores_never_changes_the_output",
         "test_properties.py::test_attention_equals_the_reference_whatever_the_masks",
         "test_kernels.py::test_blocks_give_the_reference_and_the_gradients_of_written_out_scores",
         "test_kernels.py::test_the_backends_kernel_gives_the_same")),
    "case-05": Case(
        "pytorch/pytorch#24816, #26098, #41508",
        "a query that sees nothing gets zeros, with finite gradients",
        ("test_masks.py::test_queries_without_keys_give_zero_weights_and_finite_gradients",
         "test_properties.py::test_gradients_are_finite_and_none_reaches_what_no_query_sees")),
    "case-07": Case(
        "keras-team/keras#16108; pytorch/pytorch#101967",
        "NaN in padding reaches no real row",
        ("test_masks.py::test_rubbish_in_a_masked_slot_reaches_no_other_row",
         "test_properties.py::test_rubbish_in_slots_that_no_query_sees_reaches_no_other_row",
         "test_properties.py::test_rubbish_in_padding_reaches_no_real_row_of_a_block")),
    "case-09": Case(
        "keras-team/keras#18416",
        "residuals and norms keep the mask, so that pooling sees real rows only",
        ("test_masks.py::test_the_mask_is_readable_behind_any_number_of_blocks",)),
    "case-10": Case(
        "keras-team/keras-hub#137, #138",
        "every block gets the mask, and positions hand it on",
        ("test_masks.py::test_the_mask_is_readable_behind_any_number_of_blocks",
         "test_masks.py::test_more_padding_changes_nothing")),
    "case-12": Case(
        "keras-team/keras#17655",
        "no layer hides its call in a transform; an explicit mask survives one",
        ("test_cases.py::test_an_explicit_mask_survives_a_transform_around_the_layer",
         "test_cases.py::test_no_layer_wraps_its_own_call",
         "test_masks.py::test_implicit_masks_survive_compilation")),
    "case-14": Case(
        "keras-team/keras#18543, #19311",
        "the masks of query and of context are each received, and kept apart",
        ("test_masks.py::test_masks_of_query_and_of_context_are_kept_apart",)),
    "case-15": Case(
        "keras-team/keras-hub#783",
        "masks over keys and over pairs combine, whatever the batch and the heads",
        ("test_masks.py::test_masks_over_keys_and_over_pairs_combine_whatever_the_sizes",)),
    "case-17": Case(
        "keras-team/keras#21483",
        "a mask of rank 2 is over keys, also where all sizes agree",
        ("test_masks.py::test_a_mask_of_rank_2_is_over_keys_also_where_all_sizes_agree",
         "test_attention.py::test_exception_one_a_mask_of_rank_2_is_over_keys",
         "test_errors.py::test_what_cannot_be_computed_is_refused")),
    "case-18": Case(
        "tensorflow/tensorflow#45854; wfondrie/depthcharge#38",
        "a float mask is refused, never inverted; integers are booleans",
        ("test_attention.py::test_exception_two_a_float_mask_is_refused_and_not_inverted",
         "test_masks.py::test_integers_booleans_and_lists_are_the_same_mask")),
    "case-19": Case(
        "keras-team/keras-io#1964, #1046",
        "every target row sees the real source, and nothing but it",
        ("test_masks.py::test_context_that_is_padding_changes_nothing",
         "test_builders.py::test_every_target_token_sees_every_source_token_and_no_later_target",
         f"{MODELS}[encoder_decoder]")),
    "case-21": Case(
        "keras-team/keras#21154",
        "call arguments that end in _mask may be there or not, symbolic or real",
        ("test_cases.py::test_masks_may_be_given_or_not_by_place_or_by_name",
         f"{LAYERS}[cross_block]")),
    # Files
    "case-23": Case(
        "tensorflow/tensorflow#47722; keras-team/keras#15560, #16796",
        "layers in a subclassed model reload with all weights, each time",
        ("test_serialization.py::test_layers_in_a_subclassed_model_reload",)),
    "case-24": Case(
        "tensorflow/models#13535",
        "a deep encoder predicts the same after a reload",
        ("test_cases.py::test_six_blocks_predict_the_same_after_a_reload",)),
    "case-26": Case(
        "tensorflow/tensorflow#29073; keras-team/tf-keras#513",
        "blocks in a list are tracked and trained",
        ("test_training.py::test_blocks_in_a_list_are_all_trained",)),
    "case-27": Case(
        "keras-team/keras#19899; keras-team/keras-io#1884",
        "configs keep name, dtype and trainable, and nothing warns of building",
        (f"{LAYERS}[block]", f"{LAYERS}[multi_head_with_everything]",
         "test_serialization.py::test_a_frozen_child_stays_frozen_in_the_file")),
    "case-28": Case(
        "CyberZHG/keras-transformer#7; CyberZHG/keras-self-attention#52",
        "a fresh process needs only the import to load a file",
        (f"{LAYERS}[causal_post_norm_block]",
         "test_serialization.py::test_layers_in_a_sequential_model_reload")),
    "case-30": Case(
        "keras-team/keras-hub#219",
        "a reloaded model goes on training where it stopped",
        (f"{MODELS}[decoder]",)),
    "case-32": Case(
        "keras-team/keras-hub#1303",
        "no two variables share a path; weights load under other layer names",
        ("test_cases.py::test_no_two_variables_share_a_path_and_weights_load_under_other_names",)),
    "case-34": Case(
        "keras-team/keras#10485, #19505; keras-team/keras-hub#883, #1568",
        "a tied table is one variable with both gradients, also in every copy",
        ("test_embeddings.py::test_a_tied_table_has_the_gradients_of_both_uses",
         "test_builders.py::test_a_tied_head_costs_nothing_and_a_free_one_a_table",
         "test_cases.py::test_a_tied_table_is_one_variable_in_every_copy")),
    "case-36": Case(
        "bryanlimy/tf2-transformer-chatbot#12; keras-team/keras-io#405",
        "a learning-rate schedule reloads at its step",
        ("test_train_char_lm.py::test_the_learning_rate_schedule_reloads",)),
    "case-37": Case(
        "keras-team/keras-hub#1262",
        "activations reload; a lambda that could not is refused on saving",
        ("test_serialization.py::test_a_lambda_that_could_not_be_loaded_again_is_refused_on_saving",
         f"{LAYERS}[feed_forward]", f"{LAYERS}[gated_feed_forward]")),
    "case-39": Case(
        "tensorflow/tensorflow#28752",
        "deepcopy, pickle and clone_model give the same paths, weights and outputs",
        (f"{MODELS}[encoder]", f"{LAYERS}[multi_head]")),
    # Precision
    "case-41": Case(
        "keras-team/keras#17571; openai/gpt-2#122",
        "masks do not overflow in float16, and the model learns",
        ("test_precision.py::test_scores_near_the_least_float16_survive_two_masks_at_once",
         "test_precision.py::test_mixed_float16_learns_under_a_causal_and_a_padding_mask")),
    "case-42": Case(
        "google/flax#982",
        "every dtype is finite and near float32 under every mask",
        ("test_precision.py::test_half_precision_is_finite_and_near_float32_under_every_mask",)),
    "case-44": Case(
        "keras-team/keras-hub#2424",
        "products beyond float16 choose what float32 chooses",
        ("test_precision.py::test_products_beyond_float16_choose_what_float32_chooses",)),
    "case-46": Case(
        "EleutherAI/gpt-neox#1003; huggingface/transformers#25681",
        "rotations are right at position 100,000 in every dtype",
        ("test_positions.py::test_rotary_is_right_at_position_100_000_in_every_dtype",)),
    "case-48": Case(
        "wfondrie/depthcharge#82; huggingface/transformers#13665",
        "sinusoids are right at position 100,000 in every dtype",
        ("test_positions.py::test_sinusoid_is_right_at_position_100_000_in_every_dtype",
         "test_precision.py::test_outputs_have_the_compute_dtype_and_logits_are_float32")),
    "case-50": Case(
        "huggingface/transformers#25420, #36536",
        "logits of a step are those of the whole, in half precision too",
        ("test_cache.py::test_grid_of_pieces_gives_the_logits_of_the_whole",
         "test_cache.py::test_half_precision_stays_near_the_whole_and_keeps_its_dtype")),
    # Shapes and positions
    "case-51": Case(
        "tensorflow/text#1122; tensorflow/tensorflow#37191",
        "sinusoids have the numbers of the paper, and odd sizes work",
        ("test_positions.py::test_sinusoid_has_the_numbers_of_the_paper",
         "test_positions.py::test_sinusoid_equals_the_formula_in_both_layouts_and_odd_sizes")),
    "case-52": Case(
        "huggingface/transformers#25199, #40462; jzhang38/TinyLlama#24",
        "both layouts of rotation have their numbers; scores depend on distance only",
        ("test_positions.py::test_rotary_has_the_numbers_of_both_layouts",
         "test_positions.py::test_rotary_scores_depend_only_on_distance")),
    "case-54": Case(
        "huggingface/transformers#31228; facebookresearch/xformers#728",
        "no length is affected by one before it; beyond a table is refused by name",
        ("test_positions.py::test_rows_do_not_depend_on_what_length_came_before",
         "test_positions.py::test_positions_beyond_a_learned_table_never_pass_for_right",
         "test_errors.py::test_what_cannot_be_computed_is_refused")),
    "case-56": Case(
        "keras-team/keras#21219, #18373",
        "heads share the features, whatever their number, or are refused",
        ("test_attention.py::test_head_dim_defaults_to_an_equal_share_whatever_the_number_of_heads",
         "test_errors.py::test_what_cannot_be_made_is_refused")),
    "case-58": Case(
        "keras-team/keras#21714",
        "attention along one of several axes is that of each slice, or refused",
        ("test_cases.py::test_attention_along_an_inner_axis_is_that_of_each_slice",)),
    "case-59": Case(
        "keras-team/keras#19535, #17093",
        "a summary shows real shapes and exact counts",
        ("test_builders.py::test_the_summary_shows_real_shapes_and_exact_counts",)),
    "case-92": Case(
        "keras-team/keras#18402",
        "grouped heads are heads repeated, in the cache too",
        ("test_attention.py::test_grouped_heads_equal_heads_repeated",
         "test_cache.py::test_grid_of_pieces_gives_the_logits_of_the_whole",
         "test_errors.py::test_what_cannot_be_made_is_refused")),
    "case-85": Case(
        "keras-team/keras-core#623",
        "everything compiles with batch and time unknown",
        (f"{MODELS}[decoder]", f"{LAYERS}[block]", f"{LAYERS}[multi_head]")),
    # Generation
    "case-61": Case(
        "lucidrains/x-transformers#311, #219",
        "token by token, in pieces and at once give the same logits",
        ("test_cache.py::test_grid_of_pieces_gives_the_logits_of_the_whole",
         "test_generation.py::test_translations_follow_the_full_forward_pass")),
    "case-63": Case(
        "ml-explore/mlx-lm#93; pytorch/executorch#2010",
        "a step stands behind its prompt, for every kind of position",
        ("test_cache.py::test_the_step_behind_49_tokens_stands_at_position_49",)),
    "case-65": Case(
        "huggingface/transformers#22161, #29419; keras-team/keras-hub#2237",
        "padding on either side gives the same text",
        ("test_generation.py::test_padding_left_right_or_none_gives_the_same_text",)),
    "case-66": Case(
        "huggingface/transformers#26569",
        "each row of a ragged batch goes on behind its own prompt",
        ("test_generation.py::test_each_row_gets_what_the_full_forward_pass_says",)),
    "case-68": Case(
        "lucidrains/x-transformers#271; keras-team/keras-hub#1047",
        "targets may be shorter than sources, and beams share their source",
        ("test_generation.py::test_beams_share_their_source",
         "test_generation.py::test_one_beam_is_greedy_and_beams_never_score_less")),
    "case-69": Case(
        "keras-team/keras-hub#989, #912, #2765",
        "as many tokens come as were asked for",
        ("test_generation.py::test_as_many_tokens_come_as_were_asked_for",)),
    "case-71": Case(
        "karpathy/nanoGPT#738, #233; google-deepmind/gemma#562",
        "temperature 0 is greedy, and tokens lie in the vocabulary",
        ("test_generation.py::test_cold_samplers_are_greedy",
         "test_generation.py::test_tokens_always_lie_in_the_vocabulary",
         "test_generation.py::test_mistakes_are_named")),
    "case-72": Case(
        "openai/gpt-2#58; huggingface/text-generation-inference#687",
        "a seed gives one text, whatever was drawn before",
        ("test_generation.py::test_a_seed_gives_one_text_in_every_batch_and_way_to_run",)),
    "case-74": Case(
        "keras-team/keras-hub#779",
        "lengths of one bucket are traced once",
        ("test_generation.py::test_one_bucket_is_traced_once",)),
    # Training
    "case-87": Case(
        "tensorflow/tensorflow#34491; keras-team/keras#15323",
        "padding counts in no loss, however it is told",
        ("test_training.py::test_padding_counts_in_no_loss_however_it_is_told",)),
    "case-89": Case(
        "keras-team/keras#20320",
        "an encoder-decoder learns a toy translation",
        ("test_training.py::test_an_encoder_decoder_learns_to_reverse",)),
    "case-91": Case(
        "bayesflow-org/bayesflow#754",
        "dropout is off unless training, and leaves the mean",
        ("test_attention.py::test_dropout_is_off_unless_training_and_leaves_the_mean",)),
    "case-93": Case(
        "keras-team/keras#16552",
        "a training step of one's own stays finite in mixed_float16",
        ("test_training.py::test_a_train_step_of_ones_own_stays_finite_in_mixed_float16",
         "test_training.py::test_200_steps_in_half_precision_stay_finite_and_learn")),
    "case-95": Case(
        "keras-team/keras#1642, #4196",
        "padding counts in no accuracy",
        ("test_training.py::test_padding_counts_in_no_accuracy",)),
}
# fmt: on


def outcomes(report):
    """Returns `{test: outcomes}` of a JUnit report, with and without parameters."""
    found = collections.defaultdict(list)
    for one in xml.etree.ElementTree.parse(report).iter("testcase"):
        # A session that breaks off leaves one without a class.
        file = one.get("classname", "").rpartition(".")[2] + ".py"
        tags = [x.tag for x in one if x.tag in ("failure", "error", "skipped")]
        name = one.get("name", "")
        for test in {name, name.partition("[")[0]}:
            found[f"{file}::{test}"].append((tags or ["passed"])[0])
    return found


def run(backend, tests, workers):
    """Runs tests in one process of a backend; returns `{test: outcomes}`."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        command += ["-n", str(workers)] if workers else []
        subprocess.run(
            [*command, *(str(HERE / test) for test in tests)],
            env={**os.environ, "KERAS_BACKEND": backend},
            cwd=HERE.parent,
            stdout=sys.stderr,
        )
        return outcomes(report) if report.exists() else {}


def verdict(ends):
    """Says in a word or two how some tests ended."""
    counts = collections.Counter(ends)
    if not counts:
        return "missing"
    if set(counts) == {"passed"}:
        return f"passed ({counts['passed']})"
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def table(cases, backends, results):
    """Returns the lines of a table: case, property, tests, result of each backend."""
    lines = [
        f"| case | what holds | reported | tests | {' | '.join(backends)} |",
        "|---" * (4 + len(backends)) + "|",
    ]
    for name, case in cases.items():
        cells = [
            verdict([x for test in case.tests for x in results[backend].get(test, [])])
            if all(results[backend].get(test) for test in case.tests)
            else "missing"
            for backend in backends
        ]
        tests = ", ".join(f"`{test.split('::')[1]}`" for test in case.tests)
        row = [name, case.holds, case.source, tests, *cells]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = os.environ.get("KERAS_BACKEND", "tensorflow")
    parser.add_argument("--backends", nargs="+", default=[chosen], choices=BACKENDS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--workers", type=int, default=0, help="of pytest-xdist")
    parser.add_argument(
        "--reports", type=pathlib.Path, metavar="FOLDER", help="run nothing, read these"
    )
    options = parser.parse_args()
    cases = {name: CASES[name] for name in options.cases}
    tests = list(dict.fromkeys(test for case in cases.values() for test in case.tests))
    results = {}
    for backend in options.backends:
        if options.reports:
            results[backend] = outcomes(options.reports / f"{backend}.xml")
        else:
            results[backend] = run(backend, tests, options.workers)
    lines = table(cases, options.backends, results)
    print(*lines, sep="\n")
    cells = [cell for line in lines[2:] for cell in line.split(" | ")[4:]]
    good = sum(cell.startswith("passed") for cell in cells)
    print(f"\n{good} of {len(cells)} are green: {len(cases)} cases.")
    return good < len(cells)


if __name__ == "__main__":
    sys.exit(main())
