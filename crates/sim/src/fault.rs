//! The kinds of faults, and how often each has struck.
//!
//! Invariant: a counted fault has struck something. A partition that no message met is not counted.

use crate::network::HostId;
use crate::world::{MICROS, MILLIS, Nanos};
use std::cell::{Cell, RefCell};

/// Kind of a fault that the simulator injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Fault {
    /// A message is lost. May delay operations. Does not occur on a reliable carrier.
    Loss,
    /// A message arrives twice, and the copy arrives later. Must have no effect, since requests run at most once.
    Duplicate,
    /// A message arrives after later messages. May delay operations.
    Reorder,
    /// A message and all later messages are delayed. May delay operations and let timeouts expire.
    Delay,
    /// A connection breaks: some of the requests sent over the connection ran, and some did not. May end a session.
    Reset,
    /// No message passes between two hosts, in either direction. May end sessions by timeout.
    Partition,
    /// Messages pass between two hosts in one direction only. May end sessions by timeout.
    OneWayPartition,
    /// A client's process dies between any two of its accesses or messages. Its last operation may or may not have been
    /// carried out. Buffers may stay leaked until a scan finds them.
    ClientDeath,
    /// A client's process is stopped (SIGSTOP) and resumed later. May delay operations that wait for the process's turn
    /// to end.
    ClientPause,
    /// The node's process is stopped and resumed later. May delay all operations that need the node's process.
    NodePause,
    /// The node's process dies, but its memory survives (a memory file), and another process takes over at the same
    /// address. May end all sessions. The effects of completed operations survive.
    NodeRestart,
    /// The node's process dies with its memory, and a new process starts at the same address. All data is lost. A
    /// client must not mistake the new, empty store for the old store: a client that opens the new store knows that
    /// the store is new. If the store has a log, the new process creates the store again from its log, with all that
    /// was acknowledged; what was not synced to the disk may be lost or torn.
    NodeLoss,
    /// A client's clock runs slow or fast, so that its timeouts may be too long or too short.
    ClockSkew,
    /// A client's clock jumps ahead. May let its timeouts expire.
    ClockJump,
    /// The store has no free buffer. Puts fail with an error which says that nothing was stored.
    Exhaustion,
    /// A store is dropped while its clients work, and created again. All requests with the old key are refused.
    Revocation,
    /// The disk of a store's log is full for a while. Puts and deletes fail with an error which says that nothing was
    /// done. What was acknowledged before is not lost.
    DiskFull,
    /// The disk of a store's log fails to sync for a while. Puts and deletes fail until the node is started again.
    /// Those that waited for the disk may or may not be stored.
    SyncFailure,
    /// The node's machine crashes and is started anew, with the memory file and the disk of the logs. The new process
    /// finds the memory of another boot, in which pages may be missing, and replays the log. What was not synced to the
    /// disk may be lost or torn.
    MachineCrash,
}

impl Fault {
    /// All kinds of faults.
    pub const ALL: [Fault; 19] = [
        Fault::Loss,
        Fault::Duplicate,
        Fault::Reorder,
        Fault::Delay,
        Fault::Reset,
        Fault::Partition,
        Fault::OneWayPartition,
        Fault::ClientDeath,
        Fault::ClientPause,
        Fault::NodePause,
        Fault::NodeRestart,
        Fault::NodeLoss,
        Fault::ClockSkew,
        Fault::ClockJump,
        Fault::Exhaustion,
        Fault::Revocation,
        Fault::DiskFull,
        Fault::SyncFailure,
        Fault::MachineCrash,
    ];

    /// Whether the fault strikes only stores with logs.
    pub const fn is_of_logs(self) -> bool {
        matches!(self, Fault::DiskFull | Fault::SyncFailure | Fault::MachineCrash)
    }

    /// Whether the fault strikes single messages.
    pub const fn is_of_messages(self) -> bool {
        matches!(self, Fault::Loss | Fault::Duplicate | Fault::Reorder | Fault::Delay | Fault::Reset)
    }

