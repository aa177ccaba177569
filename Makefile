# `make train` and `make test` do all of their own set-up.
.PHONY: train pretrained models test test-unit test-e2e test-all test-heavy test-soak check dist docs clean

# `make train FLEET=ray` plays the rollouts on two nodes.
train:
	scripts/setup $(if $(FLEET),fleet,train)
	.venv/bin/repl-rl train --overwrite $(if $(FLEET),--workers $(FLEET) --workers.max-workers 2)

# A real pretrained model: half an hour or more without a GPU.
pretrained:
	scripts/setup pretrained
	scripts/pretrained

# The table of docs/models.md: every family on every engine, half an hour.
models:
	scripts/setup test
	.venv/bin/python -m benchmarks.models.families

# Unit and integration tests.
test:
	scripts/setup test
	scripts/suite "not heavy and not soak" -n auto --maxprocesses 4 --dist loadfile tests/unit tests/integration

# No process, engine, kernel or network.
test-unit:
	scripts/setup test
	scripts/suite "not heavy and not soak" -n auto --maxprocesses 4 --dist loadfile tests/unit

# Whole commands, training runs, vLLM, Ray, Docker, browsers.
test-e2e:
	scripts/setup test
	scripts/suite --retry "not heavy and not soak" -n auto --maxprocesses 4 --dist loadfile tests/e2e

test-all: test test-e2e

# SHARD=0/3 runs the first third of them.
test-heavy:
	scripts/setup test
	scripts/suite --retry "heavy and not alone" -n 2 --dist loadfile $(if $(SHARD),--shard $(SHARD))
	scripts/suite --retry alone $(if $(SHARD),--shard $(SHARD))

test-soak:
	scripts/setup test
	.venv/bin/python -m pytest -m soak

check:
	scripts/setup test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python scripts/words.py
	.venv/bin/python -m pytest tests/unit/test_architecture.py

# Wheel and sdist, from a checkout or a clean clone.
dist:
	scripts/setup test
	rm -rf dist
	.venv/bin/python -m build
	.venv/bin/python -m twine check --strict dist/*

# The site: a browser opens site/index.html as it is, without a server or a network.
docs:
	scripts/setup docs
	.venv/bin/python -m mkdocs build
	.venv/bin/python -m scripts.site.links site

clean:
	rm -rf .venv dist site .mypy_cache .ruff_cache .hypothesis
