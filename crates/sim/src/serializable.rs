//! Checker of serializability: some serial order of the committed transactions explains all reads, and agrees with the
//! order of each key's versions. If `real_time` is set, it also agrees with the order in time (strict serializability).
//!
//! The checker builds Adya's direct serialization graph (*Weak Consistency*, 1999). Its nodes are the committed
//! transactions. The edges say which transaction must come first: the writer of a version before the writer of the next
//! one (ww), the writer before the readers (wr), the readers before the writer of the next version (rw), and with
//! `real_time` a transaction before all that were called after its return. A cycle is a violation, named by the kinds
//! of its edges. The order of a register's versions is known from the history. The order of a list is that of the
//! longest list that was read, as in *Elle* (Kingsbury and Alvaro 2020).
//!
//! The graph has a number of edges that is linear in the history, and so has the search for a cycle. Sorting is not
//! linear.
//!
//! Invariant: a transaction of unknown outcome counts as committed if one of its writes was read, else as aborted. In
//! time, it is before nothing: another client may commit it at any later time, in recovery.
//!
//! Invariant: every history in which tags are unique is decided.

mod facts;
mod graph;
mod shrink;
pub mod workload;

use crate::checker::{Checked, Checker, Violation};
use crate::history::transaction::{Ask, History, Operation};
use facts::Facts;
use graph::{Edge, Graph, Why};
use std::fmt;

/// Checker of transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transactions {
    /// Scope of versions.
    pub versions: Versions,
    /// Whether the serial order must agree with the order in time.
    pub real_time: bool,
}

/// Scope of the versions of a system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versions {
    /// A transaction gives one version to all keys that it writes, such as its timestamp.
    OfTransactions,
    /// Each key counts its own versions. A write of a transaction of unknown outcome then has a known place only if it
    /// was read itself.
    OfKeys,
}

/// Kinds of anomalies, the gravest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A read returned a value that no transaction wrote.
    Garbage,
    /// The history contradicts itself about the versions of a key.
    Versions,
    /// Two reads of a list returned elements in orders that do not agree, or an element twice.
    IncompatibleOrder,
    /// A transaction did not see its own write, or saw a key change.
    Internal,
    /// G1a: a committed transaction read a value of an aborted one.
    AbortedRead,
    /// G1b: a transaction read a value that its writer replaced.
    IntermediateRead,
    /// G0: a cycle of writes.
    WriteCycle,
    /// G1c: a cycle of writes and reads.
    CircularInformation,
    /// G-single of two transactions that update one key.
    LostUpdate,
    /// G-single: a cycle with one read that missed a write.
    ReadSkew,
    /// G-nonadjacent: a cycle in which no two reads that missed writes follow each other.
    LongFork,
    /// G2-item of two transactions, each of which missed the other's write.
    WriteSkew,
    /// G2-item: a cycle with several reads that missed writes.
    AntiDependencyCycle,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Garbage => "garbage read",
            Kind::Versions => "contradictory versions",
            Kind::IncompatibleOrder => "incompatible order",
            Kind::Internal => "internal inconsistency",
            Kind::AbortedRead => "G1a (aborted read)",
            Kind::IntermediateRead => "G1b (intermediate read)",
            Kind::WriteCycle => "G0 (write cycle)",
            Kind::CircularInformation => "G1c (circular information flow)",
            Kind::LostUpdate => "G-single (lost update)",
            Kind::ReadSkew => "G-single (read skew)",
            Kind::LongFork => "G-nonadjacent (long fork)",
            Kind::WriteSkew => "G2-item (write skew)",
            Kind::AntiDependencyCycle => "G2-item (anti-dependency cycle)",
        })
    }
}

/// An anomaly: the transactions that show it, and what they did to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anomaly {
    /// Its kind.
    pub kind: Kind,
    /// Whether the cycle needs the order in time.
    pub in_real_time: bool,
    /// Indices of the transactions of the cycle, in its order; else of the reader, and of other transactions.
    pub operations: Vec<usize>,
    /// Indices of further transactions that show the order of versions.
    pub witnesses: Vec<usize>,
    /// The keys of the anomaly.
    pub keys: Vec<u64>,
    /// One sentence for each edge of the cycle; else one sentence.
    pub because: Vec<String>,
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_time = if self.in_real_time { ", in real time" } else { "" };
        write!(f, "{}{in_time}: {}", self.kind, self.because.join("; "))
    }
}

impl Checker for Transactions {
    type Ask = Ask;

    const PROPERTY: &'static str = "the committed transactions were serializable";

    fn check(&self, history: &History) -> Checked<Ask> {
        let operations = history.operations();
        let report = self.report(operations);
        let mut checked = Checked { undecided: report.undecided, ..Checked::default() };
        if !report.anomalies.is_empty() {
            // The first anomaly in time, which the drawing shows, and those of other kinds.
            let (first, window) = shrink::window(self, operations);
            let others = report.anomalies.iter().filter(|of| of.kind != first.kind);
            checked.violated = [&first].into_iter().chain(others).map(Anomaly::to_string).collect();
            checked.window = Some(window);
        }
        checked
    }
}

