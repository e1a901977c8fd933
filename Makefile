# make smoke: train a real model end to end.   make test: every test.   Both install what they need into .venv.
PYTHON ?= python3
REQUIREMENTS ?= $(if $(shell command -v nvidia-smi),requirements-gpu.txt,requirements-cpu.txt)
MODEL := models/SmolLM2-135M-Instruct

.PHONY: smoke test
smoke: .venv/ready $(MODEL)
	.venv/bin/torchrun train.py configs/smollm_cpu.py output_dir=runs/smoke

test: .venv/ready $(MODEL)
	.venv/bin/python -m pytest -q -n 2 --no-loadscope-reorder tests

.venv/ready: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -r $(REQUIREMENTS)
	$(if $(findstring cpu,$(REQUIREMENTS)),.venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # CUDA builds)
	touch $@

$(MODEL): | .venv/ready
	.venv/bin/python small_model.py $@