    /// Name of the fault in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Fault::Loss => "loss",
            Fault::Duplicate => "duplicate",
            Fault::Reorder => "reorder",
            Fault::Delay => "delay",
            Fault::Reset => "reset",
            Fault::Partition => "partition",
            Fault::OneWayPartition => "one-way",
            Fault::ClientDeath => "client-death",
            Fault::ClientPause => "client-pause",
            Fault::NodePause => "node-pause",
            Fault::NodeRestart => "node-restart",
            Fault::NodeLoss => "node-loss",
            Fault::ClockSkew => "clock-skew",
            Fault::ClockJump => "clock-jump",
            Fault::Exhaustion => "exhaustion",
            Fault::Revocation => "revocation",
            Fault::DiskFull => "disk-full",
            Fault::SyncFailure => "sync-failure",
            Fault::MachineCrash => "machine-crash",
        }
    }

    /// Returns the fault with this name.
    pub fn named(name: &str) -> Option<Fault> {
        Fault::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// Part of the simulation that a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A message between these two hosts.
    Session(HostId, HostId),
    /// The client with this number.
    Client(u32),
    /// The node with this number, and all its clients.
    Node(u32),
    /// No target is named: the code that counts the fault attributes the fault itself.
    None,
}

/// Callback that receives every fault.
type Observer = Box<dyn Fn(Fault, Target)>;

/// Number of times that each fault has struck.
#[derive(Default)]
pub struct Struck {
    counts: [Cell<u64>; Fault::ALL.len()],
    observer: RefCell<Option<Observer>>,
}

impl Struck {
    /// Counts a fault that strikes `target`, and reports the fault to the observer.
    pub fn count(&self, fault: Fault, target: Target) {
        let count = &self.counts[fault as usize];
        count.set(count.get() + 1);
        if let Some(observer) = &*self.observer.borrow() {
            observer(fault, target);
        }
    }

    /// Calls `observer` with every later fault, before the fault takes effect.
    pub fn observe(&self, observer: impl Fn(Fault, Target) + 'static) {
        *self.observer.borrow_mut() = Some(Box::new(observer));
    }

    /// Number of times that `fault` has struck.
    pub fn of(&self, fault: Fault) -> u64 {
        self.counts[fault as usize].get()
    }
}

/// Fault rates of messages. A fault strikes one in this many messages, or none if the rate is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRates {
    /// Rate of [`Fault::Loss`]: one in this many messages; 0 for none.
    pub loss_one_in: u64,
    /// Rate of [`Fault::Duplicate`]: one in this many messages; 0 for none.
    pub duplicate_one_in: u64,
    /// Rate of [`Fault::Reorder`]: one in this many messages; 0 for none.
    pub reorder_one_in: u64,
    /// Rate of [`Fault::Delay`]: one in this many messages; 0 for none.
    pub delay_one_in: u64,
    /// Rate of [`Fault::Reset`]: one in this many messages; 0 for none.
    pub reset_one_in: u64,
    /// Usual delay, in nanoseconds, of a message that a fault delays.
    pub late_ns: Nanos,
}

impl FaultRates {
    /// Rates at which no fault strikes.
    pub const NONE: FaultRates = FaultRates {
        loss_one_in: 0,
        duplicate_one_in: 0,
        reorder_one_in: 0,
        delay_one_in: 0,
        reset_one_in: 0,
        late_ns: 0,
    };
    /// Rates at which every fault strikes, but rarely.
    pub const TYPICAL: FaultRates = FaultRates {
        loss_one_in: 40,
        duplicate_one_in: 30,
        reorder_one_in: 20,
        delay_one_in: 60,
        reset_one_in: 1500,
        late_ns: MILLIS / 4,
    };
}

impl FaultRates {
    /// Returns these rates, except that `fault` strikes every message.
    ///
    /// # Panics
    /// If `fault` does not strike messages.
    pub fn with(self, fault: Fault) -> FaultRates {
        match fault {
            Fault::Loss => FaultRates { loss_one_in: 1, ..self },
            Fault::Duplicate => FaultRates { duplicate_one_in: 1, ..self },
            Fault::Reorder => FaultRates { reorder_one_in: 1, ..self },
            Fault::Delay => FaultRates { delay_one_in: 1, ..self },
            Fault::Reset => FaultRates { reset_one_in: 1, ..self },
            _ => panic!("{fault:?} does not strike messages"),
        }
    }
}

/// Minimum and maximum usual length of a partition or a pause, in nanoseconds.
pub const OUTAGE: [Nanos; 2] = [200 * MICROS, 30 * MILLIS];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_a_unique_index_and_name() {
        for (index, fault) in Fault::ALL.into_iter().enumerate() {
            assert_eq!(fault as usize, index);
            assert_eq!(Fault::named(fault.name()), Some(fault));
        }
    }
}
