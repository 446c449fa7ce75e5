"""Names and parameters of the original's rubric, decision, forecast, numerics recipes (3 s)."""

from __future__ import annotations

import importlib

import chz
import pytest
from official_names import parameters_of

ROOT = "tinker_cookbook.recipes."
CLI = (
    "model_name lora_rank renderer_name load_checkpoint_path seed groups_per_batch learning_rate "
    "max_tokens temperature kl_penalty_coef num_substeps log_path wandb_project wandb_name "
    "session_name compute_post_kl eval_every save_every base_url behavior_if_log_dir_exists "
    "max_steps_off_policy loss_fn max_steps"
)
MARKETS = (
    "data_path data_cache_dir dataset_revision split_date max_train_questions "
    "max_validation_questions seed"
)
RUN = (
    "model_name renderer_name lora_rank learning_rate eval_every save_every log_path wandb_project "
    "wandb_name session_name behavior_if_log_dir_exists base_url max_steps"
)
NAMES: dict[str, dict[str, str | None]] = {
    "rubric.data": {
        "Conversation": None,
        "Rubric": "rubric_str extraction_regex grader_output_format_instruction",
        "Rubric.get_grader_prompt": "convo",
        "Rubric.extract_score": "response",
        "Rubric.from_dict": "d",
        "Rubric.from_json": "json_str",
        "Rubric.to_dict": "",
        "RubricBasedDatapoint": "convo rubric_items",
        "RubricBasedDatapoint.from_json": "json_str",
        "RubricDatapointListBuilder": "",
        "RubricDatapointListBuilderFromJsonl": "jsonl_path",
        "PrometheusDatapointListBuilder": "data_path",
        "PrometheusDatapointListBuilder.build_rubric_datapoint": "item",
    },
    "rubric.env": {
        "RubricGradedEnv": "renderer datapoint grader_llm debug format_coef",
        "RubricGradedEnvGroupBuilder": "renderer datapoint grader_llm group_size",
        "RubricGradedDataset": "renderer batch_size group_size datapoints grader_llm",
        "RubricGradedDatasetBuilder": "renderer_name model_name_for_tokenizer batch_size "
        "train_group_size test_group_size train_datapoint_list_builder "
        "test_datapoint_list_builder base_url grader_llm_name grader_renderer_name",
    },
    "rubric.debug_env": {
        "get_addition_datapoint": "",
        "get_prometheus_datapoint": "",
        "main": "datapoint",
    },
    "rubric.generate_data": {
        "generate_one": "rng",
        "generate_dataset": "num_train num_test seed write_dir",
    },
    "rubric.train": {
        "CLIConfig": f"{CLI} test_group_size grader_llm_name grader_renderer_name "
        "train_jsonl_path test_jsonl_path",
        "get_dataset_builder": "batch_size policy_model_name renderer_name grader_llm_name "
        "train_group_size train_jsonl_path test_jsonl_path test_group_size grader_renderer_name",
        "cli_main": "cli_config",
    },
    "rubric.prometheus_experimental": {
        "CLIConfig": f"{CLI} test_group_size grader_llm_name grader_renderer_name",
        "get_dataset_builder": "batch_size policy_model_name renderer_name grader_llm_name "
        "train_group_size test_group_size grader_renderer_name",
        "cli_main": "cli_config",
    },
    "decisions": {
        "ChoiceRenderer": None,
        "ChoiceRendering": "answer_tokens answer_position label_tokens",
        "ChoiceRendering.answer_tokens_for": "label",
        "Decision": "text choices",
        "DecisionRenderer": "renderer choice_renderer effort",
        "DecisionRenderer.render": "decision",
        "DecisionRendering": "tokens choice_pos label_tokens",
        "DecisionRendering.with_label": "label",
        "PrefixedChoiceRenderer": "renderer prefix placeholder",
        "PrefixedChoiceRenderer.render_choices": "labels",
        "ProbabilityLossFn": None,
        "decision_choice_datums": "decision_renderer examples",
        "decision_dist_datums": "decision_renderer examples",
        "probability_loss": "loss_fn",
        "sample_decision": "sampling_client rendering",
    },
    "decisions.decision": {"SYSTEM_PROMPT_TEMPLATE": None, "USER_PROMPT_TEMPLATE": None},
    "decisions.train": {"CustomLossFn": None},
    "decisions.demo": {"TEAMS": None, "Config": "model_name model_path", "main": "config"},
    "decisions.forecasting": {
        "ANSWER_FORMAT": None,
        "DECISION_TEMPLATE": None,
        "NO": None,
        "REPLIES": None,
        "YES": None,
        "Config": f"{RUN} {MARKETS} batch_size epochs",
        "YesNoChoiceRenderer": "renderer",
        "brier_score_loss": "choice_probs target_probs",
        "evaluate_forecasts": "sampling_client decision_renderer examples",
        "forecast_decision": "example",
        "main": "cfg",
        "train": "cfg training_client decision_renderer train_examples validation ml_logger "
        "log_path start_step",
    },
    "forecasting.data": {
        "DATASET_REPOSITORY": None,
        "DEFAULT_CACHE_DIR": None,
        "DEFAULT_DATASET_REVISION": None,
        "DEFAULT_MAX_TRAIN_QUESTIONS": None,
        "DEFAULT_MAX_VALIDATION_QUESTIONS": None,
        "DEFAULT_SPLIT_DATE": None,
        "ForecastExample": "submission_id event_ticker event_title market reference_material "
        "resolution_criteria snapshot_time close_time category outcome",
        "ForecastSplit": "train validation split_time excluded_crossing_events",
        "fetch_prophet_arena": "revision cache_dir",
        "load_prophet_arena_examples": "csv_path",
        "load_prophet_arena_split": "csv_path split_time max_train_questions "
        "max_validation_questions seed",
        "main": "",
        "parse_utc_datetime": "value context",
    },
    "forecasting.env": {
        "ForecastEnv": "example",
        "ForecastEvaluator": "dataset max_tokens",
        "ForecastGroupBuilder": "example renderer group_size",
        "ForecastRLDataset": "examples batch_size group_size renderer epochs",
        "ProphetArenaRLDatasetBuilder": f"{MARKETS} model_name_for_tokenizer renderer_name "
        "groups_per_batch group_size validation_group_size train_epochs include_validation",
        "brier_reward": "probability outcome",
        "parse_forecast": "response",
        "render_prompt": "example",
        "roc_auc": "pairs",
    },
    "forecasting.train": {
        "Config": f"{RUN} {MARKETS} load_checkpoint_path train_epochs group_size groups_per_batch "
        "validation_group_size max_tokens temperature loss_fn",
        "cli_main": "cfg",
    },
    "rl_numerics_check.env": {
        "CountingDataset": "corpus task batch_size n_batches seed make_group_builder",
        "CountingDatasetBuilder": "batch_size group_size model_name_for_tokenizer renderer_name "
        "task n_batches seed max_trajectory_tokens max_generation_tokens",
        "CountingEnvGroupBuilder": "problem task model_name_for_tokenizer renderer_name group_size "
        "max_trajectory_tokens max_generation_tokens",
        "CountingProblem": "word num_pages pages prompt true_count",
        "CountingReward": "problem state tolerance",
        "CountingTaskConfig": "num_pages_hint word_hint num_pages_min num_pages_max page_chars "
        "words secret_num_pages reward_tolerance",
        "DEFAULT_MAX_TRAJECTORY_TOKENS": None,
        "DEFAULT_WORDS": None,
        "EXTRA_TURNS": None,
        "EpisodeState": "pages_read invalid_page_requests",
        "ExtensionCheckedEnv": "renderer message_env",
        "FAILED_PARSE_REWARD": None,
        "CONTEXT_OVERFLOW_REWARD": None,
        "MAX_CORPUS_CHARS": None,
        "NumPagesHint": None,
        "OneToolCallPerTurnEnv": "tools initial_messages max_turns reward_fn",
        "PageReader": "pages state",
        "SYSTEM_PROMPT": None,
        "WordHint": None,
        "build_env": "problem renderer task max_trajectory_tokens max_generation_tokens",
        "build_prompt": "config word num_pages",
        "clean_wikitext_line": "line",
        "closeness_reward": "predicted true_count tolerance",
        "count_word": "text word",
        "load_wikitext_corpus": "max_chars",
        "parse_answer": "text",
        "sample_problem": "rng corpus config",
        "split_pages": "corpus start num_pages page_chars",
    },
    "rl_numerics_check.train": {
        "CLIConfig": "model_name renderer_name lora_rank learning_rate loss_fn kl_penalty_coef "
        "group_size groups_per_batch max_tokens max_trajectory_tokens task seed eval_every "
        "save_every max_steps base_url log_path wandb_project wandb_name session_name "
        "behavior_if_log_dir_exists",
        "build_config": "cli_config",
    },
}


