//! What launchers tell a process in its environment before MPI is up.

/// Variables that hold the number of this rank.
const RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

/// Variables that hold the number of ranks, in the order of [`RANKS`]. Not SLURM_NTASKS: a plain batch script has it.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// Variables that hold the number of ranks of this node.
const LOCAL_SIZES: [&str; 3] = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"];

/// Variables that are the same on all ranks of a start, and together differ from those of any other.
const JOB: [&str; 8] = [
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_SRUN_COMM_PORT",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "PMI_PORT",
];

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

/// How many ranks were started with this one. Local.
pub(crate) fn size(lookup: impl Fn(&str) -> Option<String>) -> Option<u32> {
    SIZES.iter().find_map(|name| lookup(name)?.trim().parse().ok())
}

/// How many of them are on this node. Local.
pub(crate) fn local_size(lookup: impl Fn(&str) -> Option<String>) -> Option<u32> {
    let told = LOCAL_SIZES.iter().find_map(|name| lookup(name)?.trim().parse().ok());
    told.or_else(|| {
        let node: usize = lookup("SLURM_NODEID")?.trim().parse().ok()?;
        counts(&lookup("SLURM_STEP_TASKS_PER_NODE")?)?.get(node).copied()
    })
}

/// What tells this start from others, the same on all of its ranks. Local.
pub(crate) fn job(lookup: impl Fn(&str) -> Option<String>) -> String {
    JOB.map(|name| lookup(name).unwrap_or_default()).join("/")
}

/// The nodes of the ranks that srun started, in its order, and which of them is this one. Local.
pub(crate) fn nodes(lookup: impl Fn(&str) -> Option<String>) -> Option<(Vec<String>, usize)> {
    let node: usize = lookup("SLURM_NODEID")?.trim().parse().ok()?;
    let nodes = hosts(&lookup("SLURM_STEP_NODELIST")?)?;
    (node < nodes.len()).then_some((nodes, node))
}

/// More nodes, or more ranks on them, than Slurm can be meaning.
const MOST: usize = 1 << 20;

/// Slurm's list of numbers: `2(x3),1` is 2, 2, 2, 1.
fn counts(text: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for part in text.split(',') {
        let (count, times) = match part.strip_suffix(')') {
            Some(part) => part.split_once("(x")?,
            None => (part, "1"),
        };
        let (count, times): (u32, usize) = (count.trim().parse().ok()?, times.parse().ok()?);
        if times > MOST || counts.len() > MOST {
            return None;
        }
        counts.extend(std::iter::repeat_n(count, times));
    }
    Some(counts)
}

/// Slurm's list of hosts: `n[1-2,05]x,m` is n1x, n2x, n05x, m.
fn hosts(text: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, c) in text.char_indices().chain([(text.len(), ',')]) {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth == 0 => {
                hosts.extend(expand(text[start..at].trim())?);
                start = at + 1;
            }
            _ => {}
        }
        if hosts.len() > MOST {
            return None;
        }
    }
    (depth == 0 && !hosts.is_empty()).then_some(hosts)
}

/// One name with ranges in brackets.
fn expand(name: &str) -> Option<Vec<String>> {
    let Some((head, rest)) = name.split_once('[') else {
        return (!name.is_empty()).then(|| vec![name.to_owned()]);
    };
    let (ranges, tail) = rest.split_once(']')?;
    let tails = match tail {
        "" => vec![String::new()],
        tail => expand(tail)?,
    };
    let mut names = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        if to < from || to - from > MOST as u64 {
            return None;
        }
        for number in from..=to {
            names.extend(
                tails
                    .iter()
                    .map(|tail| format!("{head}{number:0width$}{tail}", width = first.len())),
            );
        }
        if names.len() > MOST {
            return None;
        }
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_slurm_are_read() {
        let list = |text| hosts(text).map(|hosts| hosts.join(" "));
        assert_eq!(list("n1").as_deref(), Some("n1"));
        assert_eq!(list("n[1-2,05]x,m").as_deref(), Some("n1x n2x n05x m"));
        assert_eq!(list("r[1-2]n[08-10]").as_deref(), Some("r1n08 r1n09 r1n10 r2n08 r2n09 r2n10"));
        for wrong in ["", "n[1-2", "n[2-1]", "n[a]", "n[0-99999999999]", "a,,b"] {
            assert_eq!(list(wrong), None, "{wrong}");
        }
        assert_eq!(counts("2(x3),1"), Some(vec![2, 2, 2, 1]));
        assert_eq!((counts("2(x9999999)"), counts("x"), counts("2(3)")), (None, None, None));
    }

    #[test]
    fn a_start_is_known_by_its_launcher() {
        let slurm = |name: &str| match name {
            "SLURM_STEP_NUM_TASKS" => Some("3".to_owned()),
            "SLURM_STEP_TASKS_PER_NODE" => Some("2,1".to_owned()),
            "SLURM_STEP_NODELIST" => Some("n[1-2]".to_owned()),
            "SLURM_NODEID" => Some("1".to_owned()),
            "SLURM_JOB_ID" => Some("7".to_owned()),
            _ => None,
        };
        assert_eq!((size(slurm), local_size(slurm)), (Some(3), Some(1)));
        assert_eq!(nodes(slurm), Some((vec!["n1".to_owned(), "n2".to_owned()], 1)));
        let again = |name: &str| match name {
            "SLURM_RESTART_COUNT" => Some("1".to_owned()),
            other => slurm(other),
        };
        assert_ne!(job(slurm), job(again));
        assert_eq!((size(|_| None), local_size(|_| None), nodes(|_| None)), (None, None, None));
    }

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
