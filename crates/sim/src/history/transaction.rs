//! Operations and outcomes of transactions. One operation of a history is one transaction, with all of its steps.
//!
//! Invariant: a tag identifies a value. No two writes and no two appends of a history have the same tag.

use super::lines::{self, Event, Kind, Written};
use super::record_word;
use serde::Serialize;
use std::fmt;
use std::io::{self, Write};

/// History of transactions.
pub type History = super::History<Ask>;
/// Transaction, with its client, times and outcome.
pub type Operation = super::Operation<Ask>;

/// A step of a transaction. A key is either a register or a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Reads a key.
    Read(u64),
    /// Stores the value with this tag in a register.
    Write {
        /// The register.
        key: u64,
        /// Tag of the value.
        tag: u64,
    },
    /// Deletes a register's value.
    Delete(u64),
    /// Appends the element with this tag to a list.
    Append {
        /// The list.
        key: u64,
        /// Tag of the element.
        tag: u64,
    },
}

impl Step {
    /// Key of the step.
    pub fn key(self) -> u64 {
        match self {
            Step::Read(key) | Step::Delete(key) | Step::Write { key, .. } | Step::Append { key, .. } => key,
        }
    }
}

/// A transaction, as its client asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ask(pub Vec<Step>);

/// What a committed transaction has learned by one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// A read found the value with this tag.
    Value {
        /// Tag of the value.
        tag: u64,
        /// Version that the value's writer gave it.
        version: u64,
        /// Amount in the value, for workloads that compute with values.
        amount: i64,
    },
    /// A read found no value.
    Absent {
        /// Version at which there was no value: that of the last delete or a later one; 0 if there was no delete.
        version: u64,
    },
    /// A read found the list with these elements.
    List(Vec<u64>),
    /// A write or a delete was carried out.
    Wrote {
        /// Version of the value, or of its absence. Versions of a key are in the order of its writes.
        version: u64,
        /// Amount in the value.
        amount: i64,
    },
    /// An append was carried out.
    Appended,
}

/// Outcome of a transaction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It was committed, and learned this by its steps, in their order.
    Committed(Vec<Seen>),
    /// It was aborted, and has no effect.
    Failed,
    /// It may or may not have been committed.
    Unknown,
}

impl super::Ask for Ask {
    type Outcome = Outcome;

    fn can_have(&self, outcome: &Outcome) -> bool {
        let Outcome::Committed(seen) = outcome else { return true };
        let fits = |(step, seen): (&Step, &Seen)| match step {
            Step::Read(_) => matches!(seen, Seen::Value { .. } | Seen::Absent { .. } | Seen::List(_)),
            Step::Write { .. } | Step::Delete(_) => matches!(seen, Seen::Wrote { .. }),
            Step::Append { .. } => matches!(seen, Seen::Appended),
        };
        self.0.len() == seen.len() && self.0.iter().zip(seen).all(fits)
    }

    fn is_read(&self) -> bool {
        self.0.iter().all(|step| matches!(step, Step::Read(_)))
    }

    fn record(&self, out: &mut Vec<u8>) {
        record_word(Some(self.0.len() as u64), out);
        for step in &self.0 {
            let (kind, tag) = match *step {
                Step::Read(_) => (0, None),
                Step::Write { tag, .. } => (1, Some(tag)),
                Step::Delete(_) => (2, None),
                Step::Append { tag, .. } => (3, Some(tag)),
            };
            out.push(kind);
            record_word(Some(step.key()), out);
            record_word(tag, out);
        }
    }
}

impl super::Outcome for Outcome {
    const UNKNOWN: Outcome = Outcome::Unknown;
    const FAILED: Outcome = Outcome::Failed;

    fn record(&self, out: &mut Vec<u8>) {
        let seen = match self {
            Outcome::Committed(seen) => {
                out.push(0);
                record_word(Some(seen.len() as u64), out);
                seen
            }
            Outcome::Failed => return out.push(1),
            Outcome::Unknown => return out.push(2),
        };
        for seen in seen {
            let (kind, words) = match seen {
                Seen::Value { tag, version, amount } => (0, vec![*tag, *version, *amount as u64]),
                Seen::Absent { version } => (1, vec![*version]),
                Seen::List(tags) => (2, [&[tags.len() as u64], &tags[..]].concat()),
                Seen::Wrote { version, amount } => (3, vec![*version, *amount as u64]),
                Seen::Appended => (4, Vec::new()),
            };
            out.push(kind);
            words.into_iter().for_each(|word| record_word(Some(word), out));
        }
    }
}

/// Kind of all operations, as named on lines.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Function {
    /// A transaction.
    Txn,
}

