//! Checker of linearizability: every key of a history behaves as one register. Each operation on the register takes
//! effect at one instant between the operation's call and its return.
//!
//! Linearizability is local (Herlihy and Wing 1990, theorem 1), so each key is checked separately.
//!
//! Invariant: an undecided history is never called good. The limit of a search is a number of steps, not a time, so
//! that a verdict is the same on every machine.
//!
//! Invariant: operations are ordered by the order of their events, not by their nanoseconds, which are often equal.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::checker::{Checked, Checker};
use crate::history::Ask as _;
use crate::history::register::{Ask, History, Operation, Outcome, Value, Version};
use crate::search::{Span, is_explained};

/// Limits of the search for an order of one key's operations.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of operations of one key. A state of the search takes one bit per operation.
    pub operations_max: usize,
    /// Maximum number of steps. A step is an attempt to apply an operation to a state. The search caches at most this
    /// many states.
    pub steps_max: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { operations_max: 5_000, steps_max: 1_000_000 }
    }
}

/// Verdict on the operations of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Some order of the key's operations explains all outcomes.
    Linearizable,
    /// No order of the key's operations explains all outcomes.
    Violated,
    /// The key is undecided, for this reason.
    Undecided(Undecided),
}

/// Reason why a key is undecided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undecided {
    /// The key has this many operations, more than [`Limits::operations_max`].
    TooLong(usize),
    /// The search was stopped after this many steps, [`Limits::steps_max`].
    TooHard(u64),
}

/// Result of checking the keys of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of keys in the history.
    pub keys: u64,
    /// Number of operations in the history.
    pub operations: u64,
    /// Number of steps of all keys' searches.
    pub steps: u64,
    /// Keys that are not linearizable.
    pub violated: Vec<u64>,
    /// Undecided keys, each with the reason.
    pub undecided: Vec<(u64, Undecided)>,
}

impl Report {
    /// Whether every key is decided and linearizable.
    pub fn is_linearizable(&self) -> bool {
        self.violated.is_empty() && self.undecided.is_empty()
    }
}

/// Checker of registers. Each key of a history is a register, checked separately.
pub struct Registers(pub Limits);

impl Checker for Registers {
    type Ask = Ask;

    const PROPERTY: &'static str = "every key was linearizable";

    fn check(&self, history: &History) -> Checked<Ask> {
        let Report { violated, undecided, .. } = check(history, self.0);
        let undecided = undecided.iter().map(|(key, why)| format!("key {key} is undecided: {why}"));
        let said = violated.first().map(|first| match violated.len() {
            1 => format!("key {first} is not linearizable"),
            more => format!("{more} keys are not linearizable; the first is {first}"),
        });
        Checked {
            violated: said.into_iter().collect(),
            undecided: undecided.collect(),
            window: violated.first().and_then(|key| explain(history, *key, self.0)),
        }
    }
}

/// Checks every key of a history. Keys have no value initially.
pub fn check(history: &History, limits: Limits) -> Report {
    let mut keys: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
    for operation in history.operations() {
        keys.entry(operation.key).or_default().push(*operation);
    }
    let mut report = Report::default();
    for (key, operations) in keys {
        let (verdict, steps) = check_key(&operations, limits);
        report.keys += 1;
        report.operations += operations.len() as u64;
        report.steps += steps;
        match verdict {
            Verdict::Linearizable => {}
            Verdict::Violated => report.violated.push(key),
            Verdict::Undecided(why) => report.undecided.push((key, why)),
        }
    }
    report
}

/// Checks the operations of one key. Returns the verdict and the number of steps.
pub fn check_key(operations: &[Operation], limits: Limits) -> (Verdict, u64) {
    let entries = entries(operations);
    if entries.len() > limits.operations_max {
        return (Verdict::Undecided(Undecided::TooLong(entries.len())), 0);
    }
    let spans: Vec<Span> = entries.iter().map(Entry::span).collect();
    let mut left = limits.steps_max;
    let is_linearizable = is_explained(&spans, State::default(), |state, at| {
        left = left.checked_sub(1)?;
        let entry = &entries[at];
        match entry.outcome {
            Outcome::Unknown => state.clone().with_unknown_outcome(entry),
            _ => state.clone().with_outcome(entry),
        }
    });
    let verdict = match (is_linearizable, left) {
        (true, _) => Verdict::Linearizable,
        // After its last step the search rejected every operation, so its result means nothing.
        (false, 0) => Verdict::Undecided(Undecided::TooHard(limits.steps_max)),
        (false, _) => Verdict::Violated,
    };
    (verdict, limits.steps_max - left)
}

