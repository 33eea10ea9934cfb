//! What goes wrong, and how often it did.
//!
//! Invariant: a fault that is counted has struck something: a partition that no message met is none.

use crate::network::HostId;
use crate::world::{MICROS, MILLIS, Nanos};
use std::cell::{Cell, RefCell};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Fault {
    /// A message is lost. May cost time; on a reliable carrier it does not happen.
    Loss,
    /// A message arrives twice, the second time later. May change nothing: requests run at most once.
    Duplicate,
    /// A message is overtaken by later ones. May cost time.
    Reorder,
    /// A message, and all behind it, is late. May cost time, and end what waits for less.
    Delay,
    /// A connection breaks: of what was asked over it, some ran and some did not. May end a session.
    Reset,
    /// No message passes between two hosts, in either direction. May end sessions, after a while.
    Partition,
    /// Messages pass between two hosts in one direction alone. May end sessions, after a while.
    OneWayPartition,
    /// A client's process ends between any two of its accesses or messages. May leave its last operation done or not,
    /// and buffers that nobody holds until a scan has found them.
    ClientDeath,
    /// A client's process stands still (SIGSTOP), and goes on later. May delay what waits for its turn to end.
    ClientPause,
    /// The node's process stands still, and goes on later. May delay everything that it is needed for.
    NodePause,
    /// The node's process ends, its memory stays (a memory file), and another takes over at the same address. May end
    /// all sessions; nothing that was done is undone.
    NodeRestart,
    /// The node's process ends, its memory with it, and another begins anew at the same address. All is lost, and
    /// nobody may be told that a key that was stored never was: whoever asks the new store knows that it is new.
    NodeLoss,
    /// A client's clock runs slow or fast. May make it wait too long or too briefly.
    ClockSkew,
    /// A client's clock jumps ahead. May end what it waits for.
    ClockJump,
    /// The store has no buffer left. Puts fail, and say that nothing was stored.
    Exhaustion,
    /// A store is dropped while its clients are at work, and made anew. Everything that they ask by the old key is
    /// refused.
    Revocation,
}

impl Fault {
    /// All kinds.
    pub const ALL: [Fault; 16] = [
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
    ];

    /// Whether it strikes single messages.
    pub const fn is_of_messages(self) -> bool {
        matches!(self, Fault::Loss | Fault::Duplicate | Fault::Reorder | Fault::Delay | Fault::Reset)
    }

    /// As flags and reports name it.
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
        }
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Option<Fault> {
        Fault::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// Whom a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// A message between these hosts.
    Session(HostId, HostId),
    /// The client of that number.
    Client(u32),
    /// The node of that number, and everyone who uses it.
    Node(u32),
    /// Whoever counts it knows more than this.
    Nobody,
}

/// Hears of every fault that strikes.
type Observer = Box<dyn Fn(Fault, Whom)>;

/// How often each fault has struck.
#[derive(Default)]
pub struct Struck {
    counts: [Cell<u64>; Fault::ALL.len()],
    observer: RefCell<Option<Observer>>,
}

impl Struck {
    /// One more time.
    pub fn count(&self, fault: Fault, whom: Whom) {
        let count = &self.counts[fault as usize];
        count.set(count.get() + 1);
        if let Some(observer) = &*self.observer.borrow() {
            observer(fault, whom);
        }
    }

    /// From now on `observer` hears of every fault before it takes effect.
    pub fn observe(&self, observer: impl Fn(Fault, Whom) + 'static) {
        *self.observer.borrow_mut() = Some(Box::new(observer));
    }

    /// How often this one has.
    pub fn of(&self, fault: Fault) -> u64 {
        self.counts[fault as usize].get()
    }
}

/// What goes wrong with messages: each once in so many, or never if that is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weather {
    /// See [`Fault::Loss`].
    pub loss_one_in: u64,
    /// See [`Fault::Duplicate`].
    pub duplicate_one_in: u64,
    /// See [`Fault::Reorder`].
    pub reorder_one_in: u64,
    /// See [`Fault::Delay`].
    pub delay_one_in: u64,
    /// See [`Fault::Reset`].
    pub reset_one_in: u64,
    /// How long a late message is usually late.
    pub late_ns: Nanos,
}

impl Weather {
    /// Nothing goes wrong.
    pub const FAIR: Weather = Weather {
        loss_one_in: 0,
        duplicate_one_in: 0,
        reorder_one_in: 0,
        delay_one_in: 0,
        reset_one_in: 0,
        late_ns: 0,
    };
    /// Everything does now and then.
    pub const FOUL: Weather = Weather {
        loss_one_in: 40,
        duplicate_one_in: 30,
        reorder_one_in: 20,
        delay_one_in: 60,
        reset_one_in: 1500,
        late_ns: MILLIS / 4,
    };
}

impl Weather {
    /// This weather, with a fault that strikes every message.
    ///
    /// # Panics
    /// If it is not one that strikes messages.
    pub fn with(self, fault: Fault) -> Weather {
        match fault {
            Fault::Loss => Weather { loss_one_in: 1, ..self },
            Fault::Duplicate => Weather { duplicate_one_in: 1, ..self },
            Fault::Reorder => Weather { reorder_one_in: 1, ..self },
            Fault::Delay => Weather { delay_one_in: 1, ..self },
            Fault::Reset => Weather { reset_one_in: 1, ..self },
            _ => panic!("{fault:?} strikes no message"),
        }
    }
}

/// The shortest and longest that a partition or a pause usually lasts.
pub const OUTAGE: [Nanos; 2] = [200 * MICROS, 30 * MILLIS];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_place_and_a_name_of_its_own() {
        for (index, fault) in Fault::ALL.into_iter().enumerate() {
            assert_eq!(fault as usize, index);
            assert_eq!(Fault::named(fault.name()), Some(fault));
        }
    }
}
