//! The family of transactional stores.
//!
//! The store lies on all nodes: each client has a session with each of them, and its tasks have handles of one client.
//! A store of FaSST with backups survives the loss of some nodes' memory. Recoverers then promote the backups, while
//! clients run transactions. For all other stores, the loss of one node's memory is the loss of the store: an operator
//! then creates another one.
//!
//! - `items`: the values, which prove themselves.
//! - `phases`, `phases_of_farm`, `phases_of_fasst`: the phases of PRISM-TX, of FaRM and of FaSST.
//!
//! One operation of the history is one transaction, which is tried once. The keys of its steps are those of the store's
//! contents: another store has other keys. After the faults have ended, a client reads all keys, and then updates each
//! key. Then no key may be between a prepare and its end, and no log entry may be in use.
//!
//! Invariant: a transaction of unknown outcome never ends in the history. Another client may commit it at any later
//! time: one that recovers its client.

mod items;
mod phases;
mod phases_of_farm;
mod phases_of_fasst;

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phases, Request, Tracked};
use crate::pool::SILENCE;
use crate::systems::System;
use crate::{Carrier, Choice, Drawn, Scene, leaves, values};
use farside_remote::fabric::Ran;
use farside_remote::{Capabilities, FabricError, NodeId};
use farside_sim::checker::{Checked, Checker};
use farside_sim::fault::Fault;
use farside_sim::history::transaction::{Ask, History, Outcome, Seen, Step};
use farside_sim::random::Random;
use farside_sim::serializable::workload::Workload;
use farside_sim::serializable::{self, Versions};
use farside_sim::world::{MICROS, MILLIS, Nanos, Turnstile};
use farside_systems::heal::{Action, Healed};
use farside_systems::lease::LeaseError;
use farside_systems::members;
use farside_systems::registry::{self, AnyTxn};
use farside_systems::stamps::StampError;
use farside_systems::store::StoreError;
use farside_systems::system::{Options, Sizing};
use farside_systems::txn::farm::{self, layout};
use farside_systems::txn::fasst;
use farside_systems::txn::{Committed, Left, Prepare, Transacting, Txn, TxnError, Version};
use items::{ELEMENT_LEN, Item, LEN_MIN};
use phases::{CLAIM, COMMIT, PHASES, PREPARE};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Largest number of members of a store.
const MEMBERS_MAX: u64 = 3;
/// Memory of each member in MiB: enough, and so little that it is exhausted.
const MEMBER_MIB: [u64; 2] = [48, 4];
/// Largest number of accounts, all of which some transactions read.
const ACCOUNTS_MAX: u64 = 6;
/// In crowded trials, half of the transactions use only this number of keys.
const HOT: u64 = 4;
/// Length of the longest value of a list, in bytes. A transaction that would make a list longer fails.
const LIST_MAX: usize = 8192;
/// In trials with large transactions, one in this many is large. Largest number of transactions that make one.
const LARGE_ONE_IN: u64 = 8;
const LARGE_MAX: u64 = 24;
/// In trials with long keys, the lengths of two subsequent keys differ by about the first number of bytes, and no key
/// is much longer than the second one.
const KEY_LEN_STEP: u64 = 167;
const KEY_LEN_MAX: u64 = 960;
/// Usual time, in nanoseconds, for which a client that thinks does so between two steps.
const THINKS: Nanos = 3 * MICROS;
/// Usual pause, in nanoseconds, after a conflict.
const PAUSE: Nanos = 20 * MICROS;
/// Number of attempts of a transaction after the faults have ended, and the pause in nanoseconds between two of them.
/// No other client is alive, but the leases of dead ones have yet to expire.
const ATTEMPTS: u32 = 100;
const LAST_PAUSE: Nanos = 2 * MILLIS;
/// Number of transactions of the last client that find no memory, each within 100 ms or more. After these, the client
/// sends no transaction that allocates.
const EXHAUSTED_MAX: u32 = 8;
/// One in this many transactions whose request was lost makes the client open its sessions anew.
const REOPENS_ONE_IN: u64 = 3;
/// One in this many operations is followed by the recovery of all dead clients.
const HEAL_ONE_IN: u64 = 40;
/// One in this many times a recoverer heals the store although nothing is to do.
const HEALS_NOTHING_ONE_IN: u64 = 8;
/// Time in nanoseconds within which a client frees the entries of its last transactions.
const FREED_WITHIN: Nanos = 2_000 * MILLIS;
/// Largest skew of a clock in ppm. Clocks that drift apart by 500 ms are of no use for timestamps.
const SKEW_PPM: u64 = 2_000;

