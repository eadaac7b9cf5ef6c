"""Which rows a job has yet to caption, and whether those that exist are about the same pictures and prompts."""

from __future__ import annotations

from collections.abc import Mapping

from mmspec.app.caption.config import CaptionConfig, ProcessInfo, prompt_sha1
from mmspec.app.caption.variants import variants
from mmspec.app.errors import UsageError
from mmspec.app.io.cells import short_repr
from mmspec.app.io.file_stamp import was_replaced
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import Item
from mmspec.app.io.output import Finished, subject_hash


def survey(
    inputs: Inputs, config: CaptionConfig, process: ProcessInfo, finished: Mapping[str, Finished]
) -> tuple[int | None, list[str]]:
    """The number of rows of this process, None if it is not cheap to have; and what is to be said of those that exist.

    Raises:
        UsageError: of inputs that are listed, all problems that can be seen without decoding.
    """
    num_rows, replaced = inputs.count(), list[str]()
    if inputs.is_listed:
        num_rows = 0
        for item in inputs.rows(lambda ident: True):
            num_rows += 1
            done = [(one, finished[one.id]) for one in variants(item, config) if one.id in finished]
            for one, row in done:
                check_row(one, row, config)
            replaced += [one.id for one, row in done if is_replaced(one, row, config)]
    rows = f"{len(replaced)} row{'s'[: len(replaced) > 1]}"
    said = [f"captioning anew {rows} whose file was replaced since, as {short_repr(one)}" for one in replaced[:1]]
    if num_rows is None:
        return None, said
    own = range(config.shard[0], num_rows, config.shard[1])[process.rank :: process.world_size]
    return len(own) * config.num_variants, said


def is_pending(item: Item, finished: Mapping[str, Finished], config: CaptionConfig) -> bool:
    """Whether a row is missing, or is to be repeated.

    Raises:
        UsageError: as `check_row`.
    """
    row = finished.get(item.id)
    if row is None:
        return True
    check_row(item, row, config)
    return (config.retry_errors and row.has_error) or is_replaced(item, row, config)


def is_replaced(item: Item, row: Finished, config: CaptionConfig) -> bool:
    """Whether the file of a row is another than when the row was written, which is then written anew."""
    return config.format in ("jsonl", "csv") and was_replaced(item, row.stamp)


def check_row(item: Item, row: Finished, config: CaptionConfig) -> None:
    """Refuse a row that exists and has a caption for another prompt, or is about another file.

    Raises:
        UsageError: it was.
    """
    if item.owns_id and row.subject not in (None, subject_hash(item.file_name)):
        raise UsageError(
            f"the row {short_repr(item.id)} in {config.out} is about another file than {short_repr(item.file_name)}: "
            "use another --out, or give rows ids of their own"
        )
    if config.format in ("parquet", "webdataset") and not row.has_error and was_replaced(item, row.stamp):
        raise UsageError(
            f"the file of {short_repr(item.id)} was replaced since it was captioned, and shards do not change: use "
            "another --out, or --overwrite"
        )
    if item.template or row.has_error:  # whose prompt is not known yet; or was the error
        return
    prompts = (item.resolve_prompt(config.prompt, is_video) for is_video in (False, True))  # by content, not known here
    if row.prompt_sha1 is not None and row.prompt_sha1 not in map(prompt_sha1, prompts):
        raise UsageError(f"{item.id!r} was captioned with another prompt: use another --out, or --overwrite")
