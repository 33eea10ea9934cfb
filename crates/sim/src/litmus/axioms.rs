//! The contract of one-sided memory, as data. The contract promises only the listed axioms.
//!
//! Every access to memory is an *event* on words of one cache line. Events are indivisible: a line is fetched and
//! written as a whole. A READ or a WRITE is one event per line. An atomic is two events: a fetch and a later
//! write-back.
//!
//! An axiom orders some events before others. Each total order of all events that agrees with the axioms is a possible
//! run. One further rule restricts the events of atomics, since an atomic holds a slot of the NIC
//! ([`Axiom::Exclusive`]).
//!
//! Not promised, though often observed:
//!
//! - an order among the lines of one READ: PCIe completes reads in order, but hosts fetch in parallel;
//! - READ before READ: both may be in flight through PCIe at the same time;
//! - READ or atomic before WRITE or atomic, without a fence or a wait;
//! - any order between two connections, including those of one client;
//! - that an atomic is atomic with respect to a WRITE: a WRITE that lands between an atomic's fetch and write-back is
//!   lost in that word.
//!
//! In this model, the completion of a WRITE means that the WRITE has landed: later accesses through the NIC find its
//! bytes. A real completion means only that the responder has received the WRITE. No program here can observe the
//! difference. On the same connection a WRITE is ordered before all later verbs, and between connections the axioms
//! promise nothing. A CPU that reads its own memory could observe it, but no program here has such a read.

use super::program::{Op, Start};

/// Kind of a verb. The axioms distinguish only these kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A READ of words.
    Read,
    /// A WRITE of words.
    Write,
    /// An atomic: CAS or FAA.
    Atomic,
}

impl Verb {
    /// Returns the kind of the verb `op`.
    pub fn of(op: &Op) -> Verb {
        match op {
            Op::Read { .. } => Verb::Read,
            Op::Write { .. } => Verb::Write,
            Op::Cas { .. } | Op::Faa { .. } => Verb::Atomic,
        }
    }
}

/// A rule of the memory contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axiom {
    /// On one connection, all events of a verb of the first kind precede all events of a verb of the second kind that
    /// is posted later.
    Before(Verb, Verb),
    /// The lines of one verb of this kind are accessed in increasing order of their addresses.
    Ascending(Verb),
    /// An atomic fetches, then writes back. A CAS whose comparison fails never writes back.
    FetchThenWriteBack,
    /// Between the fetch and the write-back of an atomic, no event of another atomic on the same word occurs.
    Exclusive,
    /// A verb that starts this way, and all verbs posted after it on its connection, come after all events of earlier
    /// verbs of the listed kinds. The reason is that a send queue starts its requests in order and completes them in
    /// order, so a held request also holds all later requests.
    HeldUntilDone(Start, &'static [Verb]),
}

/// A rule of the contract, and the source that promises it.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// The promised rule.
    pub axiom: Axiom,
    /// Whether the rule also holds if the memory is registered, or the bus configured, for relaxed ordering.
    pub also_relaxed: bool,
    /// Specification or experience that promises the rule.
    pub source: &'static str,
}

const fn always(axiom: Axiom, source: &'static str) -> Promise {
    Promise { axiom, also_relaxed: true, source }
}

/// InfiniBand Architecture Specification 1, the table of work request ordering.
const TABLE: &str = "InfiniBand: ordering of operations on one queue pair";

/// The memory contract: all its rules, each with its source.
pub const PROMISES: &[Promise] = &[
    always(Axiom::Before(Verb::Write, Verb::Write), TABLE),
    always(
        Axiom::Before(Verb::Write, Verb::Read),
        "InfiniBand; PCIe: a read does not pass an earlier posted write",
    ),
    always(Axiom::Before(Verb::Write, Verb::Atomic), TABLE),
    always(
        Axiom::Before(Verb::Atomic, Verb::Read),
        "InfiniBand; the speculative read of Ziegler et al., SIGMOD 2023",
    ),
    Promise {
        axiom: Axiom::Ascending(Verb::Write),
        also_relaxed: false,
        source: "PCIe: posted writes do not pass each other; RC packets arrive in order. Not promised by InfiniBand",
    },
    always(Axiom::FetchThenWriteBack, "behaviour of NICs without PCIe atomics; a failed CAS writes nothing"),
    always(
        Axiom::Exclusive,
        "InfiniBand: atomic to other atomics of the same NIC, which locks a slot per address",
    ),
    always(
        Axiom::HeldUntilDone(Start::Fenced, &[Verb::Read, Verb::Atomic]),
        "ibv_post_send(3), IBV_SEND_FENCE",
    ),
    always(
        Axiom::HeldUntilDone(Start::Waits, &[Verb::Read, Verb::Write, Verb::Atomic]),
        "posting after a completion was polled; InfiniBand: a send queue completes in order",
    ),
];
