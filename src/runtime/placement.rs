//! Where the threads of a rank run: which cores the rank may use, whether one is spare, and what the service thread is bound to.
//!
//! [`decide`] is a pure function of what hwloc saw, the settings and the ranks on the node; the rest reads and binds. Nothing here
//! fails: a topology that makes no sense costs the placement, and a line in the log says so.
//!
//! The room of a rank is the smaller of the cores in its affinity mask and its even share of the node's cores. So ranks that are
//! bound to disjoint sets, to sockets, or not at all are each seen for what they are. The one case it gets wrong is a mask smaller
//! than the node that several ranks share by hand (`taskset mpirun --bind-to none`); there `RANKGRAD_PROGRESS=shared` and
//! `RANKGRAD_PIN=false` say so.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hwloc2::{CpuBindFlags, CpuSet, ObjectType, Topology, TopologyObject};

use crate::config::{Progress, Settings};

/// The ranks on this node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    /// How many there are, this one included.
    pub(crate) ranks: usize,
    /// This rank's place among them, from 0.
    pub(crate) index: usize,
}

/// What was decided for this rank.
#[derive(Debug)]
pub(crate) struct Placement {
    /// Whether the service thread may poll without ever sleeping.
    pub(crate) dedicated: bool,
    /// Whether each rank of the node has a core of its own.
    pub(crate) own_core: bool,
    /// For the service thread to call on itself, if it is to be bound.
    pub(crate) pin: Option<Pin>,
}

/// Reads the topology, decides, and logs what is worth a line. Local; blocks while hwloc reads the topology (some milliseconds).
///
/// To be called once, from the main thread. `size` is the number of ranks in the world.
pub(crate) fn place(settings: &Settings, size: usize, node: Node) -> Placement {
    let seen = quietly("reading the topology", || {
        let topology = Topology::new()?;
        let machine = read(&topology)?;
        Some((topology, machine))
    })
    .flatten();
    let Some((topology, machine)) = seen else {
        log::warn!("hwloc gives no usable topology: the service thread shares the rank's cores and isn't bound");
        return Placement {
            dedicated: false,
            own_core: false,
            pin: None,
        };
    };
    let plan = decide(&machine, settings, size, node);
    log::debug!("{machine}; {} ranks on the node; {plan:?}", node.ranks);
    if let Some(reason) = &plan.refusal {
        log::warn!("dedicated progress refused: {reason}");
    }
    if let Some(shortage) = &plan.shortage {
        // One line a node is enough.
        let level = if node.index == 0 { log::Level::Warn } else { log::Level::Debug };
        log::log!(level, "{shortage}");
    }
    let pin = plan.service.map(|units| Pin { topology, units });
    Placement {
        dedicated: plan.dedicated,
        own_core: plan.own_core,
        pin,
    }
}

/// What binds the service thread.
pub(crate) struct Pin {
    topology: Topology,
    units: Vec<u32>,
}

impl Pin {
    /// Binds the calling thread, or logs why it can't be bound. Local; blocks on nothing.
    pub(crate) fn bind(mut self) {
        let set: CpuSet = self.units.iter().copied().collect();
        match quietly("binding the service thread", || {
            self.topology.set_cpubind(set, CpuBindFlags::CPUBIND_THREAD)
        }) {
            Some(Ok(())) => log::debug!("service thread bound to processing units {:?}", self.units),
            Some(Err(error)) => log::info!("service thread not bound to processing units {:?}: {error:?}", self.units),
            None => {}
        }
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("units", &self.units).finish_non_exhaustive()
    }
}

/// What hwloc says of the node and of this rank's part of it.
#[derive(Debug, Clone, PartialEq)]
struct Machine {
    /// Cores of the node that this job may use.
    node_cores: usize,
    /// The cores in the rank's affinity mask: of each, its processing units in the mask, by the system's numbers.
    mask: Vec<Vec<u32>>,
    /// Processing unit that the main thread was last seen on.
    main: Option<u32>,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units: usize = self.mask.iter().map(Vec::len).sum();
        write!(
            f,
            "{} of the node's {} cores ({units} processing units) may be used",
            self.mask.len(),
            self.node_cores
        )
    }
}