/// A transactional store with the options that a seed has drawn for it.
pub(crate) struct Txns {
    /// Whether the serial order of all stores of the system agrees with the order in time.
    is_strict: bool,
    workload: Workload,
    sizing: Sizing,
    /// If transactions delete registers, the number of registers: each has a *witness*, the key that is as many keys
    /// after it. Else 0. A transaction that deletes a register writes its witness, and one that reads a register reads
    /// its witness, too. So the history shows which delete of unknown outcome was carried out.
    witnessed: u64,
    /// Longest filler of a value in bytes.
    filler_max: u64,
    /// Largest error of a wall clock in nanoseconds.
    wall_error: Nanos,
    /// Whether half of the transactions use few keys.
    has_hot_keys: bool,
    /// Whether some transactions have many keys.
    has_large: bool,
    /// One in this many transactions first reads all of its keys at the same time.
    fetch_one_in: u64,
    /// One in this many transactions locks some of the keys that it will write when it reads them; 0: none.
    lock_one_in: u64,
    /// One in this many steps is followed by a pause.
    think_one_in: u64,
    /// One in this many operations is the last one of its client.
    leave_one_in: u64,
    /// Whether the store has little memory.
    is_tight: bool,
    /// Whether keys have many lengths, so that their items without a value are of many size classes. If memory is
    /// little, it is soon full of keys alone, and no further key gets a slot.
    has_long_keys: bool,
    /// Number of transactions of the last client that have found no memory.
    exhausted: Cell<u32>,
    /// Number of members whose memory the store may lose at the same time.
    tolerated: usize,
    /// Usual pause of a recoverer in nanoseconds.
    recovers_after: Nanos,
    /// Sums of all clients' counters.
    counters: RefCell<BTreeMap<&'static str, u64>>,
}

/// Client of one task.
pub(crate) struct Client {
    txn: AnyTxn<Tracked>,
    shared: Shared,
    fabric: Tracked,
    /// Name of the store.
    name: String,
    /// The first key of the store's contents in the history.
    first_key: u64,
}

/// What the tasks of one client share.
#[derive(Clone, Default)]
pub(crate) struct Shared(Rc<All>);

#[derive(Default)]
struct All {
    /// Lets one task at a time open the store.
    gate: Turnstile,
    /// A handle, once a task has opened the store.
    first: RefCell<Option<AnyTxn<Tracked>>>,
    /// Whether the client is to close its sessions.
    leaves: Cell<bool>,
    /// Whether the client's own task runs.
    is_kept: Cell<bool>,
    /// The client's counters, as of the last operation.
    counted: RefCell<Vec<(&'static str, u64)>>,
}

/// Checker of the serial order of transactions, and of the amounts that they read.
pub(crate) struct Judge {
    order: serializable::Transactions,
    workload: Workload,
}

impl Checker for Judge {
    type Ask = Ask;

    const PROPERTY: &'static str = serializable::Transactions::PROPERTY;

    fn check(&self, history: &History) -> Checked<Ask> {
        let mut checked = self.order.check(history);
        let of_amounts = self.workload.check(history);
        checked.violated.extend(of_amounts.violated);
        checked.window = checked.window.or(of_amounts.window);
        checked
    }
}

impl Family for Txns {
    type Ask = Ask;
    type Client = Client;
    type Shared = Shared;
    type Checker = Judge;

    const SPANS: bool = true;
    const IS_REPLICATED: bool = false;

