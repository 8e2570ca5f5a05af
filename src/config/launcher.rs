//! What launchers tell a process in its environment before MPI is up.

/// Variables that hold the number of this rank.
const RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

/// Variables that hold this rank's place among those of its node.
const LOCAL_RANKS: [&str; 5] = [
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
];

/// The variable of this name in the environment of this process.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Which of several ranks this process is. Local.
pub(crate) fn rank(lookup: impl Fn(&str) -> Option<String>) -> Option<String> {
    RANKS.iter().find_map(|name| lookup(name))
}

/// This process's place among the ranks of its node. Local.
pub(crate) fn local_rank(lookup: impl Fn(&str) -> Option<String>) -> Option<u32> {
    LOCAL_RANKS.iter().find_map(|name| lookup(name)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_and_its_place_are_what_the_launcher_says() {
        let slurm = |name: &str| match name {
            "SLURM_PROCID" => Some("6".to_owned()),
            "SLURM_LOCALID" => Some("2".to_owned()),
            _ => None,
        };
        assert_eq!((rank(slurm).as_deref(), local_rank(slurm)), (Some("6"), Some(2)));
        let beside = |name: &str| match name {
            "OMPI_COMM_WORLD_LOCAL_RANK" => Some("what?".to_owned()),
            other => slurm(other),
        };
        assert_eq!(local_rank(beside), Some(2), "what is no number is passed over");
        assert_eq!((rank(|_| None), local_rank(|_| None)), (None, None));
    }
}
