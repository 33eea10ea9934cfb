//! What a history says about its transactions: who wrote, read and overwrote what, and what it says that cannot be.
//!
//! Invariant: only committed transactions have edges.

use super::graph::{Edge, Why};
use super::{Anomaly, Kind, Versions, name};
use crate::history::transaction::{Operation, Outcome, Seen, Step};
use foldhash::fast::FixedState;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Facts about a history.
#[derive(Default)]
pub(super) struct Facts {
    /// Number of nodes: transactions, and then auxiliary nodes.
    pub(super) nodes: usize,
    pub(super) edges: Vec<Edge>,
    /// Anomalies that are no cycles.
    pub(super) anomalies: Vec<Anomaly>,
    /// Reasons why the history cannot be judged.
    pub(super) undecided: Vec<String>,
    /// For each list, the transaction that read the longest one.
    pub(super) longest: BTreeMap<u64, usize>,
    /// For each transaction, whether it is committed.
    committed: Vec<bool>,
}

/// What a transaction leaves in a key.
enum Effect {
    /// The tag of a register's value, or none after a delete; and the step.
    Register(Option<u64>, usize),
    /// The elements that it appends to a list.
    List(Vec<u64>),
}

/// The write or append of a tag.
#[derive(Clone, Copy)]
struct Writer {
    /// Index of the transaction.
    at: usize,
    /// Whether the tag is the last that the transaction writes to this key.
    is_last: bool,
}

/// A read that finds what other transactions have left.
struct Read<'a> {
    /// Index of the transaction.
    at: usize,
    key: u64,
    found: Found<'a>,
}

/// What a read has found.
#[derive(Clone, PartialEq, Eq)]
enum Found<'a> {
    Value { tag: u64, version: u64 },
    Absent { version: u64 },
    List(&'a [u64]),
}

/// What a transaction knows of a key that it has read or written before.
struct Known<'a> {
    /// What it read, if it did so before it wrote.
    base: Option<Found<'a>>,
    /// What it wrote since: the last write or delete of a register.
    own: Option<Option<u64>>,
    /// What it appended since.
    appended: Vec<u64>,
}

impl Facts {
    /// Collects the facts.
    pub(super) fn of(operations: &[Operation], versions: Versions) -> Facts {
        let mut facts = Facts { nodes: operations.len(), ..Facts::default() };
        let effects: Vec<BTreeMap<u64, Effect>> = operations.iter().map(effects).collect();
        let writers = facts.writers(operations);
        facts.check_kinds(operations);
        if !facts.undecided.is_empty() {
            return facts;
        }
        let mut reads = Vec::new();
        for (at, operation) in operations.iter().enumerate() {
            facts.add_reads(at, operation, &mut reads);
        }
        facts.committed = operations.iter().map(|of| matches!(of.outcome, Outcome::Committed(_))).collect();
        reads.retain(|read| facts.has_writers(operations, &writers, read));
        facts.add_registers(operations, &effects, &writers, &reads, versions);
        facts.add_lists(operations, &effects, &writers, &reads);
        facts
    }

    fn found(
        &mut self,
        kind: Kind,
        operations: &[Operation],
        who: &[usize],
        key: u64,
        what: impl FnOnce(&[String]) -> String,
    ) {
        let names: Vec<String> = who.iter().map(|at| name(&operations[*at])).collect();
        let because = vec![what(&names)];
        let (operations, keys) = (who.to_vec(), vec![key]);
        self.anomalies.push(Anomaly {
            kind,
            in_real_time: false,
            operations,
            witnesses: Vec::new(),
            keys,
            because,
        });
    }

    /// Finds the writer of each tag.
    fn writers(&mut self, operations: &[Operation]) -> HashMap<(u64, u64), Writer, FixedState> {
        let mut writers: HashMap<(u64, u64), Writer, FixedState> = HashMap::default();
        for (at, operation) in operations.iter().enumerate() {
            let mut last: BTreeMap<u64, u64> = BTreeMap::new();
            for step in &operation.ask.0 {
                let (key, tag) = match *step {
                    Step::Write { key, tag } | Step::Append { key, tag } => (key, tag),
                    Step::Delete(key) => {
                        if let Some(before) = last.remove(&key).and_then(|tag| writers.get_mut(&(key, tag))) {
                            before.is_last = false;
                        }
                        continue;
                    }
                    Step::Read(_) => continue,
                };
                if let Some(before) = last.insert(key, tag).and_then(|tag| writers.get_mut(&(key, tag))) {
                    before.is_last = false;
                }
                if writers.insert((key, tag), Writer { at, is_last: true }).is_some() {
                    self.undecided.push(format!(
                        "tag {tag} of key {key} is written twice: give each write its own tag"
                    ));
                }
            }
        }
        writers
    }