/// Converts the operations that matter for the verdict to entries of the search.
fn entries(operations: &[Operation]) -> Vec<Entry> {
    let seen = Dependencies::by(operations);
    let mut named: BTreeMap<Version, u32> = BTreeMap::new();
    for version in operations.iter().flat_map(|operation| names(&operation.ask, &operation.outcome)).flatten()
    {
        *named.entry(version).or_default() += 1;
    }
    let mut written: BTreeMap<Value, u32> = BTreeMap::new();
    let mut read: BTreeMap<Value, u32> = BTreeMap::new();
    for Operation { ask, outcome, .. } in operations {
        if let (Some(value), true) = (written_by(ask), *outcome != Outcome::Failed) {
            *written.entry(value).or_default() += 1;
        }
        if let Outcome::Found(value, _) = outcome {
            *read.entry(*value).or_default() += 1;
        }
    }
    let reads = |value: Value| if written.get(&value) == Some(&1) { read.get(&value).copied() } else { None };
    let times = |version: Version| named.get(&version).copied().unwrap_or(0);
    let matters = |operation: &&Operation| match operation.outcome {
        // An operation that was not carried out had no effect and returned nothing: it cannot make an order wrong.
        Outcome::Failed => false,
        // Ordered last, such an operation changes nothing. Ordered earlier, it explains no further outcome.
        Outcome::Unknown => !seen.nothing_of(operation),
        _ => true,
    };
    let entry = |operation: &Operation| {
        let expected = match operation.ask {
            Ask::CompareAndPut { expected, .. } => times(expected),
            _ => 0,
        };
        let reported = version_of(&operation.outcome).map_or(0, times);
        Entry {
            called: operation.called.index,
            end: end_of(operation),
            ended: 0,
            place: 0,
            ask: operation.ask,
            outcome: operation.outcome,
            expected,
            reported,
            reads: written_by(&operation.ask).and_then(reads).unwrap_or(0),
        }
    };
    let mut entries: Vec<Entry> = operations.iter().filter(matters).map(entry).collect();
    let is_unknown = |entry: &&Entry| entry.outcome == Outcome::Unknown;
    let mut ends: Vec<u64> = entries.iter().filter(is_unknown).map(|entry| entry.end).collect();
    ends.sort_unstable();
    for entry in &mut entries {
        entry.ended = ends.partition_point(|end| *end < entry.called);
        entry.place = ends.partition_point(|end| *end <= entry.end);
    }
    entries
}

/// An operation of the search, with its outcome and three counters:
/// - `expected`: number of outcomes that name the operation's expected version;
/// - `reported`: number of outcomes that name the operation's reported version;
/// - `reads`: number of reads that return the value which the operation writes, or 0 if another operation also writes
///   this value.
#[derive(Clone, Debug)]
struct Entry {
    /// Index of the event of the operation's call. `end` is the index of the event after which the operation has no
    /// more effect.
    called: u64,
    end: u64,
    /// Number of operations of unknown outcome whose ends precede the call.
    ended: usize,
    /// Number of operations of unknown outcome whose ends are not after this one's.
    place: usize,
    ask: Ask,
    outcome: Outcome,
    expected: u32,
    reported: u32,
    reads: u32,
}

impl Entry {
    fn span(&self) -> Span {
        let returned = match self.outcome {
            // An operation that has no effect is left out. One that has an effect must have it before its end;
            // `State::with_unknown_outcome` checks this.
            Outcome::Unknown if self.reads == 0 => None,
            Outcome::Unknown => Some(u64::MAX),
            _ => Some(self.end),
        };
        Span { called: self.called, returned }
    }
}

/// Returns the value that an operation may store.
pub(crate) fn written_by(ask: &Ask) -> Option<Value> {
    match *ask {
        Ask::Put(value) | Ask::PutIfAbsent(value) | Ask::CompareAndPut { value, .. } => Some(value),
        Ask::Get | Ask::Contains | Ask::Delete => None,
    }
}

