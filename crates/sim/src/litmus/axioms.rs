//! The contract of one-sided memory, as data: what is promised. What is not listed is not promised.
//!
//! Every access to memory is an *event* on words of one cache line, which nothing cuts: a line is fetched and written
//! whole. A READ is an event for each of its lines, a WRITE too; an atomic is a fetch and, later, a write-back.
//! An axiom says that some events come before others; whatever total order of all events agrees with that is a run.
//! Of an atomic's events there is more to say ([`Axiom::Exclusive`]), as they hold a slot of the NIC.
//!
//! Not promised, though it is often seen:
//!
//! - an order among the lines of one READ: PCIe completes reads in order, but hosts fetch in parallel;
//! - READ before READ: both may be on their way through PCIe at once;
//! - READ or atomic before WRITE or atomic, without a fence or a wait;
//! - any order between two connections, also between those of one client;
//! - that an atomic is atomic to a WRITE: one that lands between its fetch and its write-back is lost in that word.
//!
//! The completion of a WRITE means here that it has landed, so that whatever comes through the NIC later finds it. A
//! real one says only that the responder has it; nobody can tell the difference through the same connection, which
//! orders a WRITE before everything, and between connections the axioms promise nothing. A CPU that reads its own
//! memory could, and has no part in these programs.

use super::program::{Op, Start};

/// What the tables of order know of a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// CAS or FAA.
    Atomic,
}

impl Verb {
    /// Of an op.
    pub fn of(op: &Op) -> Verb {
        match op {
            Op::Read { .. } => Verb::Read,
            Op::Write { .. } => Verb::Write,
            Op::Cas { .. } | Op::Faa { .. } => Verb::Atomic,
        }
    }
}

/// One promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axiom {
    /// On one connection, all events of the first verb come before all of the second, if it was posted later.
    Before(Verb, Verb),
    /// The lines of one such verb come in increasing order of their addresses.
    Ascending(Verb),
    /// An atomic fetches, then writes back. A CAS that does not find what it compares never writes back.
    FetchThenWriteBack,
    /// Between the fetch and the write-back of an atomic there is no event of another atomic on the same word.
    Exclusive,
    /// What starts so, and everything posted after it on its connection, comes after all events of all such verbs
    /// posted before it: a send queue starts its requests in their order, so what is held holds up what is behind it,
    /// and it completes them in their order.
    HeldUntilDone(Start, &'static [Verb]),
}

/// An axiom, and who says so.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// What is promised.
    pub axiom: Axiom,
    /// Whether it also holds where memory is registered, or the bus set, for relaxed ordering.
    pub also_relaxed: bool,
    /// Where it comes from.
    pub source: &'static str,
}

const fn always(axiom: Axiom, source: &'static str) -> Promise {
    Promise { axiom, also_relaxed: true, source }
}

/// InfiniBand Architecture Specification 1, the table of work request ordering.
const TABLE: &str = "InfiniBand: ordering of operations on one queue pair";

/// All that is promised.
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
        source: "PCIe: posted writes do not pass each other; RC packets arrive in order. No promise of InfiniBand",
    },
    always(Axiom::FetchThenWriteBack, "how NICs without PCIe atomics do it; a failed CAS writes nothing"),
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
        "what is posted after a completion was polled; InfiniBand: a send queue completes in order",
    ),
];
