# make demo    trains a network on handwritten digits over 4 ranks
# make test    checks everything, under each MPI there is
# make sim     random programs over simulated ranks; sim-mutants: does it find faults? sim-scale: what costs what on many ranks
# make cuda-check   on a machine with a GPU: the tests of the feature `cuda` on it, and what it measures (scripts/cuda-check --pack for one without cargo)
# make slurm-test  submits the scripts of slurm/ to a Slurm on this machine
# make setup   installs what is missing (Debian, Ubuntu), or says how
# make lint    formatting and clippy
# make doc     the documentation, in target/doc
# make bench   measures, and writes bench/*.json
# make soak    trains for ten minutes while ranks are killed, and compares the history (SOAK_SECONDS=N for more or less)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: cuda-check demo test slurm-test sim sim-mutants sim-scale setup lint doc bench soak

# Both MPIs may be installed: the build and the launcher must mean the same one.
CHOOSE := source scripts/mpi; export MPI=$$(mpi_kinds | head -n 1) OPENBLAS_NUM_THREADS=1; export MPICC=$$(mpi_tool mpicc $$MPI);

demo:
	@scripts/setup --quiet
	@$(CHOOSE) cargo build --release --example digits && scripts/mpirun -n 4 $${CARGO_TARGET_DIR:-target}/release/examples/digits $$([[ -t 2 ]] && echo --progress bar)

test:
	@scripts/setup --quiet --tests
	@scripts/test

# FILTER=NAME for some of them.
slurm-test:
	@scripts/setup --quiet --tests
	@scripts/slurm/test $(FILTER)

# SEEDS=N for more or fewer, SEED=S for one of them and all that happens in it.
SEEDS ?= 100000
sim:
	@$(CHOOSE) cargo run --quiet --release --features sim --example sim -- $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

sim-mutants:
	@$(CHOOSE) cargo run --quiet --release --features sim --example sim -- --mutants --seeds 10000

sim-scale:
	@$(CHOOSE) cargo run --quiet --release --features sim --example scale_sim -- $(ARGS)

setup:
	@scripts/setup --tests

lint:
	@$(CHOOSE) cargo fmt --check && cargo clippy --all-targets --features sim -- -D warnings

bench:
	@$(CHOOSE) cargo bench --bench step --bench transfer --bench scale --bench kernels --bench checkpoint

SOAK_SECONDS ?= 600
soak:
	@$(CHOOSE) cargo build --release --example soak && SOAK=$${CARGO_TARGET_DIR:-target}/release/examples/soak scripts/soak $(SOAK_SECONDS)

doc:
	@$(CHOOSE) RUSTDOCFLAGS="-D warnings" cargo doc --no-deps

cuda-check:
	@scripts/cuda-check