/// Result of the search for anomalies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The first anomaly of each kind that is no cycle, and then the gravest cycle.
    pub anomalies: Vec<Anomaly>,
    /// Reasons why the history cannot be judged.
    pub undecided: Vec<String>,
}

impl Transactions {
    /// Searches these transactions for anomalies.
    pub fn report(&self, operations: &[Operation]) -> Report {
        let mut facts = Facts::of(operations, self.versions);
        if !facts.undecided.is_empty() {
            return Report { anomalies: Vec::new(), undecided: facts.undecided };
        }
        if self.real_time {
            facts.add_real_time(operations);
        }
        let mut anomalies = std::mem::take(&mut facts.anomalies);
        anomalies.sort_by_key(|anomaly| anomaly.kind);
        anomalies.dedup_by_key(|anomaly| anomaly.kind);
        let graph = Graph::new(facts.nodes, std::mem::take(&mut facts.edges));
        anomalies.extend(gravest_cycle(&graph).map(|cycle| named(operations, &facts, &cycle)));
        Report { anomalies, undecided: Vec::new() }
    }
}

/// Returns a cycle of the gravest kind: of writes alone, with reads, and with reads that missed a write; each first
/// without the order in time.
fn gravest_cycle(graph: &Graph) -> Option<Vec<Edge>> {
    const KINDS: [&[Why]; 6] = [
        &[Why::Ww],
        &[Why::Ww, Why::Wr],
        &[Why::Ww, Why::Wr, Why::Rw],
        &[Why::Ww, Why::RealTime],
        &[Why::Ww, Why::Wr, Why::RealTime],
        &[Why::Ww, Why::Wr, Why::Rw, Why::RealTime],
    ];
    if !graph.has_cycle(KINDS[KINDS.len() - 1]) {
        return None;
    }
    KINDS.iter().find_map(|kinds| graph.cycle(kinds))
}

/// Names a cycle, and says for each of its edges why it is there.
fn named(operations: &[Operation], facts: &Facts, cycle: &[Edge]) -> Anomaly {
    let count = |why: Why| cycle.iter().filter(|edge| edge.why == why).count();
    let is_pair_of =
        |whys: [Why; 2]| cycle.len() == 2 && whys.iter().all(|why| cycle.iter().any(|edge| edge.why == *why));
    let is_one_key = cycle.iter().all(|edge| edge.key == cycle[0].key);
    let is_adjacent = |at: usize| [at, (at + 1) % cycle.len()].iter().all(|at| cycle[*at].why == Why::Rw);
    let kind = match count(Why::Rw) {
        0 if count(Why::Wr) == 0 => Kind::WriteCycle,
        0 => Kind::CircularInformation,
        1 if is_pair_of([Why::Rw, Why::Ww]) && is_one_key => Kind::LostUpdate,
        1 => Kind::ReadSkew,
        // Appends that nobody has read: whichever comes first, the other one missed it.
        2 if is_pair_of([Why::Rw, Why::Rw]) && is_one_key => Kind::LostUpdate,
        2 if is_pair_of([Why::Rw, Why::Rw]) => Kind::WriteSkew,
        _ if !(0..cycle.len()).any(is_adjacent) => Kind::LongFork,
        _ => Kind::AntiDependencyCycle,
    };
    let mut keys: Vec<u64> =
        cycle.iter().filter(|edge| edge.why != Why::RealTime).map(|edge| edge.key).collect();
    keys.sort_unstable();
    keys.dedup();
    Anomaly {
        kind,
        in_real_time: count(Why::RealTime) > 0,
        operations: cycle.iter().map(|edge| edge.from as usize).collect(),
        witnesses: keys.iter().filter_map(|key| facts.longest.get(key).copied()).collect(),
        because: cycle.iter().map(|edge| because(operations, edge)).collect(),
        keys,
    }
}

/// Says why an edge is there.
fn because(operations: &[Operation], edge: &Edge) -> String {
    let [from, to] = [edge.from, edge.to].map(|at| name(&operations[at as usize]));
    let key = edge.key;
    match edge.why {
        Why::Ww => format!("{to} wrote key {key} after {from}"),
        Why::Wr => format!("{to} read key {key} as {from} left it"),
        Why::Rw => format!("{from} read key {key} before {to} wrote it"),
        Why::RealTime | Why::Pass => format!("{to} was called after {from} had returned"),
    }
}

/// Names a transaction by its client and the time of its call.
fn name(operation: &Operation) -> String {
    format!("client {} at {} ns", operation.client, operation.called.ns)
}

/// A violation for a drawing: the transactions that show an anomaly.
fn violation(anomaly: &Anomaly, operations: Vec<Operation>, offender: usize, of: usize) -> Violation<Ask> {
    Violation { what: anomaly.to_string(), operations, offender, instead: Vec::new(), of }
}

#[cfg(test)]
mod tests;