/// What to do about it.
#[derive(Debug, Clone, PartialEq)]
struct Plan {
    dedicated: bool,
    own_core: bool,
    /// Processing units for the service thread.
    service: Option<Vec<u32>>,
    /// Why dedicated progress was asked for and isn't granted.
    refusal: Option<String>,
    /// That the rank has fewer cores than busy threads.
    shortage: Option<String>,
}

/// The decision; see the head of this file.
fn decide(machine: &Machine, settings: &Settings, size: usize, node: Node) -> Plan {
    let ranks = node.ranks.max(1);
    let whole_node = machine.mask.len() >= machine.node_cores;
    let room = machine.mask.len().min(machine.node_cores / ranks);
    let workers = settings.compute_threads.max(settings.blas_threads).max(1); // they work while the main thread waits, or are it
    let spare_core = room > workers;
    let dedicated = match settings.progress {
        Progress::Shared => false,
        Progress::Dedicated => room >= 2,
        Progress::Auto => spare_core && size > 1, // alone, there is nothing to listen for
    };
    let refusal = (settings.progress == Progress::Dedicated && !dedicated)
        .then(|| format!("it needs a second core for each rank, and {machine} by {ranks} ranks; bind 2 cores or more to each rank"));
    let busy = workers + usize::from(dedicated);
    let cores = machine.node_cores as f64 / ranks as f64;
    let cores = cores.min(machine.mask.len() as f64);
    let shortage = (cores < busy as f64)
        .then(|| format!("this rank has {cores:.2} cores for {busy} busy threads; start fewer ranks a node, or give each more cores"));
    // Among ranks that may all use the whole node, each takes a slice of its own; of a mask that isn't the whole node and may be shared
    // with others, no rank can tell which cores are free, so nothing is bound there.
    let own_mask = !whole_node && machine.mask.len() * ranks <= machine.node_cores;
    let first = if own_mask { 0 } else { node.index * room };
    let slice = if whole_node || own_mask {
        machine.mask.get(first..first + room).unwrap_or_default()
    } else {
        &[]
    };
    let free_of_main = |core: &&Vec<u32>| !machine.main.is_some_and(|main| core.contains(&main));
    let service = if settings.pin && slice.len() >= 2 {
        slice.iter().rev().find(free_of_main).cloned()
    } else {
        None
    };
    Plan {
        dedicated,
        own_core: room >= 1,
        service,
        refusal,
        shortage,
    }
}

/// What hwloc sees; `None` where it makes no sense.
fn read(topology: &Topology) -> Option<Machine> {
    let units = topology.objects_with_type(&ObjectType::PU).ok()?;
    let bound = topology.get_cpubind(CpuBindFlags::CPUBIND_THREAD);
    // A thread may run anywhere if hwloc can't say where. Only bits that the topology has are looked at: a set may be infinite.
    let may_run = |unit: u32| bound.as_ref().is_none_or(|set| set.is_set(unit));
    let last = topology.get_cpu_location(CpuBindFlags::CPUBIND_THREAD);
    let mut cores: BTreeMap<(bool, u32), Vec<u32>> = BTreeMap::new();
    for unit in &units {
        let number = unit.os_index();
        let core = core_of(unit).map_or((false, number), |core| (true, core.logical_index()));
        let allowed = cores.entry(core).or_default();
        if may_run(number) {
            allowed.push(number);
        }
    }
    let machine = Machine {
        node_cores: cores.len(),
        mask: cores.into_values().filter(|units| !units.is_empty()).collect(),
        main: last.and_then(|set| units.iter().map(|unit| unit.os_index()).find(|unit| set.is_set(*unit))),
    };
    (!machine.mask.is_empty()).then_some(machine)
}

/// The core that a processing unit is in; some virtual machines show none.
fn core_of(unit: &TopologyObject) -> Option<&TopologyObject> {
    std::iter::successors(unit.parent(), |object| object.parent()).find(|object| matches!(object.object_type(), ObjectType::Core))
}

/// Runs `work`; a panic of hwloc's binding (it unwraps what odd topologies lack) becomes a line in the log.
fn quietly<T>(what: &str, work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|panic| log::warn!("{what}: hwloc2 panicked: {}", text(&*panic)))
        .ok()
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests;