/// Fields of a line of a transaction.
#[derive(Serialize)]
pub struct Fields {
    value: Vec<(&'static str, u64, Content)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    versions: Option<Vec<Option<u64>>>,
}

/// The third part of a step on a line: a tag, the elements of a list, or null.
#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    Tag(u64),
    List(Vec<u64>),
    Nothing(()),
}

/// Returns the name of a step, its key, and its content: as asked, or as seen.
fn micro(step: Step, seen: Option<&Seen>) -> (&'static str, u64, Content) {
    match (step, seen) {
        (Step::Read(key), Some(Seen::Value { tag, .. })) => ("r", key, Content::Tag(*tag)),
        (Step::Read(key), Some(Seen::List(tags))) => ("r", key, Content::List(tags.clone())),
        (Step::Read(key), _) => ("r", key, Content::Nothing(())),
        (Step::Write { key, tag }, _) => ("w", key, Content::Tag(tag)),
        (Step::Delete(key), _) => ("w", key, Content::Nothing(())),
        (Step::Append { key, tag }, _) => ("append", key, Content::Tag(tag)),
    }
}

/// Returns the steps of a transaction: as asked, or as seen if it was committed.
fn micros(ask: &Ask, outcome: Option<&Outcome>) -> Vec<(&'static str, u64, Content)> {
    let seen = |at: usize| match outcome {
        Some(Outcome::Committed(seen)) => seen.get(at),
        _ => None,
    };
    ask.0.iter().enumerate().map(|(at, step)| micro(*step, seen(at))).collect()
}

impl Written for Ask {
    type Function = Function;
    type Fields = Fields;

    fn function(&self) -> Function {
        Function::Txn
    }

    fn asked(&self) -> Fields {
        Fields { value: micros(self, None), versions: None }
    }

    fn answered(&self, outcome: &Outcome) -> (Kind, Fields) {
        let version = |seen: &Seen| match seen {
            Seen::Value { version, .. } | Seen::Absent { version } | Seen::Wrote { version, .. } => {
                Some(*version)
            }
            Seen::List(_) | Seen::Appended => None,
        };
        match outcome {
            Outcome::Committed(seen) => {
                let versions = seen.iter().map(version).collect();
                (Kind::Ok, Fields { value: micros(self, Some(outcome)), versions: Some(versions) })
            }
            Outcome::Failed => (Kind::Fail, self.asked()),
            Outcome::Unknown => (Kind::Info, self.asked()),
        }
    }
}

/// Writes a history to `out` as EDN, one event per line: the form that Elle reads as `list-append` or `rw-register`.
///
/// Elle has no deletes: a delete is a write of `nil`. Elle's registers have no versions either, so Elle must infer the
/// order of writes that this history knows.
///
/// # Errors
/// Returns the errors of `out`.
pub fn write_edn(history: &History, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    lines::each_event(history, |event: Event<'_, Ask>| {
        let Event { operation, process, moment, is_return } = event;
        let (kind, outcome) = match (&operation.outcome, is_return) {
            (_, false) => ("invoke", None),
            (outcome @ Outcome::Committed(_), true) => ("ok", Some(outcome)),
            (Outcome::Failed, true) => ("fail", None),
            (Outcome::Unknown, true) => ("info", None),
        };
        let steps: Vec<String> = micros(&operation.ask, outcome)
            .into_iter()
            .map(|(name, key, content)| match content {
                Content::Tag(tag) => format!("[:{name} {key} {tag}]"),
                Content::List(tags) => format!("[:{name} {key} [{}]]", spaced(&tags)),
                Content::Nothing(()) => format!("[:{name} {key} nil]"),
            })
            .collect();
        writeln!(
            out,
            "{{:index {}, :type :{kind}, :process {process}, :f :txn, :value [{}], :time {}}}",
            moment.index,
            steps.join(" "),
            moment.ns
        )
    })
}

