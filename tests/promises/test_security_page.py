"""Each sentence of SECURITY.md has tests, and they exist."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
# What is no promise: whom to ask, and whom the kit believes.
WITHOUT_TESTS = ("Report a vulnerability", "What is trusted")

SECURITY = "tests/promises/test_security.py"
# By the beginning of a sentence: names of tests in a file.
TESTS = {
    "No pickle is opened": {
        SECURITY: "test_pickles_beside_the_weights_are_not_opened test_a_pickle_instead_of_a_file_is_refused "
        "test_pickled_weights_only_are_refused_with_what_to_do test_a_pickle_with_the_name_of_data_is_refused "
        "test_a_pickle_in_a_saved_data_set_is_refused test_a_pickled_type_in_a_table_is_not_opened "
        "test_a_checkpoint_with_pickles_goes_on_without_them_or_is_refused "
        "test_the_source_unpickles_runs_and_trusts_nothing",
    },
    "No code of a model runs": {
        SECURITY: "test_code_of_a_model_is_not_run_unless_asked_to test_code_that_nobody_needs_is_not_run "
        "test_scoring_and_merging_run_no_code_of_a_model",
    },
    "No other file that a model names": {
        SECURITY: "test_no_other_file_can_name_pickled_weights",
        "tests/model/pretrained/test_files.py": "test_an_index_names_files_in_its_folder_only",
    },
    "A chat template runs in a sandbox": {
        SECURITY: "test_a_chat_template_cannot_leave_its_sandbox",
        "tests/data/chat/test_sandbox.py": "test_what_would_take_too_much_is_stopped_in_any_thread",
    },
    "A config that asks": {
        "tests/model/pretrained/test_files.py": "test_numbers_that_build_without_end_are_refused "
        "test_a_model_of_too_many_modules_is_not_built_to_its_end",
        "tests/model/test_images.py": "test_a_processor_that_would_fill_the_memory_is_refused",
        "tests/model/test_audio.py": "test_an_audio_processor_that_would_fill_the_memory_is_refused",
    },
    "A pipe, a device or a file": {
        "tests/model/pretrained/test_files.py": "test_what_is_no_regular_file_is_refused "
        "test_a_pipe_in_an_adapter_is_refused test_a_file_that_is_too_large_is_refused",
        "tests/data/read/test_sources.py": "test_a_pipe_is_no_file",
    },
    "An image or a sound is decoded": {
        "tests/data/read/test_audio_files.py": "test_what_is_no_sound_within_limits_is_refused_with_its_reason",
        "tests/data/read/test_image_files.py": "test_what_cannot_or_may_not_be_decoded_is_refused",
    },
    "A path of an image or a sound": {
        "tests/data/read/test_image_files.py": "test_a_path_leads_nowhere_but_below_the_folder "
        "test_the_known_forms_of_an_image_are_read_and_urls_are_not",
    },
    "No archive of data": {"tests/data/read/test_compressed.py": "test_an_archive_is_refused_by_its_name"},
    "A link in a data folder": {
        "tests/data/read/test_sources.py": "test_a_link_out_of_a_folder_is_refused_and_a_pattern_takes_it "
        "test_links_within_a_folder_and_those_of_the_hub_are_followed",
    },
    "A checkpoint leads nowhere": {
        "tests/checkpoint/test_manifest.py": "test_a_manifest_leads_nowhere_outside_of_its_folder "
        "test_verify_names_a_file_that_is_cut_altered_or_missing",
    },
    "Untrusted text is shown": {
        "tests/system/test_console.py": "test_no_output_moves_the_cursor_and_no_name_starts_a_line "
        "test_warnings_and_logs_of_libraries_are_shown_like_the_kits_own_lines test_no_other_module_prints",
        "tests/system/test_visible.py": "test_control_characters_are_shown_as_escapes",
        "tests/tools/report/test_page.py": "test_text_stays_text_and_cannot_drive_a_terminal",
    },
    "A report runs": {
        "tests/tools/report/test_page.py": "test_a_page_runs_the_script_of_the_kit_and_no_other "
        "test_a_page_is_whole_and_holds_no_credential",
    },
    "A command that a message proposes": {
        "tests/config/test_recipe_file.py": "test_an_accelerate_config_is_no_recipe_and_its_name_is_one_word",
        "tests/data/chat/test_columns.py": "test_a_mapping_is_one_word_of_the_shell",
    },
    "A run writes to": {"tests/promises/test_security_page.py": "test_a_run_writes_nowhere_else"},
    "A folder that holds something else": {
        "tests/run/test_folder.py": "test_a_folder_that_holds_no_run_is_never_deleted "
        "test_overwriting_goes_through_a_link_but_not_out_of_the_folder "
        "test_a_run_is_overwritten_only_if_asked_to",
    },
    "The cache of the kit": {
        "tests/system/test_cache.py": "test_a_new_cache_is_closed_to_other_users "
        "test_a_cache_that_anybody_may_write_to_is_warned_of "
        "test_a_cache_of_another_user_is_warned_of_but_not_one_to_which_the_group_writes",
    },
    "Damage of a cache entry": {
        "tests/system/test_cache.py": "test_no_byte_of_an_entry_can_be_damaged_unnoticed "
        "test_an_array_of_addresses_is_not_opened",
        "tests/cli/test_cache.py": "test_verify_reads_every_byte_and_a_damaged_entry_is_not_opened_again",
    },
    "Tokens, passwords and keys": {
        SECURITY: "test_nothing_that_a_run_leaves_or_says_holds_a_secret "
        "test_no_setting_that_holds_a_credential_is_taken test_neither_errors_nor_tracebacks_show_a_secret",
        "tests/system/test_credentials.py": "test_values_of_variables_with_secret_names_are_hidden "
        "test_credentials_in_urls_are_hidden test_tokens_of_known_services_are_hidden_wherever_they_stand",
        "tests/system/test_console.py": "test_no_line_holds_a_credential",
    },
    "Through a link": {
        "tests/promises/test_links.py": "test_no_link_in_a_run_of_others_leads_a_write_out_of_it",
        "tests/system/test_durable.py": "test_nothing_is_appended_through_a_link_or_to_a_pipe "
        "test_a_file_that_replaces_a_link_is_a_new_file test_removing_a_link_to_a_folder_keeps_its_target",
    },
    "On one machine": {
        "tests/promises/test_listening.py": "test_a_run_on_one_machine_listens_on_loopback_only",
    },
    "On several machines": {
        "tests/strategy/processes/test_rendezvous.py": "test_a_store_listens_on_the_address_that_it_is_given_only",
    },
    "They execute nothing": {
        "tests/promises/test_two_hosts.py": "test_no_untrusted_input_is_executed_and_a_cut_link_ends_every_process",
        "tests/strategy/launch/test_launch.py": "test_a_public_address_is_a_warning",
    },
    "The hub is asked": {
        "tests/model/pretrained/test_locate.py": "test_offline_a_model_missing_from_the_cache_is_reported_once",
        "tests/data/read/test_sources.py": "test_whether_a_name_means_the_hub_is_known_without_reading",
        "tests/tools/doctor/test_machine.py": "test_local_data_asks_no_hub",
    },
    "A revision that you name": {
        "tests/data/read/test_hub_datasets.py": "test_the_revision_that_is_asked_for_is_read_and_its_commit_is_known "
        "test_offline_a_revision_is_taken_only_from_a_copy_of_its_commit",
        "tests/promises/test_hub_model.py": "test_a_run_is_known_by_the_commit_of_its_model",
    },
    "`requirements.lock`": {"tests/test_versions.py": "test_the_lock_has_the_pins_with_hashes_and_names_no_index"},
}


def sentences():
    """The items of all sections but those without tests."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert set(WITHOUT_TESTS) < {section.split("\n")[0] for section in sections}
    bodies = [section.partition("\n")[2] for section in sections if not section.startswith(WITHOUT_TESTS)]
    lines = [line for body in bodies for line in body.splitlines() if line]
    assert all(line.startswith("- ") and line.endswith(".") for line in lines), "one item a line, one sentence an item"
    return [line.removeprefix("- ") for line in lines]


