//! A world: the transactions of a few clients, the keys, the recoverers, and the rules. Also its state, and its steps.

use super::log::Entry;
use super::program::{Op, Program};
use super::rules::{Ids, Rules};
use super::slot::{Slot, Timestamp};
use super::{client, judge, recoverer, words};
use crate::explore::Model;
use std::fmt;
use zerocopy::{Immutable, IntoBytes};

/// Largest number of keys.
pub const KEYS: usize = 3;
/// Largest number of shards.
pub const SHARDS: usize = 3;
/// Largest number of lanes.
pub const LANES: usize = 4;
/// Largest number of lanes of one client that has a recoverer.
pub const LANES_RECOVERED: usize = 2;
/// Largest number of transactions.
pub const TRANSACTIONS: usize = 5;
/// Largest number of recoverers.
pub const RECOVERERS: usize = 3;

/// A transaction: the keys that it reads and writes, and the client's clock when it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Keys that it reads.
    pub reads: Vec<usize>,
    /// Keys that it writes.
    pub writes: Vec<usize>,
    /// The client's local clock.
    pub clock: u8,
    /// Whether the reads are transactions of one key each, which do not prepare.
    pub is_single_reads: bool,
}

fn keys(names: &str) -> Vec<usize> {
    names.bytes().map(|name| usize::from(name - b'a')).collect()
}

/// A transaction that writes these keys, and reads none. Keys are letters from `a` on.
pub fn writes(names: &str) -> Transaction {
    Transaction { reads: Vec::new(), writes: keys(names), clock: 1, is_single_reads: false }
}

/// A transaction that reads these keys.
pub fn reads(names: &str) -> Transaction {
    Transaction { reads: keys(names), ..writes("") }
}

/// A transaction that reads and writes these keys.
pub fn updates(names: &str) -> Transaction {
    Transaction { reads: keys(names), ..writes(names) }
}

/// Transactions that read one of these keys each, one after the other.
pub fn single_reads(names: &str) -> Transaction {
    Transaction { is_single_reads: true, ..reads(names) }
}

impl Transaction {
    /// Adds keys that the transaction writes.
    pub fn and_writes(self, names: &str) -> Transaction {
        Transaction { writes: keys(names), ..self }
    }

    /// Sets the client's clock.
    pub fn at(self, clock: u8) -> Transaction {
        Transaction { clock, ..self }
    }
}

/// Transactions that a client runs one after the other. A client may have several lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Number of the client.
    pub client: usize,
    /// The client whose id this client takes over, if any.
    pub succeeds: Option<usize>,
    /// The transactions.
    pub transactions: Vec<Transaction>,
}

/// A lane of a client with an id of its own.
pub fn lane(client: usize, transactions: impl Into<Vec<Transaction>>) -> Lane {
    Lane { client, succeeds: None, transactions: transactions.into() }
}

/// A lane of a client that takes over the id of another one, once that client is recovered.
pub fn successor(client: usize, of: usize, transactions: impl Into<Vec<Transaction>>) -> Lane {
    Lane { succeeds: Some(of), ..lane(client, transactions) }
}

/// Clients that run one transaction each.
pub fn each(transactions: impl IntoIterator<Item = Transaction>) -> Vec<Lane> {
    transactions.into_iter().enumerate().map(|(client, transaction)| lane(client, [transaction])).collect()
}

impl fmt::Display for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |keys: &[usize]| keys.iter().map(|key| words::key_name(*key)).collect::<String>();
        let (reads, writes) = (names(&self.reads), names(&self.writes));
        match (&reads[..], &writes[..]) {
            _ if self.is_single_reads => write!(f, "single reads {reads}")?,
            (_, "") => write!(f, "read {reads}")?,
            ("", _) => write!(f, "write {writes}")?,
            _ if reads == writes => write!(f, "update {writes}")?,
            _ => write!(f, "read {reads} write {writes}")?,
        }
        write!(f, " at {}", self.clock)
    }
}

impl fmt::Display for World {
    /// The keys of each shard, the transactions of each client, and the clients that are recovered.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shards: Vec<String> = self
            .shards
            .iter()
            .enumerate()
            .map(|(key, shard)| format!("{}{shard}", words::key_name(key)))
            .collect();
        f.write_str(&shards.join(" "))?;
        for lane in &self.lanes {
            let transactions: Vec<String> = lane.transactions.iter().map(Transaction::to_string).collect();
            write!(f, "; {}", words::letter(lane.client))?;
            if let Some(before) = lane.succeeds {
                write!(f, " after {}", words::letter(before))?;
            }
            write!(f, ": {}", transactions.join(", "))?;
        }
        for client in &self.recovered {
            write!(f, "; recover {}", words::letter(*client))?;
        }
        if self.breaks > 0 {
            write!(f, "; {} broken session", self.breaks)?;
        }
        Ok(())
    }
}