    fn drawn_nodes(system: System, random: &Random) -> u32 {
        match system.name() {
            // A replacement needs three members.
            fasst::KIND => [1, 2, 3, 3, 3, 3, 3, 5][random.below(8) as usize],
            _ => random.between(1, MEMBERS_MAX) as u32,
        }
    }

    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Txns {
        let is_farm = system.name() == farm::KIND;
        let has_locks = is_farm || system.name() == fasst::KIND;
        let (keys, clients) = (drawn.keys, u64::from(drawn.clients));
        let is_tight = drawn.faults.contains(&Fault::Exhaustion);
        let workload = match random.below(8) {
            0..3 => Workload::Registers { keys },
            // Long lists would take most of a small memory.
            3 | 4 if !is_tight => Workload::Lists { keys },
            5 | 6 => Workload::Bank { accounts: keys.clamp(2, ACCOUNTS_MAX) },
            _ => Workload::Pairs { pairs: keys.div_ceil(2) },
        };
        let is_of_registers = matches!(workload, Workload::Registers { .. });
        let witnessed = if is_of_registers && random.one_in(2) { keys } else { 0 };
        let filler_max = [0, 40, 400, 2_000][random.below(4) as usize];
        let filler_max = if is_tight { 2_000 } else { filler_max };
        let value_len = match workload {
            Workload::Lists { .. } => LIST_MAX,
            Workload::Registers { .. } | Workload::Bank { .. } | Workload::Pairs { .. } => {
                LEN_MIN + filler_max as usize
            }
        };
        // With short leases, ids and log entries are used again soon.
        let us = if random.one_in(3) { random.between(1_000, 3_000) } else { random.between(5_000, 20_000) };
        // If there are few ids, a client that restarts takes over the id of a dead one. The last client needs one, too.
        let ids = random.between(clients + 1, 2 * clients + 1) as u16;
        // One for each task, and for transactions that were dropped and are not done yet.
        let lanes = random.between(1, 2 * u64::from(drawn.tasks) + 1) as u16;
        let prepare = if random.one_in(2) { Prepare::Together } else { Prepare::Paper };
        let waits = random.one_in(3) && !has_locks;
        // With commit-wait, each transaction takes twice this time.
        let errors = [0, 100 * MICROS, if waits { MILLIS / 2 } else { 5 * MILLIS }, 40 * MILLIS];
        let wall_error = errors[random.below(if waits { 3 } else { 4 }) as usize];
        let clock_error = waits.then(|| Duration::from_nanos(wall_error + MICROS));
        let ids_and_lanes = Transacting { ids: Some(ids), lanes: Some(lanes), ..Transacting::NONE };
        let transacting = match has_locks {
            true => Transacting {
                backups: Some(random.below(u64::from(drawn.nodes)) as u8),
                line: is_farm.then(|| drawn_line(drawn.carrier, random)),
                ..ids_and_lanes
            },
            false => Transacting { prepare: Some(prepare), clock_error, ..ids_and_lanes },
        };
        let has_long_keys = is_tight && !has_locks && random.one_in(2);
        let losses = |backups: u8| usize::from(backups).min((drawn.nodes as usize - 1) / 2);
        let is_fasst = system.name() == fasst::KIND;
        Txns {
            is_strict: has_locks,
            tolerated: transacting.backups.filter(|_| is_fasst).map_or(0, losses),
            recovers_after: match is_fasst {
                true => [200 * MICROS, MILLIS, 5 * MILLIS][random.below(3) as usize],
                false => 0,
            },
            workload,
            sizing: Sizing {
                items: Some(keys.max(keys_of(workload)) + witnessed),
                value_len,
                lease: Some(Duration::from_micros(us)),
                transacting,
                ..Sizing::default()
            },
            witnessed,
            filler_max,
            wall_error,
            has_hot_keys: drawn.is_crowded,
            has_large: random.one_in(3),
            fetch_one_in: [1, 2, 10][random.below(3) as usize],
            think_one_in: [0, 2, 10][random.below(3) as usize],
            leave_one_in: [0, 10, 40][random.below(3) as usize],
            lock_one_in: if is_fasst { [1, 2, 2, 4][random.below(4) as usize] } else { 0 },
            is_tight,
            has_long_keys,
            exhausted: Cell::new(0),
            counters: RefCell::default(),
        }
    }

    fn tolerated(&self, _members: u32) -> usize {
        self.tolerated
    }

    fn recoverers(&self) -> u32 {
        if self.tolerated > 0 { 2 } else { 0 }
    }

    fn recovers_after(&self) -> Nanos {
        self.recovers_after
    }

    fn phase_of_recovery(request: Request<'_>, seen: u32) -> usize {
        phases_of_fasst::phase_of_recovery(request, seen)
    }

    /// Promotes backups and recovers dead clients, as `farside heal` does.
    async fn recover(&self, scene: &Scene, fabric: &Tracked) -> Result<(), String> {
        if !scene.configurations.is_unsettled() && !scene.world.random().one_in(HEALS_NOTHING_ONE_IN) {
            return Ok(());
        }
        match healed(scene, fabric).await.map_err(|error| error.to_string()) {
            Err(error) if error.contains("the same release") => {
                Err(format!("a recoverer did not understand a node: {error}"))
            }
            _ => Ok(()),
        }
    }

    async fn recover_all(&self, scene: &Scene, fabric: &Tracked) -> Result<(), String> {
        healed(scene, fabric).await.map_err(|error| error.to_string())?;
        scene.configurations.look(scene);
        match scene.configurations.is_unsettled() {
            true => Err(format!("the nodes hold: {}", scene.configurations.describe())),
            false => Ok(()),
        }
    }

    fn is_owned(&self) -> bool {
        true
    }

    /// The order in time is known as long as the clocks' errors have the bound that clients wait for.
    fn survives(&self, fault: Fault) -> bool {
        !self.waits() || !matches!(fault, Fault::ClockSkew | Fault::ClockJump)
    }

    fn wall_error(&self) -> Option<Nanos> {
        Some(self.wall_error)
    }

    fn skew_ppm(&self) -> u64 {
        SKEW_PPM
    }