/// Returns the version that an outcome reports, if any.
fn version_of(outcome: &Outcome) -> Option<Version> {
    match *outcome {
        Outcome::Found(_, version) | Outcome::Done(version) | Outcome::Conflict(version) => version,
        Outcome::Present | Outcome::Absent | Outcome::Failed | Outcome::Unknown => None,
    }
}

/// Returns the versions that a key had at the instant of an operation or just after it, according to the operation's
/// outcome.
fn names(ask: &Ask, outcome: &Outcome) -> [Option<Version>; 2] {
    let expected = match (ask, outcome) {
        (Ask::CompareAndPut { expected, .. }, Outcome::Done(_)) => Some(*expected),
        _ => None,
    };
    [expected, version_of(outcome)]
}

/// Facts about a key on which the outcomes of a set of operations depend.
#[derive(Default)]
struct Dependencies {
    values: BTreeSet<Value>,
    /// Operations whose outcome says that the key had a value or a version, but not which value.
    presence: Spans,
    /// Operations whose outcome says, or may say, that the key had no value.
    absence: Spans,
    /// Operations that certainly changed the key.
    changes: Spans,
}

impl Dependencies {
    fn by(operations: &[Operation]) -> Dependencies {
        let mut seen = Dependencies::default();
        for operation in operations {
            let Operation { ask, outcome, .. } = operation;
            let (presence, absence) = match (outcome, ask) {
                (Outcome::Found(..) | Outcome::Failed | Outcome::Unknown, _) => (false, false),
                (Outcome::Present, _) => (true, false),
                (Outcome::Absent, _) | (Outcome::Done(_), Ask::PutIfAbsent(_)) => (false, true),
                (Outcome::Done(_), Ask::Delete | Ask::CompareAndPut { .. }) => (true, false),
                (Outcome::Done(_), _) => (false, false),
                (Outcome::Conflict(version), _) => (true, version.is_none()),
            };
            if let Outcome::Found(value, _) = outcome {
                seen.values.insert(*value);
            }
            seen.presence.extend(presence.then_some(operation));
            seen.absence.extend(absence.then_some(operation));
            seen.changes.extend(matches!(outcome, Outcome::Done(_)).then_some(operation));
        }
        // An operation of unknown outcome whose effect was observed may itself depend on a present or an absent value.
        // Such a dependency may reveal another one; two rounds find all.
        for _ in 0..2 {
            let unknown = operations.iter().filter(|operation| operation.outcome == Outcome::Unknown);
            let (mut presence, mut absence) = (Vec::new(), Vec::new());
            for operation in unknown.filter(|operation| !seen.nothing_of(operation)) {
                match operation.ask {
                    Ask::PutIfAbsent(_) => absence.push(operation),
                    Ask::CompareAndPut { .. } => presence.push(operation),
                    Ask::Get | Ask::Contains | Ask::Put(_) | Ask::Delete => {}
                }
            }
            seen.presence.extend(presence);
            seen.absence.extend(absence);
        }
        seen
    }

    /// Returns whether the remaining operations of a correct history stay correct if this operation is removed. The
    /// operations between this one and the next change then observe the state before this one.
    fn nothing_of(&self, operation: &Operation) -> bool {
        // An operation that was called after a later change has ended observes that change, not this operation.
        let until = self.changes.first_end_after(end_of(operation));
        let is_seen = |spans: &Spans| spans.any(operation.called.index, until);
        match operation.ask {
            Ask::Get | Ask::Contains => true,
            Ask::Delete => !is_seen(&self.absence),
            Ask::Put(value) | Ask::PutIfAbsent(value) | Ask::CompareAndPut { value, .. } => {
                !self.values.contains(&value) && !is_seen(&self.presence)
            }
        }
    }
}

/// Returns the index of the event after which the operation has no more effect.
pub(crate) fn end_of(operation: &Operation) -> u64 {
    operation.returned.map_or(u64::MAX, |returned| returned.index)
}

/// Set of spans of operations. A span lasts from an operation's call to its end.
#[derive(Default)]
struct Spans {
    /// Maps the index of each operation's call to the index of the operation's end.
    spans: BTreeMap<u64, u64>,
}