/// A world to explore.
#[derive(Clone, Debug)]
pub struct World {
    /// For each key, its shard.
    pub shards: Vec<usize>,
    /// The lanes.
    pub lanes: Vec<Lane>,
    /// For each recoverer, the client that it recovers. The second recoverer of a client may die at any step.
    pub recovered: Vec<usize>,
    /// Largest number of sessions that break in a chain. The rest of the chain does not run, and the client gets no
    /// response.
    pub breaks: u8,
    /// The rules.
    pub rules: Rules,
    pub(super) transactions: Vec<Transaction>,
    /// For each transaction, its lane.
    pub(super) lane_of: Vec<usize>,
    /// For each lane, the number of its first transaction. Transactions are numbered from 1.
    pub(super) first_of: Vec<u8>,
    /// For each lane, the index of its entries in the logs.
    pub(super) entry_of: Vec<usize>,
    /// For each client, its id.
    pub(super) ids: Vec<usize>,
    pub(super) programs: Vec<Program>,
}

impl World {
    /// Creates a world in which nobody dies.
    ///
    /// # Panics
    /// If the world is larger than a state can be.
    pub fn new(rules: Rules, shards: &[usize], lanes: Vec<Lane>) -> World {
        assert!(
            shards.len() <= KEYS && shards.iter().all(|shard| *shard < SHARDS),
            "too many keys or shards"
        );
        assert!(lanes.len() <= LANES, "too many lanes");
        let transactions: Vec<Transaction> =
            lanes.iter().flat_map(|lane| lane.transactions.clone()).collect();
        assert!(transactions.len() <= TRANSACTIONS, "too many transactions");
        let clients = lanes.iter().map(|lane| lane.client + 1).max().unwrap_or(0);
        let mut ids: Vec<usize> = (0..clients).collect();
        let mut entry_of: Vec<usize> = (0..lanes.len()).collect();
        let (mut lane_of, mut first_of) = (Vec::new(), Vec::new());
        for (number, lane) in lanes.iter().enumerate() {
            first_of.push(lane_of.len() as u8 + 1);
            lane_of.extend(lane.transactions.iter().map(|_| number));
            if let Some(before) = lane.succeeds {
                ids[lane.client] = ids[before];
                let former = lanes.iter().position(|other| other.client == before).unwrap_or(number);
                entry_of[number] = entry_of[former];
            }
        }
        let mut world = World {
            shards: shards.to_vec(),
            lanes,
            recovered: Vec::new(),
            breaks: 0,
            rules,
            transactions,
            lane_of,
            first_of,
            entry_of,
            ids,
            programs: Vec::new(),
        };
        world.programs =
            (1..=world.transactions.len()).map(|number| Program::new(&world, number as u8)).collect();
        world
    }

    /// Lets a recoverer recover each of these clients.
    ///
    /// # Panics
    /// If there are too many recoverers, or if a client has too many lanes.
    pub fn recovering(self, clients: &[usize]) -> World {
        assert!(clients.len() <= RECOVERERS, "too many recoverers");
        let lanes = |client: &usize| self.lanes.iter().filter(|lane| lane.client == *client).count();
        assert!(clients.iter().all(|client| lanes(client) <= LANES_RECOVERED), "too many lanes");
        World { recovered: clients.to_vec(), ..self }
    }

    /// Lets this many sessions break.
    pub fn breaking(self, breaks: u8) -> World {
        World { breaks, ..self }
    }

    /// Replaces the rules.
    pub fn with(&self, rules: Rules) -> World {
        let (recovered, breaks) = (self.recovered.clone(), self.breaks);
        World { recovered, breaks, ..World::new(rules, &self.shards, self.lanes.clone()) }
    }

    /// Returns the transaction with this number.
    pub(super) fn transaction(&self, number: u8) -> &Transaction {
        &self.transactions[usize::from(number) - 1]
    }

    pub(super) fn program(&self, number: u8) -> &Program {
        &self.programs[usize::from(number) - 1]
    }

    /// Returns the lane of the transaction with this number.
    pub(super) fn lane_of(&self, number: u8) -> usize {
        self.lane_of[usize::from(number) - 1]
    }

    /// Returns the client of the transaction with this number.
    pub(super) fn client_of(&self, number: u8) -> usize {
        self.lanes[self.lane_of(number)].client
    }