    fn options(&self) -> Vec<Choice> {
        let Txns { workload, sizing, filler_max, wall_error, has_large, leave_one_in, .. } = self;
        let Transacting { ids, lanes, prepare, clock_error, backups, line, .. } = sizing.transacting;
        let [ids, lanes] = [ids, lanes].map(Option::unwrap_or_default);
        let lease = sizing.lease.unwrap_or_default().as_micros() as u64;
        let error = wall_error / MICROS;
        let name = match workload {
            Workload::Registers { .. } => "registers",
            Workload::Lists { .. } => "lists",
            Workload::Bank { .. } => "bank",
            Workload::Pairs { .. } => "pairs",
        };
        let waits = if clock_error.is_some() { "with commit-wait" } else { "without commit-wait" };
        let large = if *has_large { "some large transactions" } else { "small transactions" };
        let of_kind = match (prepare, backups, line) {
            (_, Some(backups), Some(line)) => vec![
                Choice::new("backups", backups, format!("backups {backups}")),
                Choice::new("line", line, format!("lines of {line} bytes")),
            ],
            (_, Some(backups), None) => vec![
                Choice::new("backups", backups, format!("backups {backups}")),
                Choice::new(
                    "lock_one_in",
                    self.lock_one_in,
                    format!("reads that lock in 1 in {} transactions", self.lock_one_in),
                ),
            ],
            (prepare, None, _) => {
                let prepare = if prepare == Some(Prepare::Paper) { "paper" } else { "together" };
                let long = self.has_long_keys;
                vec![
                    Choice::new("long_keys", long, if long { "long keys" } else { "short keys" }.into()),
                    Choice::new("prepare", prepare, format!("prepare {prepare}")),
                    Choice::new("commit_wait", clock_error.is_some(), waits.into()),
                ]
            }
        };
        let mut options = vec![
            Choice::new("workload", name, format!("workload {name}")),
            Choice::new(
                "deletes",
                self.witnessed > 0,
                if self.witnessed > 0 { "with deletes" } else { "without deletes" }.into(),
            ),
            Choice::new("wall_error_us", error, format!("wall clocks wrong by up to {error} us")),
            Choice::new("lease_us", lease, format!("lease {lease} us")),
            Choice::new("ids", ids, format!("ids {ids}")),
            Choice::new("lanes", lanes, format!("lanes {lanes}")),
            Choice::new("filler_max", *filler_max, format!("values filled with up to {filler_max} bytes")),
            Choice::new("large", *has_large, large.into()),
            Choice::new("leave_one_in", *leave_one_in, leaves(*leave_one_in)),
        ];
        options.splice(2..2, of_kind);
        options
    }

    fn parameters(&self) -> String {
        String::new()
    }

    fn quota_mib(&self, drawn: &Drawn) -> Option<u64> {
        let [enough, little] = MEMBER_MIB;
        Some(if self.is_tight { little } else { enough } * u64::from(drawn.nodes))
    }

    fn sizing(&self) -> Sizing {
        self.sizing
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counters.borrow().iter().map(|(name, count)| (*name, *count)).collect()
    }

    /// Although clients use chains only, a transaction does not end with its session: others may commit it.
    fn is_one_sided(&self) -> bool {
        false
    }

    fn long_pause_one_in(&self, random: &Random) -> u64 {
        random.between(2, 4)
    }

    fn phases(system: System) -> &'static Phases {
        match system.name() {
            farm::KIND => &phases_of_farm::PHASES,
            fasst::KIND => &phases_of_fasst::PHASES,
            _ => &PHASES,
        }
    }

    /// After a commit that found no memory, the client aborts.
    fn exhausted_in(&self, last: usize) -> usize {
        if [CLAIM, PREPARE].contains(&last) { last } else { COMMIT }
    }

    fn checker(&self) -> Judge {
        let order = serializable::Transactions {
            versions: Versions::OfTransactions,
            real_time: self.is_strict || self.waits(),
        };
        Judge { order, workload: self.workload }
    }

    async fn open(&self, seat: Seat<'_, Txns>, _node: NodeId, name: &str) -> Result<Client, Failure> {
        let (scene, shared, fabric) = (seat.scene, seat.shared.clone(), seat.fabric());
        let first_key = seat.first_key;
        let _passage = shared.0.gate.enter().await;
        let another = shared.0.first.borrow().as_ref().map(AnyTxn::another);
        let (theirs, client_name) = (fabric.clone(), name);
        let name = name.to_owned();
        let client = |txn| Client { txn, shared: shared.clone(), fabric: theirs, name, first_key };
        if let Some(txn) = another {
            return Ok(client(txn));
        }
        let options = Options {
            entropy: scene.world.random().bits(),
            silence: Some(Duration::from_nanos(SILENCE)),
            ..Options::NONE
        };
        let opened = AnyTxn::open_in(fabric, scene.sites.len() as u32, client_name, &options).await;
        let txn = opened.map_err(|error| failed(scene, error.into()))?;
        let (theirs, keeper) = (shared.clone(), txn.keeper());
        theirs.0.is_kept.set(true);
        scene.world.spawn(seat.process, async move {
            keeper.await;
            theirs.0.is_kept.set(false);
        });
        *shared.0.first.borrow_mut() = Some(txn.another());
        Ok(client(txn))
    }

