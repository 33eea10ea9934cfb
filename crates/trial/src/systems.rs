//! Systems that trials can run: the registered systems whose family has a file here, `btree`, which is a structure on
//! latched objects, and `registers`, which exists only for trials.

use crate::blocks::Blocks;
use crate::btree;
use crate::family::Family as _;
use crate::flight::{Phases, Tracked};
use crate::guarded::Guarded;
use crate::index::{Indexed, Opened};
use crate::kv::Kv;
use crate::latch::Latch;
use crate::queue::Queue;
use crate::registers::{self, RegistersKind};
use crate::txn::Txns;
use crate::{Carrier, Report, Setup, events};
use farside_fabrics::mutants as sessions;
use farside_node::log::mutants as logs;
use farside_node::mutants as lives;
use farside_remote::Capabilities;
use farside_remote::mutant::Mutant;
use farside_remote::mutants as chains;
use farside_remote::service::Kind;
use farside_sim::memory::Replay;
use farside_systems::guarded;
use farside_systems::kv::chequer;
use farside_systems::latch::btree::mutants as btrees;
use farside_systems::latch::{self, Scheme};
use farside_systems::members::REPLICAS_MAX;
use farside_systems::registry::{self, AnyIndex, Registered};
use farside_systems::system::{Family, Nodes};
use std::fmt;

/// A system that trials can run.
#[derive(Clone, Copy)]
pub struct System {
    name: &'static str,
    /// Kind of its stores in the catalog.
    kind: &'static str,
    nodes: Nodes,
    needs: Capabilities,
    schemes: &'static [(&'static str, Scheme)],
    /// The system's own mutants. `rare` lists the mutants that trials expose too rarely; tests of single steps detect
    /// these.
    mutants: &'static [Mutant],
    rare: &'static [Mutant],
    phases: fn(System) -> &'static Phases,
    run: Run,
}

/// The registered systems that are indexes.
type Indexes = Indexed<AnyIndex<Tracked>>;

type Run = fn(&Setup, u64, Option<events::Lines>) -> Report;

/// Mutants of the layers below the systems. Each mutant is listed under the system whose trials expose it.
///
/// Further mutants are not listed, because no client exposes them by chance; tests of the node and of the lists do.
/// DROP_WITHOUT_TAKING_LISTS needs retired buffers of two stores in one session. REUSE_WHILE_ADOPTING needs a death
/// right after a reuse within a scan, and REUSE_DURING_SCAN a client that holds a buffer through a scan.
/// TAKEN_LIST_IS_KEPT needs a session that is stopped between two exchanges. REUSED_AT_ONCE, REUSED_AN_EPOCH_EARLY and
/// EPOCH_IGNORES_TURNS need a chain that is running while another client makes two puts.
const BELOW: [(&str, &[Mutant]); 4] = [
    (
        guarded::KIND,
        &[
            lives::FENCE_MISSES_AN_ENGINE,
            lives::FENCE_WITHOUT_GRACE,
            lives::FENCED_NONCE_BINDS,
            sessions::FENCED_READ_TOO_EARLY,
        ],
    ),
    (
        chequer::KIND,
        &[logs::LOG_BELIEVES_CRASHED_MEMORY, logs::LOG_NEVER_SYNCS, logs::LOG_CHECKPOINT_UNSYNCED],
    ),
    ("prism-kv", &[lives::OLD_TABLE_FREED_AT_ONCE, chains::LOSER_KEEPS_BUFFER]),
    (
        registers::KIND,
        &[
            chains::UNUSED_RESERVATION_IS_KEPT,
            chains::SKIPPED_COUNTS_AS_SUCCESS,
            chains::LITTLE_ENDIAN_COMPARE,
            chains::SCRATCH_IS_NOT_ZEROED,
            chains::SHARED_SCRATCH,
            chains::NO_CLAMP,
            chains::POINTEE_IS_NOT_CHECKED,
            chains::LOSER_KEEPS_BUFFER,
            chains::WINNER_LOSES_BUFFER,
            chains::RECLAIMED_WITHOUT_GRACE,
            lives::REPOST_AT_ONCE,
            lives::SCAN_BY_REACHABILITY_ALONE,
            sessions::DUPLICATE_RUNS_AGAIN,
            sessions::OLD_SESSION_LIVES,
        ],
    ),
];

/// Node-side halves of all systems.
pub(crate) fn kinds() -> Vec<Box<dyn Kind<Replay>>> {
    let mut kinds = registry::all_kinds();
    kinds.push(Box::new(RegistersKind));
    kinds
}

