//! What the gradients of values that leave a rank will reach on other ranks, found out as they leave.
//!
//! Values that came from another rank bring along the boundaries that their own gradients reach there and beyond, all of them or nothing. So a short walk over
//! this rank's graph gives the same for values that leave, and a backward over ranks needs no round of its own to find out who takes part.

use smallvec::SmallVec;

use crate::tensor::graph::{Edge, Kind, Node};

/// Most boundaries that travel with a value, and most nodes that are looked at: beyond them a backward asks instead.
const LONGEST: usize = 24;
const NODES: usize = 256;

#[cfg(any(test, feature = "sim"))]
thread_local! {
    /// Fewer boundaries on this thread, for tests of what happens beyond.
    static LIMIT: std::cell::Cell<usize> = const { std::cell::Cell::new(LONGEST) };
}

/// Sets the most boundaries that travel with a value that leaves on this thread.
#[cfg(any(test, feature = "sim"))]
pub(crate) fn limit(boundaries: usize) {
    LIMIT.set(boundaries.min(LONGEST));
}

fn longest() -> usize {
    #[cfg(any(test, feature = "sim"))]
    return LIMIT.get();
    #[cfg(not(any(test, feature = "sim")))]
    LONGEST
}

fn targets(edges: &[Option<Edge>]) -> impl Iterator<Item = &Node> {
    edges.iter().flatten().map(|edge| &*edge.node)
}

/// The ids of all boundaries, on any rank, that gradients of these edges reach, ascending; `None` if they are many, or unknown.
pub(crate) fn reach(edges: &[Option<Edge>]) -> Option<Vec<u64>> {
    // So few that a search from end to end finds them.
    let mut seen: SmallVec<[u64; 16]> = SmallVec::new();
    let mut nodes: SmallVec<[&Node; 16]> = targets(edges).collect();
    let mut boundaries = Vec::new();
    while let Some(node) = nodes.pop() {
        if seen.contains(&node.id()) {
            continue;
        }
        if seen.len() == NODES {
            return None;
        }
        seen.push(node.id());
        match node.kind() {
            Kind::Leaf(_) => {}
            Kind::Boundary { id, beyond } => {
                boundaries.push(*id);
                boundaries.extend_from_slice(beyond.as_deref()?);
                if boundaries.len() > LONGEST * LONGEST {
                    return None;
                }
            }
            Kind::Op { .. } => nodes.extend(targets(node.inputs())),
        }
    }
    boundaries.sort_unstable();
    boundaries.dedup();
    (boundaries.len() <= longest()).then_some(boundaries)
}
