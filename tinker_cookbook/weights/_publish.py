"""Uploads an export to the Hugging Face Hub."""

from __future__ import annotations

import logging
from pathlib import Path

from tinker_cookbook.exceptions import WeightsError
from tinker_cookbook.weights._model_card import ModelCardConfig, generate_model_card
from tinker_cookbook.weights.proof import check_unchanged, read_proof

logger = logging.getLogger(__name__)

_CARD = "README.md"


def publish_to_hf_hub(
    *,
    model_path: str,
    repo_id: str,
    private: bool = True,
    token: str | None = None,
    model_card: ModelCardConfig | None = None,
    endpoint: str | None = None,
    unverified: bool = False,
) -> str:
    """Uploads a folder and returns the repository's URL; creates the repository if needed.

    Args:
        model_path: Folder of an export.
        repo_id: ``user/name``.
        private: Whether a new repository is private.
        token: Default: ``HF_TOKEN``, or the stored login.
        model_card: Whether to write ``README.md`` first if the folder has none.
        endpoint: URL of the Hub; default: ``HF_ENDPOINT``, or https://huggingface.co.
        unverified: Upload files that were changed after their comparison with the engine.

    Raises:
        FileNotFoundError: ``model_path`` is not a folder.
        WeightsError: The export disagrees with the engine according to ``proof.json``, its files
            are not those that were compared, or the upload fails.
    """
    path = Path(model_path).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"model_path: got {model_path}, expected the folder of an export")
    proof = read_proof(path)
    if proof is not None and not all(one.agrees for one in proof.comparisons):
        raise WeightsError(
            f"{path}: by its proof.json the export disagrees with the engine, so it is not "
            "published; export the checkpoint again"
        )
    if proof is not None and not unverified:
        if proof.files:
            check_unchanged(path, proof)
        else:
            logger.warning("%s: the proof is of an older version and has no hashes of files", path)
    if model_card is not None:
        if (path / _CARD).exists():
            logger.warning("%s exists and is kept; no card was generated", path / _CARD)
        else:
            card = generate_model_card(config=model_card, repo_id=repo_id, model_path=str(path))
            card.save(path / _CARD)
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repo_id=repo_id, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            folder_path=str(path),
            repo_id=repo_id,
            repo_type="model",
            # Files of an export that is being replaced, and of editors.
            ignore_patterns=[".*"],
            commit_message="Upload with tinker_cookbook",
        )
    except Exception as error:  # the HTTP client differs between versions of huggingface_hub
        # Only one line: the rest of the message is the HTTP response.
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise WeightsError(
            f"repo_id={repo_id}: the upload to {api.endpoint} failed: {line}. Check the name "
            "and the token (HF_TOKEN, or `hf auth login`), and run it again"
        ) from error
    return f"{api.endpoint.rstrip('/')}/{repo_id}"