    /// Returns the numbers of the transactions whose intents are written to the same entries as that of `number`.
    pub(super) fn sharing_entry(&self, entry: usize) -> impl Iterator<Item = u8> {
        let of = move |number: &u8| self.entry_of[self.lane_of(*number)] == entry;
        (1..=self.transactions.len() as u8).filter(of)
    }

    /// Returns the lanes of a recovered client.
    pub(super) fn lanes_of(&self, client: usize) -> impl Iterator<Item = usize> {
        (0..self.lanes.len()).filter(move |lane| self.lanes[*lane].client == client)
    }

    /// Whether a client may be fenced.
    pub(super) fn is_victim(&self, client: usize) -> bool {
        self.recovered.contains(&client)
    }

    /// Whether a client may hold the lease of its id: a client that takes over an id begins once the former holder is
    /// recovered.
    pub(super) fn may_begin(&self, state: &State, client: usize) -> bool {
        let lane = self.lanes.iter().find(|lane| lane.client == client);
        let Some(before) = lane.and_then(|lane| lane.succeeds) else { return true };
        let is_recovered = |(number, client): (usize, &usize)| {
            *client == before && state.recoverers[number].phase == recoverer::Phase::Over
        };
        self.rules.ids == Ids::AtOnce || self.recovered.iter().enumerate().any(is_recovered)
    }
}

/// State of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct State {
    /// Slots of the keys.
    pub slots: [Slot; KEYS],
    /// Logs: entries by their index and by shard.
    pub log: [[Entry; SHARDS]; LANES],
    /// For each client, the shards at which it is fenced, as bits.
    pub fenced: [u8; LANES],
    /// What lanes are doing.
    pub lanes: [client::State; LANES],
    /// What recoverers are doing.
    pub recoverers: [recoverer::State; RECOVERERS],
    /// What transactions did so far.
    pub history: [Record; TRANSACTIONS],
    /// Number of sessions that broke.
    pub broken: u8,
}

impl State {
    /// Returns the record of the transaction with this number.
    pub fn record(&self, number: u8) -> &Record {
        &self.history[usize::from(number) - 1]
    }

    pub(super) fn record_mut(&mut self, number: u8) -> &mut Record {
        &mut self.history[usize::from(number) - 1]
    }

    /// Whether a client is fenced at a shard.
    pub fn is_fenced(&self, client: usize, shard: usize) -> bool {
        self.fenced[client] >> shard & 1 == 1
    }
}

/// What a transaction did, for the judge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct Record {
    /// Its timestamp; zero until it has one.
    pub ts: Timestamp,
    /// Its outcome, as its client knows it.
    pub outcome: Outcome,
    /// The verdict of recoverers.
    pub verdict: Recovered,
    /// For each key, the number of the transaction whose value it read, plus 1; 0 if it has not read the key.
    pub read: [u8; KEYS],
}

/// Outcome of a transaction, as its client knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(u8)]
pub enum Outcome {
    /// The client has not decided.
    #[default]
    Open,
    /// All checks have passed.
    Decided,
    /// The client has reported success.
    Reported,
    /// The transaction aborts.
    Aborted,
}

/// Verdicts of recoverers on a transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(u8)]
pub enum Recovered {
    /// No recoverer had to decide.
    #[default]
    No,
    /// Committed.
    Committed,
    /// Aborted.
    Aborted,
    /// Recoverers did not agree.
    Both,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An op of a lane's transaction.
    Lane(usize, Op),
    /// The session of a lane's client with a shard breaks within a chain.
    Breaks(usize, usize),
    /// A lane's client aborts, and drops its requests without a response.
    Drops(usize),
    /// A lane's client clears its entry of a former transaction at a shard.
    Clears(usize, usize),
    /// An op of a recoverer.
    Recoverer(usize, Op),
    /// A recoverer dies.
    Dies(usize),
}

impl Model for World {
    type State = State;
    type Step = Step;

    fn start(&self) -> State {
        let mut state = State::default();
        for lane in 0..self.lanes.len() {
            client::start(self, &mut state, lane);
        }
        for number in 0..self.recovered.len() {
            recoverer::start(self, &mut state, number);
        }
        state
    }

    fn steps(&self, from: &State, mut visit: impl FnMut(Step, &State)) {
        for lane in 0..self.lanes.len() {
            client::steps(self, from, lane, &mut visit);
        }
        for number in 0..self.recovered.len() {
            recoverer::steps(self, from, number, &mut visit);
        }
    }

    fn wrong(&self, state: &State) -> Option<String> {
        judge::wrong(self, state)
    }

    fn wrong_at_end(&self, state: &State) -> Option<String> {
        judge::wrong_at_end(self, state)
    }

    fn words(&self, before: &State, step: Step, after: &State) -> String {
        words::words(self, before, step, after)
    }
}