    /// Checks that each key is a register or a list.
    fn check_kinds(&mut self, operations: &[Operation]) {
        let mut are_lists: HashMap<u64, bool, FixedState> = HashMap::default();
        for operation in operations {
            for (at, step) in operation.ask.0.iter().enumerate() {
                let is_list = match (step, &operation.outcome) {
                    (Step::Append { .. }, _) => true,
                    (Step::Write { .. } | Step::Delete(_), _) => false,
                    (Step::Read(_), Outcome::Committed(seen)) => match &seen[at] {
                        Seen::List(_) => true,
                        Seen::Value { .. } => false,
                        Seen::Absent { .. } | Seen::Wrote { .. } | Seen::Appended => continue,
                    },
                    (Step::Read(_), _) => continue,
                };
                if *are_lists.entry(step.key()).or_insert(is_list) != is_list {
                    let key = step.key();
                    self.undecided
                        .push(format!("key {key} is a register and a list: use a key for one of them"));
                    return;
                }
            }
        }
    }

    /// Adds the reads of a committed transaction that find what others have left. A read after a step of its own must
    /// agree with that.
    fn add_reads<'a>(&mut self, at: usize, operation: &'a Operation, reads: &mut Vec<Read<'a>>) {
        let Outcome::Committed(seen) = &operation.outcome else { return };
        let mut known: BTreeMap<u64, Known<'a>> = BTreeMap::new();
        for (step, seen) in operation.ask.0.iter().zip(seen) {
            let key = step.key();
            let is_new = !known.contains_key(&key);
            let of = known.entry(key).or_insert(Known { base: None, own: None, appended: Vec::new() });
            let found = match (step, seen) {
                (Step::Write { tag, .. }, _) => {
                    of.own = Some(Some(*tag));
                    continue;
                }
                (Step::Delete(_), _) => {
                    of.own = Some(None);
                    continue;
                }
                (Step::Append { tag, .. }, _) => {
                    of.appended.push(*tag);
                    continue;
                }
                (_, Seen::Value { tag, version, .. }) => Found::Value { tag: *tag, version: *version },
                (_, Seen::Absent { version }) => Found::Absent { version: *version },
                (_, Seen::List(tags)) => Found::List(tags),
                (_, Seen::Wrote { .. } | Seen::Appended) => continue,
            };
            let is_right = match (&found, of.own) {
                (Found::Value { tag, .. }, Some(own)) => own == Some(*tag),
                (Found::Absent { .. }, Some(own)) => own.is_none(),
                (Found::List(tags), _) => match (tags.strip_suffix(&of.appended[..]), &of.base) {
                    (None, _) => false,
                    (Some(base), Some(before)) => *before == Found::List(base),
                    (Some(base), None) => {
                        of.base = Some(Found::List(base));
                        reads.push(Read { at, key, found: Found::List(base) });
                        true
                    }
                },
                // An empty list may be absent.
                (Found::Absent { .. }, None)
                    if matches!(of.base, Some(Found::List(_))) || !of.appended.is_empty() =>
                {
                    of.appended.is_empty() && of.base == Some(Found::List(&[]))
                }
                (_, None) if is_new => {
                    of.base = Some(found.clone());
                    reads.push(Read { at, key, found });
                    true
                }
                // The same absence may have a later version by now.
                (Found::Absent { .. }, None) if matches!(of.base, Some(Found::Absent { .. })) => {
                    reads.push(Read { at, key, found });
                    true
                }
                (_, None) => of.base.as_ref() == Some(&found),
            };
            if !is_right {
                let what =
                    format!("{} read key {key} and did not see what it had read or written", name(operation));
                self.anomalies.push(Anomaly {
                    kind: Kind::Internal,
                    in_real_time: false,
                    operations: vec![at],
                    witnesses: Vec::new(),
                    keys: vec![key],
                    because: vec![what],
                });
            }
        }
    }

    /// Whether all that was read was written, and not by an aborted transaction. Such a writer is committed.
    fn has_writers(
        &mut self,
        operations: &[Operation],
        writers: &HashMap<(u64, u64), Writer, FixedState>,
        read: &Read<'_>,
    ) -> bool {
        let tags: &[u64] = match &read.found {
            Found::Value { tag, .. } => std::slice::from_ref(tag),
            Found::Absent { .. } => &[],
            Found::List(tags) => tags,
        };
        let (at, key) = (read.at, read.key);
        for (place, tag) in tags.iter().enumerate() {
            let Some(writer) = writers.get(&(key, *tag)) else {
                self.found(Kind::Garbage, operations, &[at], key, |names| {
                    format!("{} read #{tag} of key {key}, which nobody wrote", names[0])
                });
                return false;
            };
            if operations[writer.at].outcome == Outcome::Failed {
                self.found(Kind::AbortedRead, operations, &[at, writer.at], key, |names| {
                    format!("{} read #{tag} of key {key}, which {} wrote and aborted", names[0], names[1])
                });
                return false;
            }
            if writer.at == at {
                self.found(Kind::Internal, operations, &[at], key, |names| {
                    format!("{} read #{tag} of key {key} before it wrote that itself", names[0])
                });
                return false;
            }
            if place + 1 == tags.len() && !writer.is_last {
                self.found(Kind::IntermediateRead, operations, &[at, writer.at], key, |names| {
                    format!(
                        "{} read #{tag} of key {key}, which {} replaced or extended itself",
                        names[0], names[1]
                    )
                });
            }
            self.committed[writer.at] = true;
        }
        true
    }

    fn edge(&mut self, from: usize, to: usize, why: Why, key: u64) {
        if from != to {
            self.edges.push(Edge { from: from as u32, to: to as u32, why, key });
        }
    }

    /// Adds the edges of registers, in the order of versions.
    fn add_registers(
        &mut self,
        operations: &[Operation],
        effects: &[BTreeMap<u64, Effect>],
        writers: &HashMap<(u64, u64), Writer, FixedState>,
        reads: &[Read<'_>],
        scope: Versions,
    ) {
        // For each transaction of unknown outcome, and each key or all of them, the version that a read has shown.
        let shared = |key: u64| if scope == Versions::OfTransactions { 0 } else { key };
        let mut shown: HashMap<(usize, u64), u64, FixedState> = HashMap::default();
        for read in reads {
            if let Found::Value { tag, version } = read.found {
                let writer = writers[&(read.key, tag)].at;
                if let Outcome::Unknown = operations[writer].outcome {
                    shown.entry((writer, shared(read.key))).or_insert(version);
                }
            }
        }
        let mut registers: BTreeMap<u64, Vec<(u64, usize)>> = BTreeMap::new();
        for (at, effects) in effects.iter().enumerate() {
            if !self.committed[at] {
                continue;
            }
            let mut first: Option<u64> = None;
            let versions: Vec<(u64, u64)> = effects
                .iter()
                .filter_map(|(key, effect)| match (effect, &operations[at].outcome) {
                    (Effect::Register(_, step), Outcome::Committed(seen)) => match seen[*step] {
                        Seen::Wrote { version, .. } => Some((*key, version)),
                        _ => None,
                    },
                    (Effect::Register(..), _) => Some((*key, *shown.get(&(at, shared(*key)))?)),
                    (Effect::List(_), _) => None,
                })
                .collect();
            for (key, version) in versions {
                if scope == Versions::OfTransactions && *first.get_or_insert(version) != version {
                    self.found(Kind::Versions, operations, &[at], key, |names| {
                        format!("{} wrote key {key} with another version than its other keys", names[0])
                    });
                }
                registers.entry(key).or_default().push((version, at));
            }
        }
        for (key, versions) in &mut registers {
            versions.sort_unstable();
            for pair in versions.windows(2) {
                if pair[0].0 == pair[1].0 {
                    self.found(Kind::Versions, operations, &[pair[1].1, pair[0].1], *key, |names| {
                        format!("{} and {} wrote key {key} with the same version", names[0], names[1])
                    });
                }
                self.edge(pair[0].1, pair[1].1, Why::Ww, *key);
            }
        }
        let none = Vec::new();
        for read in reads {
            let (at, key) = (read.at, read.key);
            let versions = registers.get(&key).unwrap_or(&none);
            // Index of the version that was read, plus 1; 0 for the initial absence.
            let place = match read.found {
                Found::List(_) => continue,
                Found::Value { tag, version } => {
                    let writer = writers[&(key, tag)].at;
                    let own = versions.partition_point(|of| of.0 < version);
                    if versions.get(own).is_none_or(|of| *of != (version, writer)) {
                        self.found(Kind::Versions, operations, &[at, writer], key, |names| {
                            let [reader, writer] = [&names[0], &names[1]];
                            format!(
                                "{reader} read #{tag} of key {key} with another version than {writer} wrote"
                            )
                        });
                        continue;
                    }
                    own + 1
                }
                Found::Absent { version } => {
                    let until = versions.partition_point(|of| of.0 <= version);
                    let is_delete = |of: &(u64, usize)| {
                        matches!(effects[of.1].get(&key), Some(Effect::Register(None, _)))
                    };
                    versions[..until].iter().rposition(is_delete).map_or(0, |place| place + 1)
                }
            };
            if place > 0 && versions[place - 1].1 == at {
                self.found(Kind::Internal, operations, &[at], key, |names| {
                    format!("{} read key {key} as deleted before it deleted it itself", names[0])
                });
            }
            if place > 0 {
                self.edge(versions[place - 1].1, at, Why::Wr, key);
            }
            let next = versions.get(place).filter(|of| of.1 != at);
            if let Some(next) = next {
                self.edge(at, next.1, Why::Rw, key);
            }
        }
    }

    /// Adds the edges of lists, in the order of the longest list that was read.
    fn add_lists(
        &mut self,
        operations: &[Operation],
        effects: &[BTreeMap<u64, Effect>],
        writers: &HashMap<(u64, u64), Writer, FixedState>,
        reads: &[Read<'_>],
    ) {
        let mut lists: BTreeMap<u64, Vec<(usize, &[u64])>> = BTreeMap::new();
        let mut appended: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, effects) in effects.iter().enumerate().filter(|(at, _)| self.committed[*at]) {
            for (key, _) in effects.iter().filter(|(_, effect)| matches!(effect, Effect::List(_))) {
                appended.entry(*key).or_default().push(at);
                lists.entry(*key).or_default();
            }
        }
        for read in reads {
            match &read.found {
                Found::List(tags) => lists.entry(read.key).or_default().push((read.at, *tags)),
                Found::Absent { .. } => {
                    if let Some(of) = lists.get_mut(&read.key) {
                        of.push((read.at, &[]));
                    }
                }
                Found::Value { .. } => {}
            }
        }
        for (key, reads) in lists {
            let longest = reads.iter().rev().max_by_key(|(_, tags)| tags.len()).copied();
            let (reader, order) = longest.unwrap_or((0, &[]));
            if !order.is_empty() {
                self.longest.insert(key, reader);
            }
            let groups = self.groups(operations, effects, writers, (key, reader, order));
            self.add_list(operations, key, (reader, order), &reads, &groups, appended.get(&key));
        }
    }

    /// Groups the elements of the longest list by their writers: each group is a writer and the number of elements up
    /// to its end. Reports elements that a writer has not appended in this order.
    fn groups(
        &mut self,
        operations: &[Operation],
        effects: &[BTreeMap<u64, Effect>],
        writers: &HashMap<(u64, u64), Writer, FixedState>,
        (key, reader, order): (u64, usize, &[u64]),
    ) -> Vec<(usize, usize)> {
        let mut groups: Vec<(usize, usize)> = Vec::new();
        let mut counts: HashMap<usize, usize, FixedState> = HashMap::default();
        let mut seen: HashSet<u64, FixedState> = HashSet::default();
        for (place, tag) in order.iter().enumerate() {
            let at = writers[&(key, *tag)].at;
            let count = counts.entry(at).or_default();
            let is_next =
                matches!(effects[at].get(&key), Some(Effect::List(tags)) if tags.get(*count) == Some(tag));
            *count += 1;
            if !seen.insert(*tag) || !is_next {
                self.found(Kind::IncompatibleOrder, operations, &[reader, at], key, |names| {
                    let [reader, writer] = [&names[0], &names[1]];
                    format!("{reader} read key {key} with #{tag} twice, or not as {writer} appended it")
                });
            }
            match groups.last_mut() {
                Some(last) if last.0 == at => last.1 = place + 1,
                _ => groups.push((at, place + 1)),
            }
        }
        for (at, end) in groups.iter().take(groups.len().saturating_sub(1)) {
            let is_whole =
                matches!(effects[*at].get(&key), Some(Effect::List(tags)) if tags.len() == counts[at]);
            if !is_whole {
                self.found(Kind::IncompatibleOrder, operations, &[reader, *at], key, |names| {
                    let [reader, writer] = [&names[0], &names[1]];
                    format!(
                        "{reader} read key {key} with {end} elements, but without all that {writer} appended"
                    )
                });
            }
        }
        groups
    }

    fn add_list(
        &mut self,
        operations: &[Operation],
        key: u64,
        (longest, order): (usize, &[u64]),
        reads: &[(usize, &[u64])],
        groups: &[(usize, usize)],
        appended: Option<&Vec<usize>>,
    ) {
        for pair in groups.windows(2) {
            self.edge(pair[0].0, pair[1].0, Why::Ww, key);
        }
        let in_order: HashSet<usize, FixedState> = groups.iter().map(|group| group.0).collect();
        let unseen = appended.into_iter().flatten().copied().filter(|at| !in_order.contains(at));
        let unseen = Unseen::new(self, unseen.collect());
        if let Some(last) = groups.last() {
            unseen.add(self, last.0, Why::Ww, key);
        }
        for (at, tags) in reads {
            if !order.starts_with(tags) {
                self.found(Kind::IncompatibleOrder, operations, &[*at, longest], key, |names| {
                    format!("{} and {} read key {key} with different orders of elements", names[0], names[1])
                });
                continue;
            }
            // Number of groups up to the last element that was read.
            let place = groups.partition_point(|group| group.1 < tags.len()) + usize::from(!tags.is_empty());
            if place > 0 {
                self.edge(groups[place - 1].0, *at, Why::Wr, key);
            }
            match groups.get(place) {
                Some(next) => self.edge(*at, next.0, Why::Rw, key),
                None => unseen.add(self, *at, Why::Rw, key),
            }
        }
    }

    /// Adds the order in time, by a chain of auxiliary nodes, one for each return.
    pub(super) fn add_real_time(&mut self, operations: &[Operation]) {
        let is_known =
            |(_, operation): &(usize, &Operation)| matches!(operation.outcome, Outcome::Committed(_));
        let returned = operations.iter().enumerate().filter(is_known);
        let mut returns: Vec<(u64, usize)> =
            returned.filter_map(|(at, operation)| Some((operation.returned?.index, at))).collect();
        returns.sort_unstable();
        let first = self.nodes;
        self.nodes += returns.len();
        for (place, (_, at)) in returns.iter().enumerate() {
            self.edge(*at, first + place, Why::RealTime, 0);
            if place > 0 {
                self.edge(first + place - 1, first + place, Why::Pass, 0);
            }
        }
        for (at, operation) in operations.iter().enumerate() {
            let before = returns.partition_point(|of| of.0 < operation.called.index);
            if before > 0 && self.committed[at] {
                self.edge(first + before - 1, at, Why::Pass, 0);
            }
        }
    }
}

