"""Opens a model's processor for the kinds of media that it reads."""

from importlib import import_module
from typing import Any

import torch

from kit.config.settings.data import DataSettings
from kit.config.settings.model import ModelSettings
from kit.data.media import MediaKind
from kit.model.media.codec import ModelMedia, part_that_reads, takes
from kit.model.media.kinds import Images, Sounds
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
    problems: dict[MediaKind, Problem] = {}
    kinds: dict[MediaKind, Images | Sounds] = {}
    parts = {"tokenizer": tokenizer}
    name = locate_model(settings.model_name_or_path, settings.model_revision)
    options = hub_options(settings, is_checked=True)
    of_processor: dict[str, Any] = {}
    fix = "copy the processor's files next to the weights, and install what it names"
    classes: dict[MediaKind, type[Images | Sounds]] = {"image": Images, "audio": Sounds}
    for kind, of_kind in classes.items():
        argument = of_kind.argument
        if reader is None or not takes(reader, kind):
            found = f"given, but this model does not accept {argument}"
            problems[kind] = Problem(argument, found, of_kind.readers)
            continue
        try:
            for package in of_kind.packages:
                import_module(package)
        except (ImportError, OSError):  # OSError: without the library libsndfile
            found = f"they need {' and '.join(of_kind.packages)}, which are not installed"
            problems[kind] = Problem(argument, found, fix=of_kind.install)
            continue
        try:
            from transformers import ProcessorMixin  # slow to import

            of_processor, _ = ProcessorMixin.get_processor_dict(name, **options)
            kinds[kind] = opened = of_kind(name, options, of_processor, data)
            parts |= opened.parts
        except UserError as error:
            if error.problems[0].where in ("min_pixels", "max_pixels"):
                raise
            problems[kind] = error.problems[0]
        except Exception as error:  # the files may hold anything
            found = f"{name}: no {kind} processor ({first_line(error)})"
            problems[kind] = Problem("model_name_or_path", found, fix=fix)
    if kinds:
        try:
            processor = _processor_class(of_processor, kinds, config, tokenizer)
            args = [parts.get(each) for each in processor.get_attributes()]
            return ModelMedia(processor.from_args_and_dict(args, of_processor), config, meta_model, kinds, problems)
        except UserError:
            raise
        except Exception as error:
            raise UserError("model_name_or_path", f"{name}: no processor ({first_line(error)})", fix=fix) from None
    raise UserError(problems["image" if problems["audio"].where == "audio" else "audio"])


def _processor_class(of_processor: dict[str, Any], kinds: dict[MediaKind, Any], config: Any, tokenizer: Any) -> Any:
    """The class of a model's processor, which also opens without its part for videos, or one that is not installed."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings = (of_processor, *(each.part.to_dict() for each in kinds.values()), tokenizer.init_kwargs)
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
    return type(plain.__name__, (plain,), changed)


def _accept(*_: Any, **__: Any) -> None:
    """Replaces a check of transformers."""


def _process_audio(self: Any, sounds: list[Any], max_source_positions: int, **options: Any) -> tuple[Any, list[str]]:
    """The features and the text of sounds for Voxtral, whose processor leaves the text to another library."""
    of_sounds = [self._retrieve_input_features([each], max_source_positions, **options) for each in sounds]
    audio = self.config.audio_config
    num_tokens = audio.max_source_positions * audio.hidden_size // audio.intermediate_size  # of 30 seconds
    return {"input_features": torch.cat(of_sounds)}, [self.audio_token * num_tokens * len(each) for each in of_sounds]
