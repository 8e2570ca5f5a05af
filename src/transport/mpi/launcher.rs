//! Catches the launcher's commonest fault: N jobs of one rank instead of one job of N ranks.

use crate::{ErrorKind, Result};

/// Variables that hold the number of ranks that the launcher started, and its cure. Not SLURM_NTASKS: a plain batch script has it.
const SIZES: [(&str, &str); 3] = [
    (
        "SLURM_STEP_NUM_TASKS",
        "srun and this MPI don't speak the same protocol; start with `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH); \
         `srun --mpi=list` shows what there is",
    ),
    (
        "PMI_SIZE",
        "this program is linked to another MPI than its launcher's; start it with the mpirun of the MPI it was built with, \
         or build it with MPICC set to the compiler wrapper of the launcher's MPI",
    ),
    (
        "OMPI_COMM_WORLD_SIZE",
        "this program is linked to another MPI than Open MPI; start it with the mpirun of the MPI it was built with, \
         or build it with MPICC=mpicc of Open MPI",
    ),
];

/// Compares MPI_COMM_WORLD's size with what the launcher says. Local.
///
/// # Errors
/// [`ErrorKind::Launcher`] if this process is alone and the launcher started several.
pub(super) fn check(world_size: u32, lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    if world_size != 1 {
        return Ok(());
    }
    for (variable, cure) in SIZES {
        if let Some(value) = lookup(variable).filter(|value| value.trim().parse::<u64>().is_ok_and(|size| size > 1)) {
            return Err(ErrorKind::Launcher {
                size: world_size,
                variable: variable.into(),
                value,
                cure: cure.into(),
            }
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(size: u32, variables: &[(&str, &str)]) -> Result<()> {
        check(size, |name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn alone_beside_others_is_an_error() {
        for (variable, needle) in [
            ("SLURM_STEP_NUM_TASKS", "--mpi=pmi2"),
            ("PMI_SIZE", "mpirun"),
            ("OMPI_COMM_WORLD_SIZE", "mpirun"),
        ] {
            let error = with(1, &[(variable, "4")]).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Launcher { size: 1, value, .. } if value == "4"));
            assert!(
                error.to_string().contains(variable) && error.to_string().contains(needle),
                "{error}"
            );
        }
    }

    #[test]
    fn right_sizes_and_batch_scripts_pass() {
        with(1, &[]).unwrap();
        with(1, &[("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "1"), ("PMI_SIZE", "1")]).unwrap();
        with(4, &[("SLURM_STEP_NUM_TASKS", "4")]).unwrap();
        // A sub-set of a step: the host's MPI decides.
        with(2, &[("SLURM_STEP_NUM_TASKS", "4")]).unwrap();
        with(1, &[("PMI_SIZE", "many")]).unwrap();
    }
}