@pytest.mark.parametrize("module", NAMES)
def test_names_and_parameters_are_in_their_place(module):
    found = importlib.import_module(ROOT + module)
    for name, parameters in NAMES[module].items():
        value = found
        for part in name.split("."):
            value = getattr(value, part)
        if parameters is None:
            continue
        # A config takes its fields by keyword; chz hides them from the signature of some.
        taken = chz.chz_fields(value) if chz.is_chz(value) else parameters_of(value) or ()
        missing = set(parameters.split()) - set(taken)
        assert not missing, f"{name} lacks {missing}"


def test_a_group_size_has_the_name_of_the_original_too():
    from tinker_cookbook.recipes.rubric.train import CLIConfig
    from tinker_cookbook.utils.command_line.entrypoint import parse_arguments

    assert parse_arguments(CLIConfig, ["train_group_size=5"]).group_size == 5


def test_the_defaults_of_the_original():
    from tinker_cookbook.recipes.rl_numerics_check.env import CountingTaskConfig
    from tinker_cookbook.recipes.rubric.data import Rubric

    task, rubric = CountingTaskConfig(), Rubric("Good?")
    assert (task.num_pages_min, task.num_pages_max, task.page_chars) == (28, 36, 10_000)
    assert rubric.extraction_regex == r"<score>(.*?)</score>"
    assert rubric.grader_output_format_instruction == (
        "Please output your score between 0 and 1 wrapped in <score> ... </score>"
    )
