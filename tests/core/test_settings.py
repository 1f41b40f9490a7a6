from __future__ import annotations

import logging

import pytest

from fuseboard import settings
from fuseboard.errors import SettingsError


def test_an_empty_environment_gives_the_defaults():
    read = settings.read({})

    assert read == settings.Settings()
    assert (read.disable, read.debug_masks, read.test_count, read.probe_timeout) == (frozenset(), False, False, 300.0)
    assert (read.probe, read.cache) == ("here", "")


def test_words_are_trimmed_and_their_case_ignored():
    read = settings.read(
        {"FUSEBOARD_DISABLE": " Sage , ,flash", "FUSEBOARD_DEBUG": "MASKS", "FUSEBOARD_TEST": " count "}
    )

    assert read.disable == {"sage", "flash"}
    assert read.debug_masks
    assert read.test_count


def test_the_time_limit_of_a_probe_is_read_as_seconds():
    assert settings.read({"FUSEBOARD_PROBE_TIMEOUT": " 2.5 "}).probe_timeout == 2.5
    assert settings.read({"FUSEBOARD_PROBE_TIMEOUT": ""}).probe_timeout == 300.0


def test_where_a_kernel_is_tested_is_read_as_a_word():
    assert settings.read({"FUSEBOARD_PROBE": " Child "}).probe == "child"
    assert settings.read({"FUSEBOARD_PROBE": ""}).probe == "here"
    for make in (lambda: settings.read({"FUSEBOARD_PROBE": "fork"}), lambda: settings.Settings(probe="fork")):
        with pytest.raises(SettingsError) as caught:
            make()
        assert str(caught.value) == "FUSEBOARD_PROBE='fork': expected here or child."


def test_where_verdicts_are_kept_is_a_folder_or_off():
    assert settings.read({"FUSEBOARD_CACHE": " /var/cache/Fuse "}).cache == "/var/cache/Fuse"
    assert settings.read({"FUSEBOARD_CACHE": "OFF"}).cache == "off"
    assert settings.read({"FUSEBOARD_CACHE": " "}).cache == ""


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_that_is_no_positive_number_is_an_error(text):
    with pytest.raises(SettingsError) as caught:
        settings.read({"FUSEBOARD_PROBE_TIMEOUT": text})

    assert str(caught.value) == f"FUSEBOARD_PROBE_TIMEOUT={text!r}: expected a positive number of seconds."


@pytest.mark.parametrize(("name", "allowed"), [("DEBUG", "masks"), ("TEST", "count")])
def test_a_word_that_means_nothing_is_an_error_that_names_the_allowed_ones(name, allowed):
    with pytest.raises(SettingsError) as caught:
        settings.read({f"FUSEBOARD_{name}": f"{allowed},yes,1"})

    assert str(caught.value) == (
        f"FUSEBOARD_{name}='{allowed},yes,1': 1, yes means nothing here; allowed, comma separated: {allowed}."
    )


def test_an_unknown_setting_is_warned_of_with_the_nearest_name(caplog):
    with caplog.at_level(logging.WARNING, "fuseboard"):
        settings.read({"FUSEBOARD_DISABEL": "sage", "FUSEBOARD_XYZZY": "1", "OTHER": "2"})

    assert [record.getMessage() for record in caplog.records] == [
        "FUSEBOARD_DISABEL is not a setting of fuseboard and does nothing. Did you mean FUSEBOARD_DISABLE?",
        "FUSEBOARD_XYZZY is not a setting of fuseboard and does nothing.",
    ]


def test_a_wrong_setting_stops_the_first_use_and_not_the_import(python):
    out = python(
        "import fuseboard as fb\ntry: fb.attention\nexcept fb.SettingsError as error: print(error)\n",
        FUSEBOARD_TEST="yes",
    )

    assert out.startswith("FUSEBOARD_TEST='yes'")


def test_every_setting_stands_in_the_modules_table():
    for name in ("DISABLE", "DEBUG", "TEST", "PROBE", "PROBE_TIMEOUT", "CACHE"):
        assert f"`FUSEBOARD_{name}`" in settings.__doc__


def test_a_folder_in_a_home_that_nobody_has_is_an_error():
    with pytest.raises(SettingsError, match="FUSEBOARD_CACHE='~no-such-user/x': there is no such home folder"):
        settings.read({"FUSEBOARD_CACHE": "~no-such-user/x"})