impl Spans {
    fn extend<'a>(&mut self, operations: impl IntoIterator<Item = &'a Operation>) {
        self.spans
            .extend(operations.into_iter().map(|operation| (operation.called.index, end_of(operation))));
    }

    /// Whether any operation was called before `until` and ended after `from`.
    fn any(&self, from: u64, until: u64) -> bool {
        self.spans.range(..until).rev().any(|(_, &end)| end > from)
    }

    /// Returns the earliest end of the operations called after `index`.
    fn first_end_after(&self, index: u64) -> u64 {
        let later = index.checked_add(1).map(|next| self.spans.range(next..));
        later.and_then(|later| later.map(|(_, &end)| end).min()).unwrap_or(u64::MAX)
    }
}

/// State of the key during the search. `over` holds versions that past installs may have had although no outcome names
/// them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    install: Option<Install>,
    over: BTreeSet<Version>,
    /// Number of operations of unknown outcome that ended before the latest call among the ordered operations. They can
    /// have no more effect. The index of the call itself would make states differ that are alike in all that follows.
    ended: usize,
}

/// A value that an operation installed in a key. Its version is known once an outcome names the version.
///
/// An install may end only after all outcomes that name its version are ordered. So no version occurs twice, and a
/// state need not remember past versions.
///
/// Likewise, the install of a value that only one operation writes ends only after all reads of this value are ordered.
/// This rule is not needed for correctness: it ends hopeless searches early.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Install {
    value: Value,
    version: Option<Version>,
    /// Number of outcomes that name the install's version and are not ordered yet.
    named_later: u32,
    /// Number of reads of the value that are not ordered yet; 0 if another install can have this value.
    read_later: u32,
    /// Versions that the install is known not to have.
    not: BTreeSet<Version>,
}

impl Install {
    fn new(value: Value, version: Option<Version>, times: u32, reads: u32) -> Install {
        let named_later = times.saturating_sub(1);
        Install { value, version, named_later, read_later: reads, not: BTreeSet::new() }
    }

    fn read(mut self) -> Install {
        self.read_later = self.read_later.saturating_sub(1);
        self
    }

    /// Applies an outcome that names the install's version. In total, `times` outcomes name this version.
    fn named(mut self, version: Version, times: u32) -> Option<Install> {
        match self.version {
            Some(known) if known == version => self.named_later = self.named_later.checked_sub(1)?,
            Some(_) => return None,
            None if self.not.contains(&version) => return None,
            None => (self.version, self.named_later) = (Some(version), times - 1),
        }
        Some(self)
    }

    fn maybe_named(self, version: Option<Version>, times: u32) -> Option<Install> {
        match version {
            Some(version) => self.named(version, times),
            None => Some(self),
        }
    }

    /// Applies an outcome which says that the install's version is not `version`.
    fn not_named(mut self, version: Version) -> Option<Install> {
        match self.version {
            Some(known) if known == version => return None,
            Some(_) => {}
            None => drop(self.not.insert(version)),
        }
        Some(self)
    }
}

impl State {
    /// Whether the present install may end now: every outcome that names its version, and every read of its value, is
    /// ordered.
    fn may_end(&self) -> bool {
        self.install.as_ref().is_none_or(|install| install.named_later == 0 && install.read_later == 0)
    }

    /// Returns the state after an operation with a known outcome, or `None` if the operation cannot have this outcome
    /// in this state.
    fn with_outcome(mut self, entry: &Entry) -> Option<State> {
        let Entry { ask, outcome, expected: expected_times, reported: told_times, reads, .. } = *entry;
        self.ended = self.ended.max(entry.ended);
        self.install = match (ask, outcome) {
            (Ask::Get, Outcome::Found(value, version)) => {
                let install = self.install.filter(|install| install.value == value)?;
                Some(install.read().maybe_named(version, told_times)?)
            }
            (Ask::Put(value), Outcome::Done(version)) if self.may_end() => {
                Some(Install::new(value, version, told_times, reads))
            }
            (Ask::Delete, Outcome::Done(_)) if self.install.is_some() && self.may_end() => None,
            (Ask::PutIfAbsent(value), Outcome::Done(version)) if self.install.is_none() => {
                Some(Install::new(value, version, told_times, reads))
            }
            (Ask::CompareAndPut { expected, value }, Outcome::Done(version)) => {
                self.install = Some(self.install?.named(expected, expected_times)?);
                self.may_end().then(|| Install::new(value, version, told_times, reads)).map(Some)?
            }
            (Ask::Contains, Outcome::Present) => Some(self.install?),
            (Ask::Get | Ask::Contains | Ask::Delete | Ask::CompareAndPut { .. }, Outcome::Absent)
                if self.install.is_none() =>
            {
                None
            }
            (Ask::PutIfAbsent(_), Outcome::Conflict(version)) => {
                Some(self.install?.maybe_named(version, told_times)?)
            }
            (Ask::CompareAndPut { .. }, Outcome::Conflict(Some(version))) => {
                Some(self.install?.named(version, told_times)?)
            }
            (Ask::CompareAndPut { expected, .. }, Outcome::Conflict(None)) => match self.install {
                Some(install) => Some(install.not_named(expected)?),
                None => None,
            },
            _ => return None,
        };
        Some(self)
    }