impl System {
    /// All systems that trials can run.
    pub fn all() -> impl Iterator<Item = System> {
        let run = crate::run_family::<registers::Trial>;
        let needs = Capabilities::CONDITIONAL_OPS.and(Capabilities::MASKED_CAS);
        let registers = System {
            name: registers::KIND,
            kind: registers::KIND,
            nodes: Nodes::One,
            needs,
            schemes: &[],
            mutants: &[],
            rare: &[],
            phases: registers::Trial::phases,
            run,
        };
        let btree = System {
            name: btree::NAME,
            kind: latch::KIND,
            nodes: Nodes::One,
            needs: Capabilities::NONE,
            schemes: &Scheme::ALL,
            mutants: btrees::ALL,
            rare: &[],
            phases: btree::Trial::phases,
            run: crate::run_family::<btree::Trial>,
        };
        registry::ALL.iter().filter_map(System::registered).chain([btree, registers])
    }

    /// Returns a registered system, or `None` if its family has no trials.
    fn registered(system: &Registered) -> Option<System> {
        let Registered { kind: name, nodes, needs, mutants, rare_mutants: rare, .. } = *system;
        let (phases, run): (fn(System) -> &'static Phases, Run) = match system.family {
            Family::Kv => (Kv::phases, crate::run_family::<Kv>),
            Family::Queue => (Queue::phases, crate::run_family::<Queue>),
            Family::Objects => (Guarded::phases, crate::run_family::<Guarded>),
            Family::Blocks => (Blocks::phases, crate::run_family::<Blocks>),
            Family::Latched => (Latch::phases, crate::run_family::<Latch>),
            Family::Index => (Indexes::phases, crate::run_family::<Indexes>),
            Family::Txn => (Txns::phases, crate::run_family::<Txns>),
            Family::Calls | Family::Memory => return None,
        };
        let schemes = if system.family == Family::Latched { &Scheme::ALL[..] } else { &[] };
        Some(System { name, kind: name, nodes, needs, schemes, mutants, rare, phases, run })
    }

    /// Returns a system whose stores stand in for an index, with clients of the type `C`.
    pub(crate) fn in_place_of_an_index<C: Opened>(
        name: &'static str,
        kind: &'static str,
        (nodes, needs): (Nodes, Capabilities),
        schemes: &'static [(&'static str, Scheme)],
        mutants: &'static [Mutant],
    ) -> System {
        let (phases, run) = (Indexed::<C>::phases, crate::run_family::<Indexed<C>>);
        System { name, kind, nodes, needs, schemes, mutants, rare: &[], phases, run }
    }

    /// Returns the system with this name, if trials can run it.
    pub fn named(name: &str) -> Option<System> {
        System::all().find(|system| system.name == name)
    }

    /// Name of the system in flags and reports.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Kind of the system's stores in the catalog.
    pub(crate) fn kind(self) -> &'static str {
        self.kind
    }

    /// Phases of the system's protocol.
    pub fn phases(self) -> &'static Phases {
        (self.phases)(self)
    }

    /// Capabilities of a carrier that the system needs.
    pub fn needs(self) -> Capabilities {
        self.needs
    }

    /// Carriers that have the capabilities which the system needs.
    ///
    /// A client of several replicas drops the requests that it no longer needs. A real CPU completes a chain that it
    /// has begun before its task can drop anything. A simulated one would leave the chain unfinished.
    ///
    /// Schemes rely on the order and the atomicity of a NIC's verbs.
    pub fn carriers(self) -> Vec<Carrier> {
        let completes = |carrier: Carrier| self.nodes != Nodes::Replicas || carrier != Carrier::Direct;
        let is_ordered = |carrier: Carrier| self.schemes.is_empty() || carrier == Carrier::Verbs;
        let can_carry = |carrier: &Carrier| {
            carrier.capabilities().contains(self.needs) && completes(*carrier) && is_ordered(*carrier)
        };
        Carrier::ALL.into_iter().filter(can_carry).collect()
    }

    /// Largest number of replicas of a store, which is odd; `None` if stores of the system have no replicas.
    pub fn replicas_max(self) -> Option<u32> {
        (self.nodes == Nodes::Replicas).then_some(REPLICAS_MAX as u32)
    }

    /// Schemes by which clients of the system can synchronize, with their names; empty for most systems.
    pub fn schemes(self) -> &'static [(&'static str, Scheme)] {
        self.schemes
    }

    /// Mutants that the system's trials must expose.
    pub fn mutants(self) -> Vec<Mutant> {
        let below = BELOW.iter().find(|(name, _)| *name == self.name).map_or(&[][..], |(_, below)| below);
        let own = self.mutants.iter().filter(|mutant| !self.rare.contains(mutant));
        own.chain(below).copied().collect()
    }

    pub(crate) fn run(self, setup: &Setup, seed: u64, events: Option<events::Lines>) -> Report {
        (self.run)(setup, seed, events)
    }
}

impl PartialEq for System {
    fn eq(&self, other: &System) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
