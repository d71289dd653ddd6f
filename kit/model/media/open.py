"""Opens a model's processor for the kinds of media that it reads."""

from typing import Any

import torch

from kit.config.settings.data import DataSettings
from kit.config.settings.model import ModelSettings
from kit.data.media import MediaKind
from kit.model.media.codec import ModelMedia, part_that_reads, takes
from kit.model.media.kinds import Images, Sounds, check_bounds
from kit.model.pretrained.locate import hub_options, locate_model
from kit.system.errors import Problem, UserError, first_line


def open_media(settings: ModelSettings, data: DataSettings, config: Any, meta_model: Any, tokenizer: Any) -> ModelMedia:
    """Open the processor of a model for each kind of media that it reads.

    Args:
        meta_model: the model on meta, whose code computes positions.

    Raises:
        UserError: the model reads none, or not in its text; its processor, or what that needs, is not there; or it does
            not take ``min_pixels`` or ``max_pixels``.
    """
    reader = part_that_reads(meta_model)
    name = locate_model(settings.model_name_or_path, settings.model_revision)
    options = hub_options(settings, is_checked=True)
    fix = "copy the processor's files next to the weights, and install what it names"
    problems: dict[MediaKind, Problem] = {}
    kinds: dict[MediaKind, Images | Sounds] = {}
    classes: dict[MediaKind, type[Images | Sounds]] = {"image": Images, "audio": Sounds}
    for kind, of_kind in classes.items():
        try:
            if not takes(reader, kind):
                argument = of_kind.argument
                found = f"given, but this model does not accept {argument}"
                raise UserError(argument, found, f"a model that reads {argument} and text")
            kinds[kind] = of_kind(name, options, data)
        except UserError as error:
            problems[kind] = error.problems[0]
            if problems[kind].where in ("min_pixels", "max_pixels"):
                raise
        except Exception as error:  # the files may hold anything
            found = f"{name}: no {kind} processor ({first_line(error)})"
            problems[kind] = Problem("model_name_or_path", found, fix=fix)
    if not kinds:
        raise UserError(problems["image" if problems["audio"].where == "audio" else "audio"])
    try:
        processor = _open_processor(name, options, kinds, config, tokenizer)
        return ModelMedia(processor, config, meta_model, kinds, problems)
    except UserError:
        raise
    except Exception as error:
        raise UserError("model_name_or_path", f"{name}: no processor ({first_line(error)})", fix=fix) from None


def _open_processor(
    name: str, options: dict[str, Any], kinds: dict[MediaKind, Images | Sounds], config: Any, tokenizer: Any
) -> Any:
    """Open a processor with the parts for some kinds of media, also where that for videos is not installed."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    own, _ = transformers.ProcessorMixin.get_processor_dict(name, **options)
    check_bounds("image", own)
    settings = (own, *(each.part.to_dict() for each in kinds.values()), tokenizer.init_kwargs)
    named = next(filter(None, (each.get("processor_class") for each in settings)), None)
    plain: Any = getattr(transformers, named or PROCESSOR_MAPPING_NAMES[config.model_type])
    # The texts of the kit have as many tokens as media. Some processors take one sound to a text.
    changed: dict[str, Any] = dict.fromkeys(("check_argument_for_proper_class", "validate_inputs"), _accept)
    if hasattr(plain, "_retrieve_input_features"):
        changed |= {
            "__call__": transformers.ProcessorMixin.__call__,
            "_process_audio": _process_audio,
            "config": config,
        }
    opened: Any = type(plain.__name__, (plain,), changed)
    parts = {"tokenizer": tokenizer} | {part: each.part for each in kinds.values() for part in each.parts}
    return opened.from_args_and_dict([parts.get(each) for each in opened.get_attributes()], own)


def _accept(*_: Any, **__: Any) -> None:
    """Replaces a check of transformers."""


def _process_audio(self: Any, sounds: list[Any], max_source_positions: int, **options: Any) -> tuple[Any, list[str]]:
    """The features and the text of sounds for Voxtral, whose processor leaves the text to another library."""
    of_sounds = [self._retrieve_input_features([each], max_source_positions, **options) for each in sounds]
    audio = self.config.audio_config
    num_tokens = audio.max_source_positions * audio.hidden_size // audio.intermediate_size  # of 30 seconds
    return {"input_features": torch.cat(of_sounds)}, [self.audio_token * num_tokens * len(each) for each in of_sounds]