    /// Returns the state after an operation of unknown outcome. The operation takes effect if the state allows it.
    ///
    /// An operation that never took effect is left out of the order. So this returns `None` if the operation cannot
    /// take effect here any more, or if a read returned a value that this operation alone wrote.
    fn with_unknown_outcome(mut self, entry: &Entry) -> Option<State> {
        if self.ended >= entry.place {
            return None;
        }
        self.ended = self.ended.max(entry.ended);
        let install = |value| Some(Install::new(value, None, 0, entry.reads));
        match entry.ask {
            Ask::Put(value) if self.may_end() => self.install = install(value),
            Ask::Delete if self.may_end() => self.install = None,
            Ask::PutIfAbsent(value) if self.install.is_none() => self.install = install(value),
            Ask::CompareAndPut { expected, value } if self.may_end() => match &self.install {
                Some(now) if now.version == Some(expected) => self.install = install(value),
                // The install may have the expected version if no outcome says when the key had this version, and no
                // past install had it.
                Some(now)
                    if now.version.is_none()
                        && entry.expected == 0
                        && !now.not.contains(&expected)
                        && self.over.insert(expected) =>
                {
                    self.install = install(value);
                }
                _ if entry.reads > 0 => return None,
                _ => {}
            },
            _ if entry.reads > 0 => return None,
            _ => {}
        }
        Some(self)
    }
}

/// Violation: a few operations of one key that no order explains.
pub type Violation = crate::checker::Violation<Ask>;

/// Maximum number of searches to shrink a violation.
const SEARCHES_MAX: u32 = 5_000;

/// Returns the violation of a key, or `None` if no violation is known. The violation has as few operations as the
/// search can find.
///
/// First, the function cuts the history after the first impossible outcome. Then it removes operations while the
/// history stays wrong: operations without an effect, and operations whose effect no remaining outcome depends on. If
/// the history were correct, it would stay correct without the removed operations. So the remaining operations are
/// wrong for the same reason as the whole history.
pub fn explain(history: &History, key: u64, limits: Limits) -> Option<Violation> {
    let of_key = history.operations().iter().filter(|operation| operation.key == key);
    explain_key(key, of_key.copied().collect(), limits)
}

/// As [`explain`], with the operations of the key.
pub(crate) fn explain_key(key: u64, mut operations: Vec<Operation>, limits: Limits) -> Option<Violation> {
    let of = operations.len();
    let is_wrong = |operations: &[Operation]| check_key(operations, limits).0 == Verdict::Violated;
    if !is_wrong(&operations) {
        return None;
    }
    let mut searches_left = SEARCHES_MAX;
    loop {
        let before = operations.len();
        operations = shrunk(shortest_prefix(operations, is_wrong), is_wrong, &mut searches_left);
        if operations.len() == before || searches_left == 0 {
            break;
        }
    }
    operations = shortest_prefix(operations, is_wrong);
    let (offender, _) = operations
        .iter()
        .enumerate()
        .filter_map(|(at, operation)| Some((at, operation.returned?)))
        .max_by_key(|(_, returned)| returned.index)
        .expect("without any return, every order explains the history");
    let instead = instead(&operations, offender, limits);
    let what = format!("key {key} is not linearizable");
    Some(Violation { what, operations, offender, instead, of })
}