    /// Closes the client. Its own task ends once it has freed the client's log entries, so this waits for the end of
    /// all outages.
    async fn leave(&self, scene: &Scene, shared: &Shared) {
        while scene.outages.are_going_on(scene) {
            scene.world.sleep(MILLIS).await;
        }
        shared.0.first.take();
        while shared.0.is_kept.get() {
            scene.world.sleep(MILLIS / 10).await;
        }
    }

    /// Recovers all dead clients. Then no key may be between a prepare and its end, and no log entry may be in use.
    async fn heal(&self, scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        recover(scene, client).await?;
        let until = scene.world.now() + FREED_WITHIN;
        loop {
            let left = client.txn.left().await.map_err(|error| failed(scene, error))?;
            if left == Left::default() {
                return Ok(());
            }
            if scene.world.now() > until {
                let Left { unsettled, open, outdated } = left;
                let left = format!(
                    "{unsettled} keys are unsettled, {open} log entries are in use, and {outdated} copies are outdated"
                );
                return Err(failure(Ran::No, FailureKind::Wrong, left));
            }
            scene.world.sleep(MILLIS).await;
        }
    }

    fn draw(&self, scene: &Scene, client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let mut tag = scene.tags.get();
        let Ask(mut steps) = self.workload.draw(random, &mut tag);
        let may_be_large = matches!(self.workload, Workload::Registers { .. } | Workload::Lists { .. });
        if self.has_large && may_be_large && random.one_in(LARGE_ONE_IN) {
            for _ in 0..random.below(LARGE_MAX) {
                steps.extend(self.workload.draw(random, &mut tag).0);
            }
        }
        scene.tags.set(tag);
        if self.has_hot_keys && !matches!(self.workload, Workload::Bank { .. }) && random.one_in(2) {
            steps = steps.into_iter().map(|step| at(step, step.key() % HOT)).collect();
        }
        let steps = steps.into_iter().flat_map(|step| self.with_witness(step, || scene.next_tag())).collect();
        (0, of_contents(client.first_key, Ask(steps)))
    }

    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Client,
        who: u32,
        _key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let is_last_client = who == scene.drawn.clients;
        for attempt in 1.. {
            let performed = self.carry_out(scene, client, ask).await;
            if !matches!(performed, Ok(Ok(Outcome::Committed(_)))) {
                // An idle client holds no locks.
                client.txn.begin();
            }
            self.count(client);
            let error = match performed {
                Ok(outcome) => {
                    return outcome.map_err(|message| failure(Ran::Unknown, FailureKind::Wrong, message));
                }
                Err(error) => error,
            };
            if error == TxnError::Conflict {
                scene.count(|counts| counts.conflicts += 1);
            }
            let failure = failed(scene, error);
            if is_last_client && self.is_tight && failure.kind == FailureKind::OutOfMemory {
                self.exhausted.set(self.exhausted.get() + 1);
                return Ok(Outcome::Failed);
            }
            if failure.kind == FailureKind::Declined {
                // A node that is down refuses requests at once.
                let pause = if is_last_client { LAST_PAUSE } else { scene.world.random().heavy(PAUSE) };
                scene.world.sleep(pause).await;
            }
            if failure.kind != FailureKind::Declined || !is_last_client || attempt == ATTEMPTS {
                return Err(failure);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// At times recovers the dead clients that are in nobody's way, or makes the client close its sessions.
    async fn trespass(&self, scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        if scene.world.random().one_in(HEAL_ONE_IN) {
            let healed = recover(scene, client).await;
            // A recovery fails if a node does not answer.
            healed
                .or_else(|failure| if failure.kind == FailureKind::Wrong { Err(failure) } else { Ok(()) })?;
        }
        let leaves = &client.shared.0.leaves;
        leaves.set(leaves.get() || scene.world.random().one_in(self.leave_one_in));
        match leaves.get() {
            true => Err(failure(Ran::No, FailureKind::Over, "the client leaves".to_owned())),
            false => Ok(()),
        }
    }

    /// Reads each key alone, and then, if they are few, all together. Then updates each key.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        let first_key = crate::work::first_key(&scene.sites[0], scene.sites[0].contents.get());
        let keys = keys_of(self.workload);
        let read = |key| self.with_witness(Step::Read(key), || unreachable!("reads have no tags"));
        let mut asks: Vec<Ask> = (0..keys).map(|key| Ask(read(key))).collect();
        if keys <= HOT * 2 {
            asks.push(Ask((0..keys).flat_map(read).collect()));
        }
        asks.extend((0..keys).map(|key| {
            let tag = scene.next_tag();
            let change = match self.workload {
                Workload::Lists { .. } => Step::Append { key, tag },
                Workload::Registers { .. } | Workload::Bank { .. } | Workload::Pairs { .. } => {
                    Step::Write { key, tag }
                }
            };
            let mut steps = read(key);
            steps.push(change);
            Ask(steps)
        }));
        asks.into_iter().map(|ask| (0, of_contents(first_key, ask))).collect()
    }
}

impl Txns {
    /// Whether commits wait for their timestamps.
    fn waits(&self) -> bool {
        self.sizing.transacting.clock_error.is_some()
    }