/// Returns what a transaction leaves in each key, if it is committed.
fn effects(operation: &Operation) -> BTreeMap<u64, Effect> {
    let mut effects = BTreeMap::new();
    for (at, step) in operation.ask.0.iter().enumerate() {
        match *step {
            Step::Read(_) => {}
            Step::Write { key, tag } => _ = effects.insert(key, Effect::Register(Some(tag), at)),
            Step::Delete(key) => _ = effects.insert(key, Effect::Register(None, at)),
            Step::Append { key, tag } => match effects.entry(key).or_insert_with(|| Effect::List(Vec::new()))
            {
                Effect::List(tags) => tags.push(tag),
                Effect::Register(..) => {}
            },
        }
    }
    effects
}

/// Transactions that appended to a list after all that was read. Their order is unknown, but each comes after every
/// reader of the longest list.
///
/// Two chains of auxiliary nodes lead to them, one forwards and one backwards, so that a reader which is one of them
/// reaches all others and not itself.
struct Unseen {
    of: Vec<usize>,
    /// Index of the first node of the chain that leads forwards; the other chain comes after it.
    first: usize,
}

impl Unseen {
    fn new(facts: &mut Facts, of: Vec<usize>) -> Unseen {
        let (first, count) = (facts.nodes, of.len());
        facts.nodes += 2 * count;
        for (place, at) in of.iter().enumerate() {
            let [forwards, backwards] = [first + place, first + count + place];
            facts.edge(forwards, *at, Why::Pass, 0);
            facts.edge(backwards, *at, Why::Pass, 0);
            if place + 1 < count {
                facts.edge(forwards, forwards + 1, Why::Pass, 0);
                facts.edge(backwards + 1, backwards, Why::Pass, 0);
            }
        }
        Unseen { of, first }
    }

    /// Adds edges from a transaction to all of these, but not to itself.
    fn add(&self, facts: &mut Facts, from: usize, why: Why, key: u64) {
        let count = self.of.len();
        let Ok(own) = self.of.binary_search(&from) else {
            if count > 0 {
                facts.edge(from, self.first, why, key);
            }
            return;
        };
        if own > 0 {
            facts.edge(from, self.first + count + own - 1, why, key);
        }
        if own + 1 < count {
            facts.edge(from, self.first + own + 1, why, key);
        }
    }
}