/// Returns the operations of a history up to the event with this index.
fn until(operations: &[Operation], index: u64) -> Vec<Operation> {
    let known = operations.iter().filter(|operation| operation.called.index <= index);
    let cut = |operation: &Operation| match operation.returned {
        Some(returned) if returned.index <= index => *operation,
        _ => Operation { returned: None, outcome: Outcome::Unknown, ..*operation },
    };
    known.map(cut).collect()
}

/// Cuts the history after the first outcome that makes it wrong. This outcome is found by bisection, since a wrong
/// history stays wrong when events are appended.
fn shortest_prefix(operations: Vec<Operation>, is_wrong: impl Fn(&[Operation]) -> bool) -> Vec<Operation> {
    let mut returns: Vec<u64> =
        operations.iter().filter_map(|operation| Some(operation.returned?.index)).collect();
    returns.sort_unstable();
    let first = returns.partition_point(|&index| !is_wrong(&until(&operations, index)));
    let cut = returns.get(first).map(|&index| until(&operations, index));
    // Bisection can fail only if a search was stopped early.
    cut.filter(|cut| is_wrong(cut)).unwrap_or(operations)
}

/// Removes operations while the history stays wrong: first in large blocks, then in smaller ones.
fn shrunk(
    mut operations: Vec<Operation>,
    is_wrong: impl Fn(&[Operation]) -> bool,
    searches_left: &mut u32,
) -> Vec<Operation> {
    let mut size = operations.len().next_power_of_two();
    while size > 0 {
        let before = operations.len();
        let mut end = operations.len();
        while end > 0 {
            let start = end.saturating_sub(size);
            let fewer = without(&operations, start, end);
            if fewer.len() < operations.len() && *searches_left > 0 {
                *searches_left -= 1;
                if is_wrong(&fewer) {
                    operations = fewer;
                }
            }
            end = start;
        }
        if size > 1 || operations.len() == before || *searches_left == 0 {
            size /= 2;
        }
    }
    operations
}

/// Removes, from the operations with indices from `start` to `end`, those without which a correct history stays
/// correct.
fn without(operations: &[Operation], start: usize, end: usize) -> Vec<Operation> {
    let is_among = |at: usize| (start..end).contains(&at);
    let changes = |operation: &Operation| match operation.outcome {
        Outcome::Found(..) | Outcome::Present | Outcome::Absent | Outcome::Conflict(_) | Outcome::Failed => {
            false
        }
        Outcome::Done(_) | Outcome::Unknown => !operation.ask.is_read(),
    };
    let rest = operations.iter().enumerate().filter(|(at, operation)| !is_among(*at) || changes(operation));
    let (places, rest): (Vec<usize>, Vec<Operation>) = rest.map(|(at, operation)| (at, *operation)).unzip();
    let seen = Dependencies::by(&rest);
    let stays = |(at, operation): &(usize, Operation)| !is_among(*at) || !seen.nothing_of(operation);
    places.into_iter().zip(rest).filter(stays).map(|(_, operation)| operation).collect()
}

/// Returns the outcomes that, in place of its own, would make the offending operation correct.
fn instead(operations: &[Operation], offender: usize, limits: Limits) -> Vec<Outcome> {
    let Operation { ask, outcome, .. } = operations[offender];
    let values: BTreeSet<Value> =
        operations.iter().filter_map(|operation| written_by(&operation.ask)).collect();
    let found = values.into_iter().map(|value| Outcome::Found(value, None));
    let others = [Outcome::Present, Outcome::Absent, Outcome::Done(None), Outcome::Conflict(None)];
    let without_version = match outcome {
        Outcome::Found(value, _) => Outcome::Found(value, None),
        Outcome::Done(_) => Outcome::Done(None),
        Outcome::Conflict(_) => Outcome::Conflict(None),
        other => other,
    };
    let could_be = |other: &Outcome| {
        let mut operations = operations.to_vec();
        operations[offender].outcome = *other;
        ask.can_have(other)
            && *other != without_version
            && check_key(&operations, limits).0 == Verdict::Linearizable
    };
    found.chain(others).filter(could_be).collect()
}