    /// Returns the bytes of a key.
    fn name_of(&self, number: u64) -> Vec<u8> {
        let mut key = values::key(number);
        if self.has_long_keys {
            key.resize(key.len() + (number * KEY_LEN_STEP % KEY_LEN_MAX) as usize, b'.');
        }
        key
    }

    /// Returns a step with that on the witness of its key, if the key has one. Without witnesses, nothing is deleted.
    fn with_witness(&self, step: Step, tag: impl FnOnce() -> u64) -> Vec<Step> {
        match (step, self.witnessed) {
            (Step::Delete(key), 0) => vec![Step::Read(key)],
            (_, 0) | (Step::Write { .. } | Step::Append { .. }, _) => vec![step],
            (Step::Read(key), keys) => vec![step, Step::Read(key + keys)],
            (Step::Delete(key), keys) => vec![step, Step::Write { key: key + keys, tag: tag() }],
        }
    }

    /// Tries a transaction once. The inner error is a violation.
    async fn carry_out(
        &self,
        scene: &Scene,
        client: &mut Client,
        ask: &Ask,
    ) -> Result<Result<Outcome, String>, TxnError> {
        let random = scene.world.random();
        let Client { txn, first_key, .. } = client;
        let bytes_of = |key: u64| self.name_of(key - *first_key);
        let may_allocate = self.exhausted.get() < EXHAUSTED_MAX;
        if !may_allocate && !ask.0.iter().all(|step| matches!(step, Step::Read(_))) {
            return Ok(Ok(Outcome::Failed));
        }
        txn.begin();
        let locks = self.lock_one_in > 0 && random.one_in(self.lock_one_in);
        let is_written = |key: u64| {
            let mut steps = ask.0.iter().filter(|step| !matches!(step, Step::Read(_)));
            steps.any(|step| step.key() == key)
        };
        if random.one_in(self.fetch_one_in) {
            let is_read = |step: &&Step| matches!(step, Step::Read(_) | Step::Append { .. });
            let keys: Vec<u64> = ask.0.iter().filter(is_read).map(|step| step.key()).collect();
            let (to_write, to_read): (Vec<u64>, Vec<u64>) =
                keys.iter().partition(|key| locks && is_written(**key));
            let [to_write, to_read] =
                [to_write, to_read].map(|keys| keys.into_iter().map(bytes_of).collect::<Vec<_>>());
            let [to_write, to_read] =
                [&to_write, &to_read].map(|keys| keys.iter().map(Vec::as_slice).collect::<Vec<_>>());
            txn.fetch_to_write(&to_write, &to_read).await?;
        }
        let (mut seen, mut amounts, mut to_write) = (Vec::new(), Vec::new(), None);
        for step in &ask.0 {
            let key = bytes_of(step.key());
            if locks && is_written(step.key()) && random.one_in(2) {
                txn.fetch_to_write(&[&key], &[]).await?;
            }
            seen.push(match *step {
                Step::Read(_) => {
                    let (found, version) = match read(txn, &key).await? {
                        Ok(read) => read,
                        Err(violation) => return Ok(Err(violation)),
                    };
                    amounts.push(found.as_ref().map_or(self.workload.start(), |found| found.amount));
                    self.found(found, version)
                }
                Step::Write { tag, .. } => {
                    // In all workloads that compute with amounts, reads come first.
                    let left = match &mut to_write {
                        Some(left) => left,
                        none => match self.amounts(ask, &amounts) {
                            Some(amounts) => none.insert(amounts.into_iter()),
                            None => return Ok(Ok(Outcome::Failed)),
                        },
                    };
                    let amount = left.next().expect("an amount for each write");
                    let item = Item { tag, amount, elements: Vec::new() };
                    txn.put(&key, &item.encode(random.below(self.filler_max + 1) as usize))?;
                    Seen::Wrote { version: OWN, amount }
                }
                Step::Delete(_) => {
                    txn.delete(&key)?;
                    Seen::Wrote { version: OWN, amount: self.workload.start() }
                }
                Step::Append { tag, .. } => {
                    let elements = match read(txn, &key).await? {
                        Ok((found, _)) => found.map_or(Vec::new(), |found| found.elements),
                        Err(violation) => return Ok(Err(violation)),
                    };
                    let elements = [&elements[..], &[tag]].concat();
                    let room = LIST_MAX.saturating_sub(LEN_MIN + elements.len() * ELEMENT_LEN) as u64;
                    let filler = random.below(room.min(self.filler_max) + 1) as usize;
                    txn.put(&key, &Item { tag, amount: 0, elements }.encode(filler))?;
                    Seen::Appended
                }
            });
            if random.one_in(self.think_one_in) {
                scene.world.sleep(random.heavy(THINKS)).await;
            }
        }
        // A transaction that prepares claims the slots of absent keys.
        let is_absent = |seen: &Seen| matches!(seen, Seen::Absent { version: 0 });
        let prepares = seen.len() > 1 || self.waits();
        if !may_allocate && prepares && seen.iter().any(is_absent) {
            return Ok(Ok(Outcome::Failed));
        }
        let Committed { version } = txn.commit().await?;
        if version.is_none() && !ask.0.iter().all(|step| matches!(step, Step::Read(_))) {
            return Ok(Err("a transaction that has written was committed without a version".to_owned()));
        }
        // What the transaction has written has the version of its commit.
        let own = version.map_or(0, |Version(version)| version);
        seen.iter_mut().for_each(|seen| match seen {
            Seen::Value { version, .. } | Seen::Absent { version } | Seen::Wrote { version, .. } => {
                if *version == OWN {
                    *version = own;
                }
            }
            Seen::List(_) | Seen::Appended => {}
        });
        Ok(Ok(Outcome::Committed(seen)))
    }

