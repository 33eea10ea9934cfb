//! Workloads of transactions: what clients ask for, the amounts that they write, and what must hold of the amounts.
//!
//! An invariant is checked without any graph, from what single transactions read. So it confirms the checker, and finds
//! errors in the values themselves.
//!
//! Invariant: each write that is drawn has a tag of its own.

use crate::checker::{Checked, Violation};
use crate::history::transaction::{Ask, History, Operation, Outcome, Seen, Step};
use crate::random::Random;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Reads, writes, updates and deletes of one to three registers.
    Registers {
        /// Number of keys.
        keys: u64,
    },
    /// Reads of and appends to one to three lists.
    Lists {
        /// Number of keys.
        keys: u64,
    },
    /// Transfers between accounts, and reads of all accounts. The sum of all accounts stays the same.
    Bank {
        /// Number of accounts.
        accounts: u64,
    },
    /// Pairs of keys, of which at least one is on. A transaction turns a key off only if it has read that the other one
    /// is on. Keys 2n and 2n + 1 are a pair.
    Pairs {
        /// Number of pairs.
        pairs: u64,
    },
}

/// Amount of an account without a value.
pub const ACCOUNT_START: i64 = 10;
/// Amount of a key that is on, which is that of a key without a value.
pub const ON: i64 = 1;

impl Workload {
    /// Draws a transaction. `tag` is the last tag that was given.
    pub fn draw(&self, random: &Random, tag: &mut u64) -> Ask {
        let mut next = || {
            *tag += 1;
            *tag
        };
        let mut steps = Vec::new();
        match *self {
            Workload::Registers { keys } => {
                for _ in 0..random.between(1, 3) {
                    let key = random.below(keys);
                    match random.below(5) {
                        0 | 1 => steps.push(Step::Read(key)),
                        2 => steps.push(Step::Write { key, tag: next() }),
                        3 => steps.extend([Step::Read(key), Step::Write { key, tag: next() }]),
                        _ if random.one_in(3) => steps.push(Step::Delete(key)),
                        _ => steps.push(Step::Read(key)),
                    }
                }
            }
            Workload::Lists { keys } => {
                for _ in 0..random.between(1, 3) {
                    let key = random.below(keys);
                    let is_read = random.one_in(2);
                    steps.push(if is_read { Step::Read(key) } else { Step::Append { key, tag: next() } });
                }
            }
            Workload::Bank { accounts } if random.one_in(4) => steps.extend((0..accounts).map(Step::Read)),
            Workload::Bank { accounts } => {
                let from = random.below(accounts);
                let to = (from + 1 + random.below(accounts - 1)) % accounts;
                steps.extend([Step::Read(from), Step::Read(to)]);
                steps.extend([from, to].map(|key| Step::Write { key, tag: next() }));
            }
            Workload::Pairs { pairs } => {
                let key = random.below(2 * pairs);
                steps.extend([key, key ^ 1].map(Step::Read));
                if !random.one_in(4) {
                    steps.push(Step::Write { key, tag: next() });
                }
            }
        }
        Ask(steps)
    }

    /// Returns the amount that a key has without a value.
    pub fn start(&self) -> i64 {
        match self {
            Workload::Registers { .. } | Workload::Lists { .. } => 0,
            Workload::Bank { .. } => ACCOUNT_START,
            Workload::Pairs { .. } => ON,
        }
    }

    /// Returns the amounts for the transaction's writes, from the amounts that it has read, or `None` if it must not
    /// commit.
    pub fn amounts(&self, ask: &Ask, read: &[i64]) -> Option<Vec<i64>> {
        let writes = ask.0.iter().filter_map(|step| match step {
            Step::Write { tag, .. } => Some(*tag),
            Step::Read(_) | Step::Delete(_) | Step::Append { .. } => None,
        });
        let tags: Vec<u64> = writes.collect();
        match (self, &tags[..], read) {
            (_, [], _) => Some(Vec::new()),
            (Workload::Bank { .. }, [tag, _], [from, to]) => {
                let amount = (tag % 5) as i64 + 1;
                (*from >= amount).then(|| vec![from - amount, to + amount])
            }
            (Workload::Pairs { .. }, [_], [own, _]) if *own != ON => Some(vec![ON]),
            (Workload::Pairs { .. }, [_], [_, other]) => (*other == ON).then(|| vec![0]),
            (_, tags, _) => Some(vec![0; tags.len()]),
        }
    }

    /// Checks the invariant of the amounts, in all that committed transactions have read.
    pub fn check(&self, history: &History) -> Checked<Ask> {
        let mut checked = Checked::default();
        for operation in history.operations() {
            let Some(what) = self.wrong(operation) else { continue };
            let by = format!("client {} at {} ns", operation.client, operation.called.ns);
            checked.violated.push(format!("{by}: {what}"));
            let operations = vec![operation.clone()];
            let of = history.operations().len();
            checked.window.get_or_insert(Violation {
                what,
                operations,
                offender: 0,
                instead: Vec::new(),
                of,
            });
        }
        checked
    }

    /// Returns what is wrong with the amounts that a committed transaction has read, if anything.
    fn wrong(&self, operation: &Operation) -> Option<String> {
        let Outcome::Committed(seen) = &operation.outcome else { return None };
        let reads = operation.ask.0.iter().zip(seen).filter_map(|(step, seen)| match (step, seen) {
            (Step::Read(_), Seen::Value { amount, .. }) => Some(*amount),
            (Step::Read(_), Seen::Absent { .. }) => Some(self.start()),
            _ => None,
        });
        let amounts: Vec<i64> = reads.collect();
        let sum: i64 = amounts.iter().sum();
        match *self {
            Workload::Bank { accounts }
                if amounts.len() as u64 == accounts && operation.ask.0.len() as u64 == accounts =>
            {
                let expected = ACCOUNT_START * accounts as i64;
                (sum != expected).then(|| format!("the accounts have {sum} in all, not {expected}"))
            }
            Workload::Pairs { .. } if amounts.len() == 2 => {
                (sum < ON).then(|| "both keys of a pair are off".to_owned())
            }
            Workload::Registers { .. }
            | Workload::Lists { .. }
            | Workload::Bank { .. }
            | Workload::Pairs { .. } => None,
        }
    }
}
