"""No type of transformers that answers in text is neither run nor refused (`runtime/shape/families.py`)."""

from importlib.metadata import version

import pytest

from support import family_walk
from support.family_walk import RECORDED, TextType, is_newer, kind_of, misfiled, unaccounted
from support.installed_transformers import NEWEST, needs_transformers


def test_every_type_that_answers_in_text_is_run_or_refused() -> None:
    """Where a newer transformers has types that nobody decided on, they are printed; `make matrix` wants a decision."""
    found = unaccounted()
    if is_newer():
        print(f"transformers {version('transformers')} is newer than {RECORDED}: {found}")
    else:
        assert found == []


@pytest.mark.slow
def test_modules_say_which_families_are_mixtures() -> None:
    assert misfiled() == []


# A family, a wrapper, and refusals by a text model's type and by a whole model's.
@pytest.mark.parametrize(
    ("table", "name", "says"),
    [
        ("SUPPORTED", "qwen3_moe", "qwen3_moe: mixture"),
        ("SUPPORTED", "llama", "llama: dense"),
        ("WRAPPERS", "glm4v_moe", "glm4v_moe, whose text model is glm4v_moe_text: mixture"),
        ("REFUSED", "deepseek_v4", "deepseek_v4: mixture"),
        pytest.param(
            "REFUSED",
            "mistral_large4_text",
            "mistral_large4, whose text model is mistral_large4_text: mixture",
            marks=needs_transformers(NEWEST),
        ),
        ("REFUSED", "paligemma", "paligemma, whose text model is gemma: dense"),
    ],
)
def test_a_type_that_is_taken_out_of_a_table_is_found(
    table: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(family_walk, table)
    left = {key: whole[key] for key in whole if key != name} if isinstance(whole, dict) else set(whole) - {name}
    monkeypatch.setattr(family_walk, table, left)
    assert says in unaccounted()


def test_a_type_that_no_table_names_is_found() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING["qwen3_moe"]()
    assert not TextType("new_moe", "new_moe", config).is_accounted
    assert str(TextType("new_vl", "new_moe", config)) == "new_vl, whose text model is new_moe: mixture"
    assert kind_of(CONFIG_MAPPING["qwen3"]()) == "dense"


def test_kinds_of_models_that_are_refused_need_no_entry() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in ("bart", "bert"):
        assert TextType(name, name, CONFIG_MAPPING[name]()).is_accounted