fn spaced(tags: &[u64]) -> String {
    tags.iter().map(u64::to_string).collect::<Vec<String>>().join(" ")
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Read(key) => write!(f, "read {key}"),
            Step::Write { key, tag } => write!(f, "write {key} #{tag}"),
            Step::Delete(key) => write!(f, "delete {key}"),
            Step::Append { key, tag } => write!(f, "append {key} #{tag}"),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<String> = self.0.iter().map(Step::to_string).collect();
        f.write_str(&steps.join(", "))
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Seen::Value { tag, version, .. } => write!(f, "#{tag} v{version}"),
            Seen::Absent { version } => write!(f, "absent v{version}"),
            Seen::List(tags) => write!(f, "[{}]", spaced(tags)),
            Seen::Wrote { version, .. } => write!(f, "v{version}"),
            Seen::Appended => f.write_str("done"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Committed(seen) => {
                let seen: Vec<String> = seen.iter().map(Seen::to_string).collect();
                write!(f, "committed: {}", seen.join(", "))
            }
            Outcome::Failed => f.write_str("aborted"),
            Outcome::Unknown => f.write_str("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Ask as _;

    /// A history of two clients, with each kind of step and of outcome.
    fn history() -> History {
        let mut history = History::new();
        let append = Ask(vec![Step::Read(1), Step::Append { key: 1, tag: 7 }]);
        let registers =
            Ask(vec![Step::Read(2), Step::Read(3), Step::Write { key: 2, tag: 8 }, Step::Delete(3)]);
        let first = history.call(0, 0, append.clone(), 5);
        let second = history.call(0, 0, registers.clone(), 6);
        history.returned(first, Outcome::Committed(vec![Seen::List(vec![4, 5]), Seen::Appended]), 9);
        let wrote = Seen::Wrote { version: 12, amount: 3 };
        let found = [Seen::Value { tag: 6, version: 11, amount: 2 }, Seen::Absent { version: 0 }];
        history.returned(second, Outcome::Committed([&found[..], &[wrote.clone(), wrote]].concat()), 10);
        let third = history.call(1, 0, append, 11);
        history.returned(third, Outcome::Failed, 12);
        let fourth = history.call(0, 0, registers, 13);
        history.returned(fourth, Outcome::Unknown, 14);
        history
    }

    #[test]
    fn a_history_is_written_as_elle_reads_it() {
        let mut out = Vec::new();
        write_edn(&history(), &mut out).expect("writing to a Vec cannot fail");
        let expected = "\
{:index 0, :type :invoke, :process 0, :f :txn, :value [[:r 1 nil] [:append 1 7]], :time 5}
{:index 1, :type :invoke, :process 2, :f :txn, :value [[:r 2 nil] [:r 3 nil] [:w 2 8] [:w 3 nil]], :time 6}
{:index 2, :type :ok, :process 0, :f :txn, :value [[:r 1 [4 5]] [:append 1 7]], :time 9}
{:index 3, :type :ok, :process 2, :f :txn, :value [[:r 2 6] [:r 3 nil] [:w 2 8] [:w 3 nil]], :time 10}
{:index 4, :type :invoke, :process 1, :f :txn, :value [[:r 1 nil] [:append 1 7]], :time 11}
{:index 5, :type :fail, :process 1, :f :txn, :value [[:r 1 nil] [:append 1 7]], :time 12}
{:index 6, :type :invoke, :process 0, :f :txn, :value [[:r 2 nil] [:r 3 nil] [:w 2 8] [:w 3 nil]], :time 13}
{:index 7, :type :info, :process 0, :f :txn, :value [[:r 2 nil] [:r 3 nil] [:w 2 8] [:w 3 nil]], :time 14}
";
        assert_eq!(String::from_utf8(out).expect("text"), expected);
        let document = include_str!("../../../../docs/sim-histories.md");
        let samples: Vec<&str> = document.lines().filter(|line| line.starts_with("{:")).collect();
        assert_eq!(samples, expected.lines().skip(2).take(2).collect::<Vec<&str>>());
    }

    #[test]
    fn a_history_is_written_as_json_lines() {
        let mut out = Vec::new();
        lines::write(&history(), &mut out).expect("writing to a Vec cannot fail");
        let text = String::from_utf8(out).expect("JSON is text");
        let line = text.lines().nth(3).expect("a line");
        assert_eq!(
            line,
            "{\"index\":3,\"type\":\"ok\",\"process\":2,\"client\":0,\"f\":\"txn\",\"key\":0,\
             \"value\":[[\"r\",2,6],[\"r\",3,null],[\"w\",2,8],[\"w\",3,null]],\"versions\":[11,0,12,12],\"time\":10}"
        );
    }

    #[test]
    fn outcomes_fit_their_transactions_and_are_in_the_digest() {
        let ask = Ask(vec![Step::Read(1), Step::Write { key: 1, tag: 7 }]);
        let outcome = |tag, version| {
            let read = Seen::Value { tag, version, amount: 0 };
            Outcome::Committed(vec![read, Seen::Wrote { version: 9, amount: 0 }])
        };
        assert!(ask.can_have(&outcome(5, 3)) && ask.can_have(&Outcome::Unknown));
        assert!(!ask.can_have(&Outcome::Committed(vec![Seen::Appended, Seen::Appended])));
        assert!(!ask.can_have(&Outcome::Committed(Vec::new())));
        let digest = |outcome: Outcome| {
            let mut history = History::new();
            let id = history.call(0, 0, ask.clone(), 0);
            history.returned(id, outcome, 1);
            history.digest()
        };
        let mut digests =
            [outcome(5, 3), outcome(6, 3), outcome(5, 4), Outcome::Failed, Outcome::Unknown].map(digest);
        digests.sort_unstable();
        assert!(digests.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