    /// Returns the amounts for the transaction's writes. `None` if it must not commit.
    fn amounts(&self, ask: &Ask, read: &[i64]) -> Option<Vec<i64>> {
        // The update of a key at the end keeps its amount.
        match ask.0[..] {
            [Step::Read(_), Step::Write { .. }] => Some(read.to_vec()),
            _ => self.workload.amounts(ask, read),
        }
    }

    fn found(&self, found: Option<Item>, version: Option<Version>) -> Seen {
        let version = version.map_or(OWN, |Version(version)| version);
        match (found, self.workload) {
            // A list without elements has no value.
            (None, Workload::Lists { .. }) => Seen::List(Vec::new()),
            (None, _) => Seen::Absent { version },
            (Some(Item { elements, .. }), Workload::Lists { .. }) => Seen::List(elements),
            (Some(Item { tag, amount, .. }), _) => Seen::Value { tag, version, amount },
        }
    }

    /// Adds what a client has counted since its last operation.
    fn count(&self, client: &Client) {
        let (now, mut before) = (client.txn.counters(), client.shared.0.counted.borrow_mut());
        let mut sums = self.counters.borrow_mut();
        for (place, &(name, count)) in now.iter().enumerate() {
            let counted = before.get(place).map_or(0, |(_, count)| *count);
            *sums.entry(name).or_default() += count.saturating_sub(counted);
        }
        *before = now;
    }
}

/// Number of keys of a workload, without witnesses.
fn keys_of(workload: Workload) -> u64 {
    match workload {
        Workload::Registers { keys } | Workload::Lists { keys } | Workload::Bank { accounts: keys } => keys,
        Workload::Pairs { pairs } => 2 * pairs,
    }
}

/// Draws the size of a line of FaRM's objects. Longer lines need a NIC, which reads a cache line as a whole.
fn drawn_line(carrier: Carrier, random: &Random) -> u8 {
    let may_be_whole = carrier.capabilities().contains(Capabilities::WHOLE_LINES);
    if may_be_whole && random.one_in(2) { layout::WHOLE_LINE } else { layout::LINES[0] }
}

/// Stands for the version of the transaction's own writes, until it is committed.
const OWN: u64 = u64::MAX;

/// What a read has found, and its version.
type Found = (Option<Item>, Option<Version>);

/// Reads a key. The inner error is a violation.
async fn read(txn: &mut AnyTxn<Tracked>, key: &[u8]) -> Result<Result<Found, String>, TxnError> {
    let read = txn.read(key).await?;
    let Some(value) = read.value else { return Ok(Ok((None, read.version))) };
    Ok(match Item::decode(value) {
        Some(item) => Ok((Some(item), read.version)),
        None => Err(format!("a read returned {} bytes that nobody has put", value.len())),
    })
}

/// Recovers all dead clients of a store.
async fn recover(scene: &Scene, client: &Client) -> Result<(), Failure> {
    let (fabric, nodes) = (&client.fabric, scene.sites.len() as u32);
    let options = Options { entropy: scene.world.random().bits(), ..Options::NONE };
    let healed = async {
        let members = members::open(fabric, nodes, &client.name).await?;
        registry::heal(fabric.clone(), &members, &options).await
    };
    healed.await.map(drop).map_err(|error: StoreError| failed(scene, error.into()))
}

/// Heals the store.
///
/// # Errors
/// The store, or a member of it, was left as it is.
async fn healed(scene: &Scene, fabric: &Tracked) -> Result<(), StoreError> {
    let (nodes, entropy) = (scene.sites.len() as u32, scene.world.random().bits());
    let (name, mut left) = (scene.sites[0].store_name(), None);
    let tell = |told: Healed| {
        if let Action::Left(error) = told.action {
            left = Some(error);
        }
    };
    let seen = farside_systems::heal::heal(fabric, nodes, Some(&name), Duration::ZERO, entropy, tell).await?;
    let silent = seen.silent.into_iter().map(|(_, error)| error).next();
    left.or(silent).map_or(Ok(()), Err)
}

/// Returns the same step on another key.
fn at(step: Step, key: u64) -> Step {
    match step {
        Step::Read(_) => Step::Read(key),
        Step::Write { tag, .. } => Step::Write { key, tag },
        Step::Delete(_) => Step::Delete(key),
        Step::Append { tag, .. } => Step::Append { key, tag },
    }
}

/// Returns a transaction on the keys of a store's contents in the history.
fn of_contents(first_key: u64, Ask(steps): Ask) -> Ask {
    Ask(steps.into_iter().map(|step| at(step, first_key + step.key())).collect())
}

/// Returns the failure of a transaction.
fn failed(scene: &Scene, error: TxnError) -> Failure {
    let (ran, message) = (error.ran(), error.to_string());
    let has_struck = |faults: &[Fault]| faults.iter().any(|fault| scene.struck.of(*fault) > 0);
    let kind = match &error {
        TxnError::OutOfMemory => FailureKind::OutOfMemory,
        // A client that takes over an id begins above all timestamps that the id's last holder has reserved. If clients
        // come and go fast, these soon lie far ahead.
        TxnError::Conflict
        | TxnError::WritesLength { .. }
        | TxnError::ValueLength { .. }
        | TxnError::PairLength { .. }
        | TxnError::Stamp(StampError::Ahead { .. }) => FailureKind::Declined,
        TxnError::NotKept { .. } | TxnError::Lost | TxnError::Lease(LeaseError::Lost) => FailureKind::Over,
        TxnError::Lease(LeaseError::NoneFree) => FailureKind::NoIds,
        // The keys of a former configuration were revoked.
        TxnError::Lease(LeaseError::Refused(_)) | TxnError::Refused(_)
            if scene.is_replicated && has_struck(&[Fault::NodeLoss]) =>
        {
            FailureKind::Over
        }
        TxnError::Lease(LeaseError::Refused(status)) | TxnError::Refused(status) => {
            let message = format!("a client was denied an access that it is allowed: {status}");
            return failure(ran, FailureKind::Refused, message);
        }
        // An operator that does not reach the first member drops the others, which is a loss for those that still find
        // the first one.
        TxnError::Store(StoreError::MemoryLost { .. })
            if !has_struck(&[Fault::NodeLoss, Fault::Revocation]) =>
        {
            return failure(ran, FailureKind::Wrong, format!("no node has lost its memory: {message}"));
        }
        TxnError::Store(StoreError::Fabric(error))
        | TxnError::Lease(LeaseError::Fabric(error))
        | TxnError::Stamp(StampError::Lease(LeaseError::Fabric(error)))
        | TxnError::Fabric(error) => lost(scene, error),
        TxnError::Stamp(StampError::Lease(error)) => {
            return Failure { ran, ..failed(scene, TxnError::Lease(error.clone())) };
        }
        // The client has given up its lease.
        TxnError::Unknown(error) => {
            let inner = failed(scene, (**error).clone());
            match inner.kind {
                FailureKind::Wrong | FailureKind::Refused => return Failure { ran, ..inner },
                _ => FailureKind::Over,
            }
        }
        // What a client that opens the store has found.
        TxnError::Store(StoreError::Gone(reason)) if reason.contains("the store is damaged") => {
            FailureKind::Wrong
        }
        TxnError::Store(_) => FailureKind::Over,
        TxnError::KeyLength(_)
        | TxnError::Doomed
        | TxnError::TableFull
        | TxnError::Lease(LeaseError::Exhausted)
        | TxnError::TooOld
        | TxnError::Damaged(_) => FailureKind::Wrong,
    };
    failure(ran, kind, message)
}

/// Returns what follows from a lost request. The pool opens the next session itself, so most clients may go on.
fn lost(scene: &Scene, error: &FabricError) -> FailureKind {
    match error.is_fenced() || scene.world.random().one_in(REOPENS_ONE_IN) {
        true => FailureKind::Over,
        false => FailureKind::Declined,
    }
}

fn failure(ran: Ran, kind: FailureKind, message: String) -> Failure {
    Failure { ran, kind, message }
}