impl fmt::Display for Undecided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Undecided::TooLong(count) => {
                write!(f, "{count} operations on one key are too many: shorten the run, or use more keys")
            }
            Undecided::TooHard(steps) => write!(
                f,
                "the search was stopped after {steps} steps: use more keys, or fewer concurrent clients and crashes"
            ),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { keys, operations, steps, violated, undecided } = self;
        write!(f, "{operations} operations of {keys} keys, {steps} steps: ")?;
        if self.is_linearizable() {
            return f.write_str("linearizable");
        }
        if !violated.is_empty() {
            write!(f, "not linearizable: keys {violated:?}")?;
        }
        for (at, (key, why)) in undecided.iter().enumerate() {
            let before = if at == 0 && violated.is_empty() { "" } else { "; " };
            write!(f, "{before}undecided: key {key}: {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Moment;

    /// Returns a correct history. Its operations take effect one after the other; each is called before its effect and
    /// returns after it. Then the outcomes of some operations are made unknown.
    fn right(draw: &mut impl FnMut(u64) -> u64) -> Vec<Operation> {
        let (mut now, mut version): (Option<(Value, u64)>, u64) = (None, 0);
        let moment = |index| Moment { index, ns: index };
        let mut operations: Vec<Operation> = (0..12)
            .map(|at: u64| {
                let value = Value { tag: draw(3), len: 1 };
                let reported = (draw(2) == 0).then_some(Version(version));
                let (ask, outcome) = match (draw(7), now) {
                    (6, Some(_)) => (Ask::Contains, Outcome::Present),
                    (6, None) => (Ask::Contains, Outcome::Absent),
                    (0 | 1, Some((value, _))) => (Ask::Get, Outcome::Found(value, reported)),
                    (0 | 1, None) => (Ask::Get, Outcome::Absent),
                    (2, _) => (Ask::Put(value), Outcome::Done(None)),
                    (3, None) => (Ask::Delete, Outcome::Absent),
                    (3, Some(_)) => (Ask::Delete, Outcome::Done(None)),
                    (4, None) => (Ask::PutIfAbsent(value), Outcome::Done(None)),
                    (4, Some(_)) => (Ask::PutIfAbsent(value), Outcome::Conflict(reported)),
                    (_, Some(_)) if draw(2) == 0 => {
                        (Ask::CompareAndPut { expected: Version(version), value }, Outcome::Done(None))
                    }
                    (_, Some(_)) => (
                        Ask::CompareAndPut { expected: Version(version + 9), value },
                        Outcome::Conflict(reported),
                    ),
                    (_, None) => (Ask::CompareAndPut { expected: Version(version), value }, Outcome::Absent),
                };
                match (ask, outcome) {
                    (Ask::Delete, Outcome::Done(_)) => now = None,
                    (_, Outcome::Done(_)) => {
                        version += 1;
                        now = Some((value, version));
                    }
                    _ => {}
                }
                let effect = 1_000 + at * 100;
                let (called, returned) = (effect - draw(4) * 100 - at, effect + draw(4) * 100 + at + 1);
                let is_forgotten = draw(6) == 0;
                Operation {
                    client: at as u32,
                    key: 0,
                    ask,
                    called: moment(called),
                    returned: (!is_forgotten).then(|| moment(returned)),
                    outcome: if is_forgotten { Outcome::Unknown } else { outcome },
                }
            })
            .collect();
        operations.sort_by_key(|operation| operation.called.index);
        operations
    }

    #[test]
    fn removing_removable_operations_keeps_a_history_correct() {
        let mut state = 1_u64;
        let mut draw = |end: u64| {
            // Knuth's MMIX generator. Its upper bits are random enough.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % end
        };
        let (mut taken, mut of) = (0, 0);
        for round in 0..20_000 {
            let operations = right(&mut draw);
            assert_eq!(check_key(&operations, Limits::default()).0, Verdict::Linearizable, "{operations:#?}");
            let start = draw(12) as usize;
            let end = start + 1 + draw(12 - start as u64) as usize;
            let fewer = without(&operations, start, end);
            let verdict = check_key(&fewer, Limits::default()).0;
            assert_eq!(verdict, Verdict::Linearizable, "round {round}: {start}..{end} of {operations:#?}");
            taken += operations.len() - fewer.len();
            of += end - start;
        }
        assert!(taken * 2 > of, "{taken} of {of} were removed");
    }
}