def test_each_sentence_of_the_page_has_tests_and_all_of_them_exist():
    found = sentences()
    for sentence in found:
        assert len(re.findall(r"[.!?](?= [A-Z`]|$)", sentence)) == 1, f"more than one sentence: {sentence}"
        assert sum(sentence.startswith(begin) for begin in TESTS) == 1, f"no test is named for: {sentence}"
    for begin, files in TESTS.items():
        assert any(sentence.startswith(begin) for sentence in found), f"the page no longer says: {begin}"
        for file, names in files.items():
            text = (ROOT / file).read_text()
            for name in names.split():
                assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{begin}: {file} has no {name}"


@pytest.mark.slow
def test_a_run_writes_nowhere_else(tmp_path, model_folder, chat_file):
    folders = {name: tmp_path / name for name in ("here", "home", "temporary")}
    for folder in folders.values():
        folder.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "KIT_"))}
    env = {**kept, "HOME": str(folders["home"]), "TMPDIR": str(folders["temporary"]), "HF_HUB_OFFLINE": "1"}
    words = [f"--model_name_or_path={model_folder}", f"--dataset={chat_file}", "--max_length=256", "--max_steps=1"]
    command = [sys.executable, str(ROOT / "recipes/finetune.py"), *words, "--global_batch_size=2", "--output_dir=run"]
    done = subprocess.run(command, cwd=folders["here"], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folders["here"].iterdir()] == ["run"]
    written = {path.relative_to(folders["home"]).parts[:2] for path in folders["home"].rglob("*") if path.is_file()}
    assert (".cache", "kit") in written and written <= {(".cache", "kit"), (".cache", "huggingface")}
    assert not [path for path in folders["temporary"].rglob("*") if path.is_file()]
