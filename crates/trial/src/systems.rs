//! The systems that can be tried, a line each.

use crate::family::Family;
use crate::kv::Kv;
use crate::registers::{self, RegistersKind};
use crate::{Report, Setup, events};
use farside_fabrics::mutants as sessions;
use farside_node::mutants as lives;
use farside_remote::mutant::Mutant;
use farside_remote::mutants as chains;
use farside_remote::service::Kind;
use farside_sim::memory::Replay;
use farside_systems::kv::pilaf::service::PilafKind;
use farside_systems::kv::prism_kv::service::PrismKvKind;
use farside_systems::kv::{pilaf, prism_kv};
use std::fmt;

/// A system that can be tried.
#[derive(Clone, Copy)]
pub struct System(&'static Entry);

struct Entry {
    name: &'static str,
    /// Its own broken variants.
    mutants: &'static [Mutant],
    /// Those of them that hardly occur or show by chance: the tests of single steps find them.
    rare: &'static [Mutant],
    /// Broken variants of what it stands on, which its trials find.
    below: &'static [Mutant],
    run: fn(&Setup, u64, Option<events::Lines>) -> Report,
}

const fn entry<F: Family>(name: &'static str, mutants: &'static [Mutant]) -> Entry {
    Entry { name, mutants, rare: &[], below: &[], run: crate::run_family::<F> }
}

static ALL: [Entry; 3] = [
    Entry {
        // One takes a path whose every slot is taken, the other a death between two exchanges and then a put of that
        // very key.
        rare: &[prism_kv::mutants::END_SLOT_STAYS, prism_kv::mutants::MOVED_TWICE],
        below: &[lives::OLD_TABLE_FREED_AT_ONCE],
        ..entry::<Kv>(prism_kv::KIND, prism_kv::mutants::ALL)
    },
    entry::<Kv>(pilaf::KIND, pilaf::mutants::ALL),
    // The node's own tests find two that no client meets by chance: DROP_WITHOUT_TAKING_LISTS takes retired buffers of
    // two stores in one session, REUSE_WHILE_ADOPTING a death right after a reuse within a scan.
    Entry {
        below: &[
            chains::UNUSED_RESERVATION_IS_KEPT,
            chains::SKIPPED_COUNTS_AS_SUCCESS,
            chains::LITTLE_ENDIAN_COMPARE,
            chains::SCRATCH_IS_NOT_ZEROED,
            chains::SHARED_SCRATCH,
            chains::NO_CLAMP,
            chains::POINTEE_IS_NOT_CHECKED,
            chains::RETIRE_WHAT_IS_NOT_LIVE,
            lives::REPOST_AT_ONCE,
            lives::SCAN_BY_REACHABILITY_ALONE,
            lives::SWEEP_WITHOUT_GRACE,
            sessions::DUPLICATE_RUNS_AGAIN,
            sessions::OLD_SESSION_LIVES,
        ],
        ..entry::<registers::Trial>(registers::KIND, &[])
    },
];

/// The nodes' halves of all of them.
pub(crate) fn kinds() -> Vec<Box<dyn Kind<Replay>>> {
    vec![Box::new(PrismKvKind), Box::new(PilafKind), Box::new(RegistersKind)]
}

impl System {
    /// All of them.
    pub fn all() -> impl Iterator<Item = System> {
        ALL.iter().map(System)
    }

    /// The system of that name.
    pub fn named(name: &str) -> Option<System> {
        System::all().find(|system| system.name() == name)
    }

    /// Its name in flags and reports.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// The broken variants that its trials are to find.
    pub fn mutants(self) -> Vec<Mutant> {
        let Entry { mutants, rare, below, .. } = self.0;
        mutants.iter().filter(|mutant| !rare.contains(mutant)).chain(*below).copied().collect()
    }

    pub(crate) fn run(self, setup: &Setup, seed: u64, events: Option<events::Lines>) -> Report {
        (self.0.run)(setup, seed, events)
    }
}

impl PartialEq for System {
    fn eq(&self, other: &System) -> bool {
        self.name() == other.name()
    }
}

impl fmt::Debug for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
